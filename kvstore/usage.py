"""What was loaded and stored since the node started: by namespace, and which prefixes are loaded most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.answers import ARENA, DISK, REDIS

MOST_PREFIXES = 1024
"""Most prefixes that are counted at once. When there would be more, all counts are halved, and those of one load go."""


@dataclass(slots=True)
class NamespaceCounts:
    """Pages. Those asked for are ``arena + disk + redis + missed``, those offered ``stored + present + refused``."""

    arena: int = 0
    """Loaded, and in the arena when they were asked for."""
    disk: int = 0
    redis: int = 0
    missed: int = 0
    stored: int = 0
    present: int = 0
    refused: int = 0


class HotPrefix(NamedTuple):
    """Loads that began with one page."""

    fingerprint: bytes
    first: bytes
    """Block hash of that page."""
    loads: int
    """Of late: halved now and then, for all prefixes at once."""
    pages: int
    """That these loads brought, halved likewise."""


class Activity(NamedTuple):
    """What a store did, at one moment."""

    total: NamespaceCounts
    loaded_bytes: int
    stored_bytes: int
    hottest: list[HotPrefix]


class Usage:
    """Counts of a node. The store's lock guards all methods."""

    def __init__(self) -> None:
        self.total = NamespaceCounts()
        """Of all namespaces, those included that were dropped."""
        self._namespaces: dict[int, NamespaceCounts] = {}
        self._prefixes: dict[bytes, list[int]] = {}
        self.loaded_bytes = 0
        self.stored_bytes = 0

    def of(self, namespace: int) -> NamespaceCounts:
        """The counts of a namespace, by its number."""
        if namespace not in self._namespaces:
            self._namespaces[namespace] = NamespaceCounts()
        return self._namespaces[namespace]

    def forget(self, namespace: int) -> None:
        """It was dropped, and its number is never used again."""
        self._namespaces.pop(namespace, None)

    def loaded(self, namespace: int, key: bytes, tiers: bytes, missed: int, page_bytes: int) -> None:
        """A load.

        Args:
            namespace: its number.
            key: of the first page that was asked for; empty where none was.
            tiers: for each page that was loaded, where it was (``ARENA``, ``DISK``, ``REDIS``).
            missed: how many more were asked for.
            page_bytes: of each.
        """
        for counts in (self.of(namespace), self.total):
            counts.arena += tiers.count(ARENA)
            counts.disk += tiers.count(DISK)
            counts.redis += tiers.count(REDIS)
            counts.missed += missed
        self.loaded_bytes += len(tiers) * page_bytes
        if tiers:
            self._heat(key, len(tiers))

    def stored(self, namespace: int, page_bytes: int, *, stored: int = 0, present: int = 0, refused: int = 0) -> None:
        """Pages were offered."""
        for counts in (self.of(namespace), self.total):
            counts.stored += stored
            counts.present += present
            counts.refused += refused
        self.stored_bytes += stored * page_bytes

    def hottest(self, most: int) -> list[HotPrefix]:
        """The prefixes that brought most pages."""
        hottest = sorted(self._prefixes.items(), key=lambda each: each[1][1], reverse=True)[:most]
        return [HotPrefix(key[:32], key[32:], loads, pages) for key, (loads, pages) in hottest]

    def _heat(self, key: bytes, pages: int) -> None:
        counted = self._prefixes.get(key)
        if counted is None:
            if len(self._prefixes) >= MOST_PREFIXES:
                self._prefixes = {
                    each: [loads // 2, brought // 2] for each, (loads, brought) in self._prefixes.items() if loads > 1
                }
            if len(self._prefixes) >= MOST_PREFIXES:  # all of them are hot: this one may be, later
                return
            counted = self._prefixes[key] = [0, 0]
        counted[0] += 1
        counted[1] += pages
