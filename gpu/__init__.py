"""Device copies between an engine's paged KV tensors and contiguous pages."""
