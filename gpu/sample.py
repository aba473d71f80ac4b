"""What a copy strategy is tried on at start: pages all over the paged KV, in no order, filled with random bytes.

An engine's KV is zeros when it starts. On zeros a strategy that copies other blocks, in another order, or nothing at
all looks right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.gpu import reference
from kvstore.gpu.layout import PageLayout

SAMPLE_BYTES = 16 << 20
"""How much each strategy copies (at least one page, at most all of them but for one piece)."""

NEIGHBOURS = 64
"""Most pieces beside the copied ones that are looked at."""

_SEED = 20
"""The same pieces at each start."""


class Sample:
    """Pieces of a paged KV to be overwritten for a while. At least one page must fit into it.

    Attributes:
        ids: the pieces of the pages, in any order; the first and the last one of all are among them.
        memory: of ``pages``, side by side: uint8, one-dimensional.
        pages: host memory to copy to and from, ``page_bytes`` each.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout) -> None:
        self._layers = layers
        self._layout = layout
        source = random.Random(_SEED)  # noqa: S311 - no secret
        per_page, last = layout.pieces_per_page, layout.num_pieces - 1
        count = min(max(1, SAMPLE_BYTES // layout.page_bytes), max(1, last // per_page))
        ends = [0, last][: count * per_page]
        self.ids = [*ends, *source.sample(range(1, last), count * per_page - len(ends))]
        source.shuffle(self.ids)
        beside = {each + step for each in self.ids for step in (-1, 1)} & set(range(layout.num_pieces))
        others = sorted(beside.difference(self.ids))
        self._others = source.sample(others, min(NEIGHBOURS, len(others)))
        self.memory = np.zeros(count * layout.page_bytes, np.uint8)
        self.pages = list(self.memory.reshape(count, layout.page_bytes))
        self._bytes = np.random.default_rng(_SEED).integers(0, 256, self.memory.shape, np.uint8)
        self._before = self._read()
        self._others_before = self._read_others()

    def fill(self) -> None:
        """Random bytes in the pieces and beside them, and others in ``pages``."""
        self._write(self._bytes)
        for number, each in enumerate(self._others):
            for layer in self._layers:
                reference.piece(layer, self._layout, each).fill_(1 + number)
        self.fill_pages()

    def was_copied_out(self) -> bool:
        """Whether ``pages`` hold what the pieces hold since :meth:`fill`."""
        return np.array_equal(self.memory, self._bytes)

    def fill_pages(self) -> None:
        """Other bytes in ``pages`` than :meth:`fill` put into the pieces: none is the same."""
        self.memory[:] = ~self._bytes

    def was_copied_in(self) -> bool:
        """Whether the pieces hold what ``pages`` do since :meth:`fill_pages`, and those beside them what they did."""
        if not np.array_equal(np.concatenate([_bytes(page) for page in self._read()]), ~self._bytes):
            return False
        of_others = self._read_others()
        return all(bool((piece == 1 + number).all()) for number, of in enumerate(of_others) for piece in of)

    def restore(self) -> None:
        """What was there before, everywhere."""
        reference.scatter(self._before, self._layers, self._layout, self.ids)
        for each, before in zip(self._others, self._others_before, strict=True):
            for layer, piece in zip(self._layers, before, strict=True):
                reference.piece(layer, self._layout, each).copy_(piece)

    def _read(self) -> list[torch.Tensor]:
        """The pages that the pieces make, in host memory: one by one, for an engine has left little of the device's."""
        size = self._layout.pieces_per_page
        starts = range(0, len(self.ids), size)
        return [
            page.cpu()
            for start in starts
            for page in reference.gather(self._layers, self._layout, self.ids[start : start + size])
        ]

    def _read_others(self) -> list[list[torch.Tensor]]:
        return [
            [reference.piece(layer, self._layout, each).cpu().clone() for layer in self._layers]
            for each in self._others
        ]

    def _write(self, content: npt.NDArray[np.uint8]) -> None:
        rows = content.reshape(len(self.pages), -1)
        pages = [
            torch.from_numpy(row).view(before.dtype).view(before.shape)
            for row, before in zip(rows, self._before, strict=True)
        ]
        reference.scatter(pages, self._layers, self._layout, self.ids)


def _bytes(page: torch.Tensor) -> npt.NDArray[np.uint8]:
    return page.contiguous().view(-1).view(torch.uint8).numpy()
