"""Dead records: removed or superseded, but still in a segment file. They decide which tombstones must be kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_UNSORTED = 1024


class DeadRecords:
    """For each key, the segments that hold a dead record of it: 16 bytes of memory each.

    As long as one lies there, something newer must hide it: a tombstone, or another record of the key.

    Keys are told apart by a hash of 64 bits: where two have the same, a record counts as both keys', which at worst
    costs a tombstone that hides nothing.
    """

    def __init__(self) -> None:
        self._hashes = np.empty(0, np.int64)  # sorted, but for those that follow
        self._segments = np.empty(0, np.uint64)
        self._new_hashes: list[int] = []
        self._new_segments: list[int] = []

    def __len__(self) -> int:
        return len(self._hashes) + len(self._new_hashes)

    def add(self, keys: Sequence[bytes], segments: Sequence[int]) -> None:
        """The record of each key in its segment is dead from now on."""
        self._new_hashes += map(hash, keys)
        self._new_segments += segments
        if len(self._new_hashes) > max(_UNSORTED, len(self._hashes) // 16):
            self._sort()

    def older(self, keys: Sequence[bytes], than: int) -> list[bool]:
        """Which of the keys have a dead record in a segment older than this one."""
        begin, end = self._ranges(keys)
        first = begin < end
        answers = np.zeros(len(keys), np.bool_)
        answers[first] = self._segments[begin[first]] < np.uint64(than)
        for at in np.flatnonzero(end - begin > 1).tolist():
            answers[at] = (self._segments[begin[at] : end[at]] < np.uint64(than)).any()
        return answers.tolist()

    def anywhere(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the keys have a dead record in any segment."""
        begin, end = self._ranges(keys)
        return [a < b for a, b in zip(begin.tolist(), end.tolist(), strict=True)]

    def drop(self, segment: int) -> None:
        """The segment's file is gone."""
        self._sort()
        kept = self._segments != np.uint64(segment)
        self._hashes, self._segments = self._hashes[kept], self._segments[kept]

    def _ranges(self, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        self._sort()
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        return np.searchsorted(self._hashes, hashes, "left"), np.searchsorted(self._hashes, hashes, "right")

    def _sort(self) -> None:
        if not self._new_hashes:
            return
        hashes = np.array(self._new_hashes, np.int64)
        segments = np.array(self._new_segments, np.uint64)
        self._new_hashes, self._new_segments = [], []
        order = np.argsort(hashes, kind="stable")
        at = np.searchsorted(self._hashes, hashes[order])
        self._hashes = np.insert(self._hashes, at, hashes[order])
        self._segments = np.insert(self._segments, at, segments[order])
