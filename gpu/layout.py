"""What a page of a paged KV cache is: which bytes, in which order.

An engine keeps one tensor a layer, of shape ``(2, num_blocks, block_size, kv_heads, head_size)``: keys and values, then
the block. A page is one block of all layers, contiguous, in the order ``[layer][key/value][token][head][dim]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.errors import InvalidRequestError

PAGE_FORMAT = "layer-kv-token-head-dim/1"
"""This order's name and version: what a :class:`kvstore.Layout` says in its ``format``."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The shape of an engine's paged KV, and of the pages that it is cut into."""

    layers: int
    num_blocks: int
    block_size: int
    """Tokens a block."""
    kv_heads: int
    head_size: int
    """Elements a head."""
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor]) -> PageLayout:
        """The layout of an engine's KV tensors.

        Args:
            layers: one tensor a layer, each ``(2, num_blocks, block_size, kv_heads, head_size)``, all alike and on one
                device. The strides of the first two dimensions are free; a block's inside must be contiguous.

        Raises:
            InvalidRequestError: no layer, another shape, dtype or device, or a block with gaps inside.
        """
        if not layers:
            raise InvalidRequestError("a paged KV needs at least 1 layer, got 0")
        first = layers[0]
        if first.dim() != 5 or first.shape[0] != 2 or 0 in first.shape:
            raise InvalidRequestError(
                "a layer's KV must have shape (2, num_blocks, block_size, kv_heads, head_size),"
                f" got {tuple(first.shape)}"
            )
        for index, layer in enumerate(layers):
            if (layer.shape, layer.dtype, layer.device) != (first.shape, first.dtype, first.device):
                raise InvalidRequestError(
                    f"layer {index} is {tuple(layer.shape)} {layer.dtype} on {layer.device},"
                    f" layer 0 is {tuple(first.shape)} {first.dtype} on {first.device}: they must be alike"
                )
            if not layer[0, 0].is_contiguous():
                raise InvalidRequestError(
                    f"layer {index}: the inside of a block must be contiguous, its strides are {layer.stride()}"
                )
        _, num_blocks, block_size, kv_heads, head_size = first.shape
        return cls(len(layers), num_blocks, block_size, kv_heads, head_size, first.dtype)

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, 2, block_size, kv_heads, head_size)``."""
        return (self.layers, 2, self.block_size, self.kv_heads, self.head_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys, or values, in one layer: the longest run that is contiguous in both places."""
        return self.block_size * self.kv_heads * self.head_size * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes a page."""
        return self.layers * 2 * self.block_bytes
