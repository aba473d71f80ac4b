"""An engine's blocks as rows of bytes, which are what pages are copied from and to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kvstore.connector.engine.groups import layers_of
from kvstore.errors import ConfigError, ResourceError


def rows_by_part(group: Any, blocks: Mapping[str, torch.Tensor], parts: int) -> list[list[torch.Tensor]]:
    """A cache group's blocks as rows of bytes (:func:`rows_of`), by part and layer.

    Args:
        group: a ``KVCacheGroupSpec``.
        blocks: of each of its layers, ``(blocks, heads, tokens, elements)`` where they are cut.
        parts: into how many ranges of KV heads they are cut; 0: not at all.

    Raises:
        ConfigError: they can't be cut so.
        ResourceError: a block is not one run of bytes.
    """
    if not parts:
        return [[rows_of(blocks[name], spec.page_size_bytes) for name, spec in layers_of(group)]]
    rows: list[list[torch.Tensor]] = [[] for _ in range(parts)]
    for name, spec in layers_of(group):
        of_layer, heads = blocks[name], getattr(spec, "num_kv_heads", 1)
        if heads % parts:
            raise ConfigError(f"kv_parts: a rank's {heads} KV heads of {name} can't be cut into {parts} parts")
        if of_layer.dim() != 4 or of_layer.shape[1] != heads:
            raise ConfigError(
                f"kv_parts: blocks of shape {tuple(of_layer.shape[1:])} of {name} don't show their KV heads"
            )
        for part, cut in enumerate(torch.split(of_layer, heads // parts, 1)):
            try:
                rows[part].append(rows_of(cut, cut[0].numel() * cut.element_size()))
            except ResourceError as error:
                raise ConfigError(
                    f"kv_parts: the KV heads of {name} do not come first in a block (strides {of_layer.stride()[1:]}):"
                    " VLLM_KV_CACHE_LAYOUT=LBHNC is needed"
                ) from error
    return rows


def rows_of(blocks: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """A layer's blocks as rows of bytes: ``(blocks, page_bytes)``, in place.

    Args:
        blocks: one in each element of the first dimension.
        page_bytes: of one block, padding included.

    Raises:
        ResourceError: a block is not one run of bytes.
    """
    size = blocks.element_size()
    inside = list(zip(blocks.shape[1:], blocks.stride()[1:], strict=True))
    reach = 1 + sum((count - 1) * stride for count, stride in inside)
    elements = math.prod(count for count, _ in inside)
    if reach != elements or not elements * size <= page_bytes <= blocks.stride(0) * size:
        raise ResourceError(
            f"a block of shape {tuple(blocks.shape[1:])} and strides {blocks.stride()[1:]} in pages of {page_bytes}"
            " bytes is not one run of bytes: another VLLM_KV_CACHE_LAYOUT is needed"
        )
    return torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(
        blocks.untyped_storage(),
        blocks.storage_offset() * size,
        (blocks.shape[0], page_bytes),
        (blocks.stride(0) * size, 1),
    )
