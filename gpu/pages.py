"""Page gather and scatter: check, then dispatch by device."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu.device import DeviceCopies
from gpu.host import HostCopies
from gpu.layout import PageLayout
from kvstore.errors import InvalidRequestError

PageBytes = npt.NDArray[np.uint8]
"""One page: a contiguous one-dimensional array of ``page_bytes`` bytes, mostly a view into the arena."""


class Copies(Protocol):
    """How one kind of device moves pages; its arguments were checked before."""

    def gather(self, block_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Copy blocks into pages; they are complete when it returns."""
        ...

    def scatter(self, pages: Sequence[PageBytes], block_ids: Sequence[int]) -> None:
        """Copy pages into blocks; the pages may change again when it returns."""
        ...


class PagedKV:
    """An engine's paged KV, as pages to copy out and in.

    Both copies block until the bytes are where they belong, release the GIL while they copy, and may run in several
    threads at once as long as no block is written while another copy reads or writes it. On a CUDA device they use
    streams of their own, which first wait for what was queued, before the call, on the stream that was current
    when this object was made.

    Args:
        layers: one tensor a layer, each ``(2, num_blocks, block_size, kv_heads, head_size)``, on the CPU or on one
            CUDA device. They are used in place and must outlive this object.

    Raises:
        InvalidRequestError: the tensors are not alike, have another shape, or are on a device of another kind.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.layout = PageLayout.of(layers)
        kind = layers[0].device.type
        if kind not in ("cpu", "cuda"):
            raise InvalidRequestError(f"a paged KV must be on a cpu or cuda device, got {layers[0].device}")
        self._copies: Copies = HostCopies(layers, self.layout) if kind == "cpu" else DeviceCopies(layers, self.layout)

    @property
    def page_bytes(self) -> int:
        """Bytes a page: one block of all layers."""
        return self.layout.page_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks that the tensors hold."""
        return self.layout.num_blocks

    def gather(self, block_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Copy blocks out, each into one contiguous page.

        Args:
            block_ids: the blocks, each between 0 and ``num_blocks - 1``; one may occur twice.
            out: a writable array of ``page_bytes`` bytes (uint8, one-dimensional) for each block.

        Raises:
            InvalidRequestError: an id out of range, another number of pages than ids, or a page of another size or
                kind. Nothing was copied.
        """
        ids = self._checked(block_ids, out)
        for index, page in enumerate(out):
            if not page.flags.writeable:
                raise InvalidRequestError(f"page {index}: gather needs a writable array")
        if ids:
            self._copies.gather(ids, out)

    def scatter(self, pages: Sequence[PageBytes], block_ids: Sequence[int]) -> None:
        """Copy pages into blocks.

        Args:
            pages: an array of ``page_bytes`` bytes (uint8, one-dimensional) for each block; it may be read-only.
            block_ids: the blocks to write, each between 0 and ``num_blocks - 1``, all different.

        Raises:
            InvalidRequestError: as for :meth:`gather`, or a block id that occurs twice. Nothing was copied.
        """
        ids = self._checked(block_ids, pages)
        if len(set(ids)) != len(ids):
            twice = next(block_id for index, block_id in enumerate(ids) if block_id in ids[:index])
            raise InvalidRequestError(f"block id {twice} occurs twice: a block takes one page")
        if ids:
            self._copies.scatter(pages, ids)

    def _checked(self, block_ids: Sequence[int], pages: Sequence[PageBytes]) -> list[int]:
        if len(block_ids) != len(pages):
            raise InvalidRequestError(f"{len(block_ids)} block ids for {len(pages)} pages")
        ids = []
        for block_id in block_ids:
            try:
                ids.append(operator.index(block_id))
            except TypeError:
                raise InvalidRequestError(f"a block id must be an integer, got {block_id!r}") from None
            if not 0 <= ids[-1] < self.num_blocks:
                raise InvalidRequestError(f"block id {block_id} is not between 0 and {self.num_blocks - 1}")
        for index, page in enumerate(pages):
            if not isinstance(page, np.ndarray) or page.dtype != np.uint8 or page.ndim != 1:
                raise InvalidRequestError(f"page {index} must be a one-dimensional array of uint8, got {_kind(page)}")
            if page.size != self.page_bytes:
                raise InvalidRequestError(f"page {index} has {page.size} bytes, a page has {self.page_bytes}")
            if not page.flags.c_contiguous:
                raise InvalidRequestError(f"page {index} must be contiguous, its stride is {page.strides[0]} bytes")
        return ids


def _kind(page: object) -> str:
    if isinstance(page, np.ndarray):
        return f"{page.dtype} of shape {page.shape}"
    return type(page).__name__
