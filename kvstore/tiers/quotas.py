"""Namespaces' quotas in an index of pages: how many bytes each may take, and what leaves when it takes more. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvstore.errors import InvalidRequestError
from kvstore.segments.index import PageIndex, Rows, Ticks
from kvstore.segments.record import FINGERPRINT_BYTES, page_footprints

_ORDERED_SHARE = 32
"""For this part of a namespace's pages, the order in which they leave is decided at once."""
_ORDERED_PAGES = 64


class Quotas:
    """The quotas of an index's namespaces. Not safe for threads."""

    def __init__(self, index: PageIndex) -> None:
        self._index = index
        self._limits: dict[bytes, int] = {}
        self._to_leave: dict[bytes, tuple[Rows, Ticks]] = {}

    def set(self, fingerprint: bytes, limit_bytes: int) -> None:
        """Most bytes that a namespace may take; 0: no limit.

        Raises:
            InvalidRequestError: not a fingerprint, or below 0.
        """
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise InvalidRequestError(f"a fingerprint has {len(fingerprint)} bytes, it must have {FINGERPRINT_BYTES}")
        if limit_bytes < 0:
            raise InvalidRequestError(f"a quota is {limit_bytes} bytes, the least is 0 (no quota)")
        self._to_leave.pop(fingerprint, None)
        self._limits.pop(fingerprint, None)
        if limit_bytes:
            self._limits[fingerprint] = limit_bytes

    def refused(self, keys: Sequence[bytes], wanted: Mapping[bytes, int]) -> list[bytes]:
        """Pages of a call that writes which can't fit into their namespaces' quotas together with what is here.

        Args:
            keys: of the call.
            wanted: those of its pages that are to be written, and the length of each there.
        """
        refused: list[bytes] = []
        for fingerprint, some in self._limited(keys).items():
            here = dict(zip(some, self._index.find(some).tolist(), strict=True))
            asked = [key for key in some if key in wanted or here[key] >= 0]
            lengths = self._index.lengths(np.array([here[key] for key in asked], np.int64)).tolist()
            for at, key in enumerate(asked):
                lengths[at] = wanted.get(key, lengths[at])
            refused += [key for key in asked[self._fitting(fingerprint, lengths) :] if key in wanted]
        return refused

    def leaving(self, keys: Sequence[bytes]) -> Rows:
        """The pages by which namespaces are over their quotas, after a call that wrote: those used least lately.

        Not before it: a write that is refused must not cost a page.

        Args:
            keys: of the call; of the pages that are here now, they leave last.
        """
        leaving = [np.empty(0, np.int64)]
        for fingerprint, some in self._limited(keys).items():
            surplus = self._index.bytes_of(fingerprint) - self._limits[fingerprint]
            if surplus > 0:
                asked = self._index.find(some)
                asked = asked[asked >= 0]
                kept = asked[: self._fitting(fingerprint, self._index.lengths(asked).tolist())]
                leaving.append(self._leaving(fingerprint, surplus, kept))
        return np.concatenate(leaving)

    def _limited(self, keys: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        """Those of the keys whose namespaces have a quota, by namespace, no key twice."""
        by_namespace: dict[bytes, dict[bytes, None]] = {}
        if self._limits:
            for key in keys:
                if key[:FINGERPRINT_BYTES] in self._limits:
                    by_namespace.setdefault(key[:FINGERPRINT_BYTES], {})[key] = None
        return {fingerprint: list(found) for fingerprint, found in by_namespace.items()}

    def _fitting(self, fingerprint: bytes, lengths: Sequence[int]) -> int:
        """How many pages, from the first on, a namespace that has a quota may have together, by their lengths."""
        ends = np.cumsum(page_footprints(np.array(lengths, np.uint32)))
        return int(np.searchsorted(ends, self._limits[fingerprint], side="right"))

    def _leaving(self, fingerprint: bytes, surplus: int, kept: Rows) -> Rows:
        """Pages of a namespace, other than those kept, that have so many bytes: there are enough of them."""
        index = self._index
        rows, pages = np.empty(0, np.int64), index.pages_of(fingerprint)
        if fingerprint in self._to_leave:
            rows = index.unused_since(*self._to_leave.pop(fingerprint), fingerprint)
            rows = rows[~np.isin(rows, kept)]
        count = max(_ORDERED_PAGES, pages // _ORDERED_SHARE)
        while index.footprints(rows).sum() < surplus:
            rows = index.least_used(fingerprint, count)
            rows = rows[~np.isin(rows, kept)]
            count *= 4
        ends = np.cumsum(index.footprints(rows))
        leaving = int(np.searchsorted(ends, surplus)) + 1
        self._to_leave[fingerprint] = (rows[leaving:], index.last_uses(rows[leaving:]))
        return rows[:leaving]
