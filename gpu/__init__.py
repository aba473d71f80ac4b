"""Device copies between an engine's paged KV tensors and contiguous pages."""

if __name__ != "kvstore.gpu":  # under two names every module would be there twice, with two states
    raise ImportError("gpu is kvstore.gpu: import it by that name")
