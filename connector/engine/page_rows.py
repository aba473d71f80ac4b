"""An engine's blocks as rows of bytes, which are what pages are copied from and to.

vLLM names the order of its KV memory by letters, outermost first: layers, blocks, heads, tokens (N), contents. A page
is ordered as one block of ``LBHNC`` or of ``LBNHC``: by layer, then as the inside of a block lies. Where layers and
blocks lie makes no difference to a page, nor do heads that lie outside of them (``LHBNC``, ``BHLNC``): each of those is
one run of bytes, and they are copied one by one.
"""

from __future__ import annotations

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
        ResourceError: a block is not one run of bytes, nor is each of its heads.
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
            if _is_apart_by_token(cut[0]):
                cut = cut.transpose(1, 2)  # (blocks, tokens, bytes of these heads of a token), as ranks with them alone
            try:
                rows[part].append(rows_of(cut, cut[0].numel() * cut.element_size()))
            except ResourceError as error:
                raise ConfigError(
                    f"kv_parts: some KV heads of {name} are no runs of bytes, by head or by token (strides"
                    f" {of_layer.stride()[1:]}): VLLM_KV_CACHE_LAYOUT=LBHNC is needed"
                ) from error
    return rows


def rows_of(blocks: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """A layer's blocks as rows of bytes, in place: ``(blocks, page_bytes)``; where a block's heads lie apart from each
    other, ``(blocks, heads, bytes of a head)``.

    Args:
        blocks: one in each element of the first dimension.
        page_bytes: of one block, padding included.

    Raises:
        ResourceError: a block is not one run of bytes, nor is each of its heads.
    """
    size = blocks.element_size()
    if _is_run(blocks[0]) and blocks[0].numel() * size <= page_bytes <= blocks.stride(0) * size:
        return _bytes_of(blocks, (blocks.shape[0], page_bytes), (blocks.stride(0) * size, 1))
    if is_apart(blocks[0]) and blocks[0].numel() * size == page_bytes:
        head_bytes = blocks[0, 0].numel() * size
        if head_bytes <= blocks.stride(0) * size:
            strides = (blocks.stride(0) * size, blocks.stride(1) * size, 1)
            return _bytes_of(blocks, (*blocks.shape[:2], head_bytes), strides)
    raise ResourceError(
        f"a block of shape {tuple(blocks.shape[1:])} and strides {blocks.stride()[1:]} in pages of {page_bytes}"
        " bytes is not one run of bytes: another VLLM_KV_CACHE_LAYOUT is needed"
    )


def is_apart(block: torch.Tensor) -> bool:
    """Whether each element of a block's first dimension, a head, is one run of bytes, and the next one further away."""
    return block.dim() > 1 and _is_run(block[0]) and block.stride(0) > block[0].numel()


def _is_apart_by_token(block: torch.Tensor) -> bool:
    """Whether of some heads of a block, ``(heads, tokens, elements)``, those of each token are one run of bytes, with
    other heads between the tokens."""
    return block.dim() == 3 and not is_apart(block) and is_apart(block.transpose(0, 1))


def strides_in_page(block: torch.Tensor) -> tuple[int, ...]:
    """A block's strides as a page has them, where its heads, or its tokens, follow each other."""
    if _is_apart_by_token(block):
        return (block.stride(0), block[:, 0].numel(), block.stride(2))
    return (block[0].numel(), *block.stride()[1:]) if is_apart(block) else block.stride()


def layout_in_page(kv_cache_layout: str) -> str:
    """The name of vLLM's layout whose block a page is ordered as; any other name stays as it is."""
    return _IN_PAGE.get(kv_cache_layout, kv_cache_layout)


_IN_PAGE = {"BLHNC": "LBHNC", "LHBNC": "LBHNC", "BHLNC": "LBHNC", "BLNHC": "LBNHC"}


def _is_run(elements: torch.Tensor) -> bool:
    """Whether they lie side by side, in any order."""
    reach = 1 + sum((count - 1) * stride for count, stride in zip(elements.shape, elements.stride(), strict=True))
    return reach == elements.numel()


def _bytes_of(blocks: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(
        blocks.untyped_storage(), blocks.storage_offset() * blocks.element_size(), shape, strides
    )
