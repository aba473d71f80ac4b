"""How often prefixes were seen, for engines that store only what comes again."""

from __future__ import annotations

REMEMBERED = 1 << 18
"""Most pages whose sightings are remembered (about 50 MB). Beyond it the one that was first seen longest ago goes."""


class StoreThreshold:
    """Counts pages until they were seen often enough.

    Args:
        threshold: how often that is; 1: at once.
    """

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
