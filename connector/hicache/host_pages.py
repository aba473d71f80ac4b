"""Copies between pages of a host pool and pages of the arena: one copy, by address, in the caller's thread.

A page lies in the pool in parts, such as its keys and its values, or those of each layer. In the arena they follow each
other in the order in which the engine names them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]
CopyRuns = Callable[[Addresses, Addresses, int], None]


class HostPages:
    """Some pages of a pool, which stay where they are while this is used.

    Args:
        addresses: of each part, page by page.
        sizes: of each part in bytes, the same for each page.
        pages: how many these are.
        copy_runs: copies runs of one length from many places to many others.

    Raises:
        ValueError: pages that differ in their parts.
    """

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int], pages: int, copy_runs: CopyRuns) -> None:
        if not pages or len(addresses) != len(sizes) or len(addresses) % pages:
            raise ValueError(f"{len(addresses)} addresses and {len(sizes)} sizes are not those of {pages} pages")
        self._addresses = np.array(addresses, np.uint64).reshape(pages, -1)
        self._copy_runs = copy_runs
        by_page = np.array(sizes, np.int64).reshape(pages, -1)
        if (by_page != by_page[0]).any():
            raise ValueError(f"pages of several shapes: {sorted(set(map(int, by_page.sum(axis=1))))} bytes")
        self._sizes = by_page[0]
        self._offsets = np.concatenate([[0], np.cumsum(self._sizes)[:-1]]).astype(np.uint64)

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all of its parts together."""
        return int(self._sizes.sum())

    def gather(self, places: Sequence[int], into: Sequence[Bytes]) -> None:
        """Copy the pages at these places into one array each."""
        self._copy(places, into, to_pool=False)

    def scatter(self, pages: Sequence[Bytes], places: Sequence[int]) -> None:
        """Copy arrays into the pages at these places."""
        self._copy(places, pages, to_pool=True)

    def _copy(self, places: Sequence[int], arrays: Sequence[Bytes], *, to_pool: bool) -> None:
        inside = self._addresses[list(places)]
        starts = np.array([each.ctypes.data for each in arrays], np.uint64)
        outside = starts[:, None] + self._offsets
        for size in dict.fromkeys(map(int, self._sizes)):
            of_size = self._sizes == size
            pool, arena = inside[:, of_size].reshape(-1), outside[:, of_size].reshape(-1)
            targets, sources = (pool, arena) if to_pool else (arena, pool)
            self._copy_runs(targets, sources, size)


def copy_one_by_one(targets: Addresses, sources: Addresses, run_bytes: int) -> None:
    """For systems that copy no lists of runs. The interpreter's lock is given away for each run."""
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, run_bytes)
