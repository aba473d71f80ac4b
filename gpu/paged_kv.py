"""Gather and scatter between an engine's paged KV and contiguous pages: check arguments, then dispatch by device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kvstore.errors import InvalidRequestError
from kvstore.gpu.begun import DONE, BegunCopy
from kvstore.gpu.cuda import DeviceCopies, Event
from kvstore.gpu.host import HostCopies
from kvstore.gpu.layout import KV_FIRST
from kvstore.gpu.tensors import PageBytes, by_layer, describe


class Copies(Protocol):
    """Gather and scatter on one kind of device. Arguments were checked before."""

    def begin_gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None) -> BegunCopy:
        """Begin to copy pieces into pages."""
        ...

    def begin_scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None,
        after: Event | None,
    ) -> BegunCopy:
        """Begin to copy pages into pieces."""
        ...


class PagedKV:
    """An engine's paged KV on one device, as pages to copy out (gather) and in (scatter).

    Blocks are named by their *pieces* (:mod:`kvstore.gpu.layout`). With pages as long as blocks, the numbers of pieces
    are those of the blocks, one for each page.

    Both copies block until the bytes are where they belong, release the GIL while they copy, and may run in several
    threads at once as long as no block is written while another copy reads or writes it. On a CUDA device they use
    streams of their own, which first wait for a mark (:meth:`mark`): in a thread other than the engine's, give one. To
    do something else meanwhile, begin a copy, and wait for it later (:mod:`kvstore.gpu.begun`). Make this object before
    the engine computes, since it tries then how to copy.

    Args:
        tensors: on the CPU or on one CUDA device, with the axes that ``axes`` says. They are used in place and must
            outlive this object.
        axes: names of their dimensions: see :mod:`kvstore.gpu.layout`.
        page_tokens: tokens a page: a multiple or a divisor of those of a block; as many as a block where not given.

    Raises:
        InvalidRequestError: the tensors are not alike, have other axes, have gaps in their blocks, or are on a device
            of another kind.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], axes: str = KV_FIRST, *, page_tokens: int | None = None
    ) -> None:
        layers, axes = by_layer(tensors, axes)
        self.layout = describe(layers, axes, page_tokens)
        self.device = layers[0].device
        self.dtype = layers[0].dtype
        if self.device.type not in ("cpu", "cuda"):
            raise InvalidRequestError(f"a paged KV must be on a cpu or cuda device, got {self.device}")
        copies = HostCopies if self.device.type == "cpu" else DeviceCopies
        self._copies: Copies = copies(layers, self.layout)

    @property
    def page_bytes(self) -> int:
        """Bytes a page."""
        return self.layout.page_bytes

    @property
    def strategies(self) -> dict[str, list[str]]:
        """Names of the copy strategies by direction (``"gather"``, ``"scatter"``), in the order in which a batch of
        many pages tries them; empty on the CPU."""
        return self._copies.order if isinstance(self._copies, DeviceCopies) else {}

    def mark(self) -> Event | None:
        """An event behind all that the engine has queued, in whose thread this is called: on the stream that is current
        there now, which an engine may change. None on the CPU, where nothing is queued."""
        return self._copies.mark() if isinstance(self._copies, DeviceCopies) else None

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> None:
        """Copy blocks out, into contiguous pages.

        Args:
            piece_ids: ``layout.pieces_per_page`` for each page, each between 0 and ``layout.num_pieces - 1``; one may
                occur twice.
            out: writable arrays of ``page_bytes`` bytes (uint8, one-dimensional).
            after: the mark that a device's copies wait for; one made now, in this thread, where not given.

        Raises:
            InvalidRequestError: an id out of range, another number of pages than the ids make, or a page of another
                size or kind. Nothing was copied.
        """
        self.begin_gather(piece_ids, out, after).wait()

    def scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> None:
        """Copy pages into blocks.

        Args:
            pages: arrays of ``page_bytes`` bytes (uint8, one-dimensional); they may be read-only.
            piece_ids: the pieces to write, ``layout.pieces_per_page`` for each page, each between 0 and
                ``layout.num_pieces - 1``, all different.
            on_layer: told each layer, from 0 on, when all pages' parts of it are in their blocks: then the layer can be
                computed while the others are still on their way. It must be quick and must not raise.
            after: as for :meth:`gather`.

        Raises:
            InvalidRequestError: as for :meth:`gather`, or an id that occurs twice. Nothing was copied.
        """
        self.begin_scatter(pages, piece_ids, on_layer, after).wait()

    def begin_gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> BegunCopy:
        """Begin to copy blocks out: on a device this only queues the copy, behind those that were queued before it.
        Otherwise as :meth:`gather`."""
        ids = self._checked(piece_ids, out)
        for index, page in enumerate(out):
            if not page.flags.writeable:
                raise InvalidRequestError(f"page {index}: gather needs a writable array")
        return self._copies.begin_gather(ids, out, after) if ids else DONE

    def begin_scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> BegunCopy:
        """Begin to copy pages in, as :meth:`begin_gather`. On a device, layers behind the first one are queued, and
        told, when it is waited for. Otherwise as :meth:`scatter`."""
        ids = self._checked(piece_ids, pages)
        if len(set(ids)) != len(ids):
            twice = next(each for index, each in enumerate(ids) if each in ids[:index])
            raise InvalidRequestError(f"block id {twice} occurs twice: a block takes one page")
        return self._copies.begin_scatter(pages, ids, on_layer, after) if ids else DONE

    def _checked(self, piece_ids: Sequence[int], pages: Sequence[PageBytes]) -> list[int]:
        per_page = self.layout.pieces_per_page
        if len(piece_ids) != len(pages) * per_page:
            each = f" of {per_page} blocks each" if per_page > 1 else ""
            raise InvalidRequestError(f"{len(piece_ids)} block ids for {len(pages)} pages{each}")
        what = "block id" if self.layout.pieces_per_block == 1 else "piece id"
        ids = []
        for piece_id in piece_ids:
            try:
                ids.append(operator.index(piece_id))
            except TypeError:
                raise InvalidRequestError(f"a {what} must be an integer, got {piece_id!r}") from None
            if not 0 <= ids[-1] < self.layout.num_pieces:
                raise InvalidRequestError(f"{what} {piece_id} is not between 0 and {self.layout.num_pieces - 1}")
        for index, page in enumerate(pages):
            check_page(index, page, self.page_bytes)
        return ids


def check_page(index: int, page: object, page_bytes: int) -> None:
    """Whether this is a page's memory.

    Raises:
        InvalidRequestError: it is not; the message names the page by its index.
    """
    if not isinstance(page, np.ndarray) or page.dtype != np.uint8 or page.ndim != 1:
        raise InvalidRequestError(f"page {index} must be a one-dimensional array of uint8, got {_kind(page)}")
    if page.size != page_bytes:
        raise InvalidRequestError(f"page {index} has {page.size} bytes, a page has {page_bytes}")
    if not page.flags.c_contiguous:
        raise InvalidRequestError(f"page {index} must be contiguous, its stride is {page.strides[0]} bytes")


def _kind(page: object) -> str:
    if isinstance(page, np.ndarray):
        return f"{page.dtype} of shape {page.shape}"
    return type(page).__name__
