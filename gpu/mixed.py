"""A paged KV whose layers have several shapes: other head sizes, or numbers of heads, in blocks of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch

from kvstore.errors import InvalidRequestError
from kvstore.gpu.begun import BegunCopy, SeveralCopies
from kvstore.gpu.cuda import Event
from kvstore.gpu.paged_kv import PagedKV, check_page
from kvstore.gpu.tensors import PageBytes, kind_of


def paged_kv(tensors: Sequence[torch.Tensor]) -> PagedKV | MixedKV:
    """The pages of tensors with the axes ``block dim`` or ``block head dim``, one a layer, alike or not.

    Raises:
        InvalidRequestError: as for :class:`kvstore.gpu.paged_kv.PagedKV` and :class:`MixedKV`.
    """
    stretches = [list(alike) for _, alike in groupby(tensors, kind_of)]
    of = [PagedKV(alike, "block dim" if alike[0].dim() == 2 else "block head dim") for alike in stretches]
    return MixedKV(of) if len(of) > 1 else of[0]


class MixedKV:
    """:class:`kvstore.gpu.paged_kv.PagedKV` of layers that are not alike: it has the same methods.

    A page is cut into stretches of layers that are alike, all of which are queued before one is waited for.

    Args:
        stretches: in the order in which they lie in a page.

    Raises:
        InvalidRequestError: they are on different devices, or a page is not the same blocks in all of them.
    """

    def __init__(self, stretches: Sequence[PagedKV]) -> None:
        first = stretches[0]
        for other in stretches[1:]:
            if other.device != first.device:
                raise InvalidRequestError(f"layers of one page are on {first.device} and on {other.device}")
            if _blocks(other) != _blocks(first):
                raise InvalidRequestError(
                    f"layers of one page have {first.layout.num_blocks} blocks of {first.layout.block_tokens} tokens"
                    f" and {other.layout.num_blocks} of {other.layout.block_tokens}"
                )
        self._stretches: list[tuple[PagedKV, int, slice]] = []
        """With the number of its first layer, and its bytes of a page."""
        layers = self.page_bytes = 0
        for kv in stretches:
            self._stretches.append((kv, layers, slice(self.page_bytes, self.page_bytes + kv.page_bytes)))
            layers += kv.layout.layers
            self.page_bytes += kv.page_bytes

    def mark(self) -> Event | None:
        """As :meth:`PagedKV.mark`."""
        return self._stretches[0][0].mark()

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> None:
        """Copy blocks out. As :meth:`PagedKV.gather`."""
        self.begin_gather(piece_ids, out, after).wait()

    def scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> None:
        """Copy pages into blocks. As :meth:`PagedKV.scatter`."""
        self.begin_scatter(pages, piece_ids, on_layer, after).wait()

    def begin_gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes], after: Event | None = None) -> BegunCopy:
        """As :meth:`PagedKV.begin_gather`."""
        begin = [
            partial(kv.begin_gather, piece_ids, pages, after)
            for (kv, _, _), pages in zip(self._stretches, self._shares(out), strict=True)
        ]
        return SeveralCopies(begin, in_order=False)

    def begin_scatter(
        self,
        pages: Sequence[PageBytes],
        piece_ids: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
        after: Event | None = None,
    ) -> BegunCopy:
        """As :meth:`PagedKV.begin_scatter`."""
        begin = [
            partial(kv.begin_scatter, share, piece_ids, _counted_from(first, on_layer), after)
            for (kv, first, _), share in zip(self._stretches, self._shares(pages), strict=True)
        ]
        return SeveralCopies(begin, in_order=on_layer is not None)

    def _shares(self, pages: Sequence[PageBytes]) -> list[list[PageBytes]]:
        """Those of each stretch. Checked as a whole: what else may be wrong with them the first stretch finds, before
        anything is copied."""
        for index, page in enumerate(pages):
            check_page(index, page, self.page_bytes)
        return [[page[share] for page in pages] for _, _, share in self._stretches]


def _blocks(kv: PagedKV) -> tuple[int, int, int]:
    return kv.layout.num_blocks, kv.layout.block_tokens, kv.layout.page_tokens


def _counted_from(first: int, on_layer: Callable[[int], None] | None) -> Callable[[int], None] | None:
    return None if on_layer is None else lambda layer: on_layer(first + layer)
