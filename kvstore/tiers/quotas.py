"""Namespaces' quotas in an index of pages: how many bytes each may take, and what leaves when it takes more. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

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

    def __bool__(self) -> bool:
        return bool(self._limits)

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

    def limited(self, keys: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        """Those of the keys whose namespaces have a quota, by namespace, no key twice."""
        by_namespace: dict[bytes, dict[bytes, None]] = {}
        for key in keys:
            if key[:FINGERPRINT_BYTES] in self._limits:
                by_namespace.setdefault(key[:FINGERPRINT_BYTES], {})[key] = None
        return {fingerprint: list(found) for fingerprint, found in by_namespace.items()}

    def fitting(self, fingerprint: bytes, lengths: Sequence[int]) -> int:
        """How many pages, from the first on, a namespace that has a quota may have together.

        Args:
            fingerprint: of the namespace.
            lengths: of their payloads on disk.
        """
        ends = np.cumsum(page_footprints(np.array(lengths, np.uint32)))
        return int(np.searchsorted(ends, self._limits[fingerprint], side="right"))

    def leaving(self, fingerprint: bytes, asked: Rows) -> Rows:
        """The pages by which a namespace is over its quota: those used least lately.

        Args:
            fingerprint: of a namespace that has one.
            asked: the rows of pages that were asked for last: of these, only those leave that do not fit together.
        """
        surplus = self._index.bytes_of(fingerprint) - self._limits[fingerprint]
        if surplus <= 0:
            return np.empty(0, np.int64)
        kept = asked[: self.fitting(fingerprint, self._index.lengths(asked).tolist())]
        return self._leaving(fingerprint, surplus, kept)

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
