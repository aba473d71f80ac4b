"""Gather and scatter in plain loops: the specification that every faster way is checked against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu.layout import PageLayout


def gather(layers: Sequence[torch.Tensor], block_ids: Sequence[int]) -> list[torch.Tensor]:
    """The pages of these blocks, each a new contiguous tensor of the layout's ``page_shape`` on the CPU.

    Args:
        layers: as :meth:`gpu.layout.PageLayout.of` takes them.
        block_ids: the blocks, each between 0 and ``num_blocks - 1``.
    """
    layout = PageLayout.of(layers)
    pages = []
    for block_id in block_ids:
        page = torch.empty(layout.page_shape, dtype=layout.dtype)
        for layer, kv in enumerate(layers):
            for key_or_value in range(2):
                for token in range(layout.block_size):
                    for head in range(layout.kv_heads):
                        page[layer, key_or_value, token, head] = kv[key_or_value, block_id, token, head]
        pages.append(page)
    return pages


def scatter(pages: Sequence[torch.Tensor], layers: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
    """Write pages of the layout's ``page_shape`` into the blocks given, one page a block, and touch nothing else."""
    layout = PageLayout.of(layers)
    for page, block_id in zip(pages, block_ids, strict=True):
        for layer, kv in enumerate(layers):
            for key_or_value in range(2):
                for token in range(layout.block_size):
                    for head in range(layout.kv_heads):
                        kv[key_or_value, block_id, token, head] = page[layer, key_or_value, token, head]
