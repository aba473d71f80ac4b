"""The copy strategy that gives the driver all copies of a batch at once: a device's copy engine does them.

It costs the host least, and the device's multiprocessors nothing. Each run is one copy of the list, so short runs are
slow on their way in: see :mod:`kvstore.gpu.preference`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
import torch

from kvstore.gpu.addresses import Addresses, RunAddresses
from kvstore.gpu.layout import PageLayout
from kvstore.gpu.pinned import is_pinned
from kvstore.gpu.tensors import PageBytes


class CopyList(Protocol):
    """Queues a list of copies on the current stream: :class:`kvstore.gpu.cuda_driver.BatchedMemcpy`."""

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, stable_source: bool) -> None:
        """Queue copies; the arrays may go when it returns."""
        ...


class Batched:
    """:class:`kvstore.gpu.strategies.CopyStrategy` by one call a batch, or a share of its layers.

    The lists are made anew for each call, and belong to it: several threads may queue at once.
    """

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout, copy_list: CopyList) -> None:
        self._layers = list(layers)  # they must not go away: the driver is told addresses only
        self._addresses = RunAddresses([layer.data_ptr() for layer in layers], layout)
        self._run_bytes = layout.runs.run_bytes
        self._copy_list = copy_list

    def takes(self, pages: Sequence[PageBytes]) -> bool:
        """Whether all of these pages are pinned. Other memory the driver would copy through a buffer of its own, and
        the call would not return before the stream is there."""
        return all(map(is_pinned, pages))

    def gather(self, piece_ids: Sequence[int], out: Sequence[PageBytes]) -> None:
        """Queue copies of pieces into pages."""
        # In the stream's order: what the engine has computed is there behind the mark that the stream waits for.
        self._queue(self._addresses.in_pages(out), self._addresses.in_blocks(piece_ids), stable_source=False)

    def scatter(self, pages: Sequence[PageBytes], piece_ids: Sequence[int], shares: Sequence[range]) -> Generator[None]:
        """Queue copies of pages into pieces, share by share."""
        inside, outside = self._addresses.in_blocks(piece_ids), self._addresses.in_pages(pages)
        for layers in shares:
            of = slice(layers.start, layers.stop)
            # Pages were complete before this call, and their lease lasts until the copies are done. Blocks are written
            # in the stream's order whatever is said of the source.
            self._queue(inside[:, of], outside[:, of], stable_source=True)
            yield

    def _queue(self, targets: Addresses, sources: Addresses, *, stable_source: bool) -> None:
        sizes = np.full(targets.size, self._run_bytes, np.uint64)
        self._copy_list(targets.reshape(-1), sources.reshape(-1), sizes, stable_source=stable_source)
