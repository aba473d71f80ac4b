"""What SGLang's host pool lacks on a CPU: pinned memory, and the copies between the device pool and the host pool.

Both pools are plain memory of this process here, so each copy is an indexed assignment. Names and argument names
are those that the host pool calls; the meaning follows from the shapes of the buffers:

  device, per layer   [slots, heads, dim]
  layer_first         [layers][slots, heads, dim]            page_first         [slots, layers, heads, dim]
  page_first_direct   [pages, layers, page, heads, dim]
"""

import ctypes

import torch


def host_memory(module):
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # SGLang keeps 10 GiB of the host free


def pinning(module):
    module._cuda_host_register = lambda *args, **kwargs: None


def plain_memory(module):
    def unpinned(make):
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    for name in ("tensor", "zeros", "empty", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args: self


def latent_attention(module):
    # torch_native attends to what lies in the pool, which is latents: so every step is the absorbed form, also that of
    # a prompt of which nothing is known yet
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


# --hicache-io-backend direct: buffers come as tensors


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    s, d = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[d] = src[s]


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    s, d = src_indices.long(), dst_indices.long()
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[d] = src[s // page_size, layer_id, s % page_size]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    s, d = src_indices.long(), dst_indices.long()
    layers = len(src_ptrs) // len(dst_ptrs)  # all of K, then all of V
    for i, src in enumerate(src_ptrs):
        dst_ptrs[i // layers][d // page_size, i % layers, d % page_size] = src[s]


# --hicache-io-backend kernel: the device side of a store comes as a table of addresses, one per layer


def _rows(address, rows, width):
    return torch.frombuffer((ctypes.c_uint8 * (rows * width)).from_address(address), dtype=torch.uint8).view(
        rows, width
    )


def _bytes(tensor, width):
    return tensor.view(torch.uint8).reshape(-1, width)


def transfer_kv_all_layer_lf_pf(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    s, d = src_indices.long(), dst_indices.long()
    rows = int(s.max()) + 1
    for table, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        out = dst.view(torch.uint8).reshape(-1, num_layers, item_size)
        assert out.data_ptr() == dst.data_ptr() and dst_layout_dim == num_layers * item_size
        for layer, address in enumerate(table.tolist()):
            out[d, layer] = _rows(address, rows, item_size)[s]


def transfer_kv_per_layer_pf_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    s, d = src_indices.long(), dst_indices.long()
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        _bytes(dst, item_size)[d] = src.view(torch.uint8).reshape(-1, src_layout_dim // item_size, item_size)[
            s, layer_id
        ]


def transfer_kv_all_layer(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers, **_
):
    s, d = src_indices.long(), dst_indices.long()
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for src, dst in zip(sources.tolist(), targets.tolist(), strict=True):
            _rows(dst, int(d.max()) + 1, item_size)[d] = _rows(src, int(s.max()) + 1, item_size)[s]


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_):
    s, d = src_indices.long(), dst_indices.long()
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        _bytes(dst, item_size)[d] = _bytes(src, item_size)[s]


# Of latent attention: one buffer, of a latent and a rotated key, instead of keys and values


def transfer_kv_all_layer_mla_lf_pf(
    src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **_
):
    s, d = src_indices.long(), dst_indices.long()
    rows = int(s.max()) + 1
    out = dst.view(torch.uint8).reshape(-1, num_layers, item_size)
    assert out.data_ptr() == dst.data_ptr() and dst_layout_dim == num_layers * item_size
    for layer, address in enumerate(src_layers.tolist()):
        out[d, layer] = _rows(address, rows, item_size)[s]


def transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_):
    s, d = src_indices.long(), dst_indices.long()
    _bytes(dst, item_size)[d] = src.view(torch.uint8).reshape(-1, src_layout_dim // item_size, item_size)[s, layer_id]


COPIES = (
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_all_layer,
    transfer_kv_per_layer,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_per_layer_mla_pf_lf,
)


def copies(module):
    for copy in COPIES:
        setattr(module, copy.__name__, copy)
    for name in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost"):
        if hasattr(module, name):
            _unpin(getattr(module, name))


def _unpin(pool):
    """Of buffers for one page, into which SGLang's own backends read: pinned memory is that of a device's driver."""
    pinned = pool.get_dummy_flat_data_page

    def get_dummy_flat_data_page(self):
        was, self.pin_memory = self.pin_memory, False
        try:
            return pinned(self)
        finally:
            self.pin_memory = was

    pool.get_dummy_flat_data_page = get_dummy_flat_data_page
