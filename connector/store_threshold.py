"""The store threshold: how many requests must have had a page before it is stored, for what never comes again."""

from __future__ import annotations

REMEMBERED = 1 << 18
"""Most pages that are counted (about 50 MB). Beyond it the one that was first seen longest ago is forgotten."""


class StoreThreshold:
    """Counts requests by page until there were ``threshold`` of them; 1: pages are stored at once."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._counts: dict[tuple[int, bytes], int] = {}

    def see(self, group: int, block_hash: bytes) -> bool:
        """A request has this page. Whether that is often enough."""
        if self._threshold <= 1:
            return True
        page = group, block_hash
        count = self._counts.get(page, 0) + 1
        if count >= self._threshold:
            self._counts.pop(page, None)  # kvstore has it from now on; if it loses it, it must come again as often
            return True
        self._counts[page] = count
        if len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]
        return False
