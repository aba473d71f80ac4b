"""The KV cache memory: one buffer for each place of a layer in its group, shared by all groups.

::

                 buffer 0                buffer 1
    group 0      layer 0 (full)          layer 4 (full)
    group 1      layer 1 (window)        layer 3 (window)
    group 2      layer 5 (window)        -

A block id names one page in each buffer. It belongs to one group at a time, and so do those pages: which layers write
there, and in which shape, changes with the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.connector.blocks.cache_config import KVCacheConfig
from kvstore.errors import ConfigError
from kvstore.gpu.paged_kv import PagedKV

DTYPE = torch.float32
"""Of weights, of what is cached and of logits, whatever torch's default is."""


class KVCache:
    """The blocks' memory, zeros at first.

    Args:
        config: groups and number of blocks.
        device: where the memory is.

    Raises:
        ConfigError: groups whose pages differ in size, or whose pages are no whole number of elements.
    """

    def __init__(self, config: KVCacheConfig, device: torch.device | str = "cpu") -> None:
        self.groups = config.kv_cache_groups
        page_sizes = {group.kv_cache_spec.page_size_bytes for group in self.groups}
        if len(page_sizes) != 1:
            raise ConfigError(f"the groups must have pages of one size a layer, got {sorted(page_sizes)} bytes")
        (page_size,) = page_sizes
        if page_size % DTYPE.itemsize:
            raise ConfigError(f"a page of {page_size} bytes is no whole number of {DTYPE} elements")
        places = max(len(group.layer_names) for group in self.groups)
        shape = (config.num_blocks, page_size // DTYPE.itemsize)
        buffers = [torch.zeros(shape, dtype=DTYPE, device=device) for _ in range(places)]
        self._buffers = buffers
        self.group_of: dict[str, int] = {}
        """The group of each layer."""
        self.rows: dict[str, torch.Tensor] = {}
        """For each layer ``(num_blocks, elements)`` float32: what it has in each block, the padding left out."""
        for number, group in enumerate(self.groups):
            elements = group.kv_cache_spec.unpadded_page_size_bytes // DTYPE.itemsize
            for name, buffer in zip(group.layer_names, buffers, strict=False):
                self.group_of[name] = number
                self.rows[name] = buffer[:, :elements]

    def zero(self, block_ids: Sequence[int]) -> None:
        """Forget what these blocks hold, of whichever group they are."""
        for buffer in self._buffers:
            buffer[list(block_ids)] = 0.0

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Give blocks the whole content of others, in each layer of their group.

        Args:
            copies: source and destination; no destination is the source of another one.
        """
        if not copies:
            return
        sources, destinations = (list(ids) for ids in zip(*copies, strict=True))
        for buffer in self._buffers:
            buffer[destinations] = buffer[sources]

    def pages(self, group: int, kv_heads: int = 0) -> PagedKV:
        """A group's blocks as pages, each ``[layer][element]``.

        Args:
            group: its number.
            kv_heads: heads of keys and values; 0: the group's blocks are states.
        """
        rows = [self.rows[name] for name in self.groups[group].layer_names]
        if not kv_heads:
            return PagedKV(rows, "block dim")
        block_size = self.groups[group].kv_cache_spec.block_size
        return PagedKV([row.view(len(row), 2, block_size, kv_heads, -1) for row in rows], "block kv token head dim")
