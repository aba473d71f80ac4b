"""Gather and scatter in plain torch, element by element as the layout says: the specification of every faster copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.gpu.layout import PageLayout

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are moved as integers: 8-bit floats know few operations, and a NaN must stay as it is."""


def gather(layers: Sequence[torch.Tensor], layout: PageLayout, piece_ids: Sequence[int]) -> list[torch.Tensor]:
    """The pages made of these pieces, each a new contiguous tensor of the layout's ``page_shape`` where the KV is.

    Args:
        layers: one tensor a layer.
        layout: theirs.
        piece_ids: ``pieces_per_page`` for each page, in the order of the tokens.
    """
    pages = []
    for ids in _by_page(piece_ids, layout):
        page = torch.stack(
            [torch.cat([piece(layer, layout, number) for number in ids], dim=_token_dim(layout)) for layer in layers]
        )
        pages.append(page.view(layers[0].dtype))
    return pages


def scatter(
    pages: Sequence[torch.Tensor], layers: Sequence[torch.Tensor], layout: PageLayout, piece_ids: Sequence[int]
) -> None:
    """Write pages of the layout's ``page_shape`` into the pieces given, and touch nothing else."""
    for page, ids in zip(pages, _by_page(piece_ids, layout), strict=True):
        elements = page.view(_SAME_SIZE[layout.itemsize])
        for layer, of_layer in zip(layers, elements, strict=True):
            for number, part in zip(ids, of_layer.chunk(layout.pieces_per_page, dim=_token_dim(layout)), strict=True):
                piece(layer, layout, number).copy_(part)


def _by_page(piece_ids: Sequence[int], layout: PageLayout) -> list[Sequence[int]]:
    size = layout.pieces_per_page
    return [piece_ids[start : start + size] for start in range(0, len(piece_ids), size)]


def _token_dim(layout: PageLayout) -> int:
    return layout.inside.index("token") if "token" in layout.inside else 0


def piece(layer: torch.Tensor, layout: PageLayout, number: int) -> torch.Tensor:
    """The piece's elements in place, in the order of :attr:`PageLayout.inside`."""
    block, share = divmod(number, layout.pieces_per_block)
    elements = layer.view(_SAME_SIZE[layout.itemsize])
    inside = elements.permute([layout.axes.index(name) for name in ("block", *layout.inside)])[block]
    if "token" not in layout.inside:
        return inside
    return inside.narrow(_token_dim(layout), share * layout.piece_tokens, layout.piece_tokens)
