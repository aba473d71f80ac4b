"""Usage: what was looked up, loaded and stored since the node started, by namespace, and the prefixes loaded most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from kvstore.page_codes import PageTier

MOST_PREFIXES = 1024
"""Most prefixes that are counted at once. When there would be more, all counts are halved, and those of one load go."""
MOST_PAGES = 1 << 62
"""Lookups are counted by clients: more than this nobody can have asked for, and a count must fit into 64 bits."""
DEPTHS = (1, 4, 16, 64, 256)
"""Where prefixes are counted, in pages. All prompts of a chat share the first ones, and fewer share later ones."""


@dataclass(slots=True)
class NamespaceCounts:
    """Pages. Loads asked for ``arena + disk + redis + objects + missed``; offered were ``stored + present + refused``.
    Lookups asked for ``looked_up``, of which the ``found_…`` were there: that is the hit ratio."""

    arena: int = 0
    """Loaded, and in the arena when they were asked for."""
    disk: int = 0
    redis: int = 0
    missed: int = 0
    stored: int = 0
    present: int = 0
    refused: int = 0
    looked_up: int = 0
    found_arena: int = 0
    found_disk: int = 0
    found_redis: int = 0
    objects: int = 0
    """Loaded, from object storage."""
    found_objects: int = 0


class HotPrefix(NamedTuple):
    """Loads that had their first pages in common."""

    fingerprint: bytes
    last: bytes
    """Block hash of the last one of these pages."""
    pages: int
    """How many they are: one of ``DEPTHS``."""
    loads: int
    """Of late: halved now and then, for all prefixes at once."""


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
        self.gone: dict[str, Counter[str]] = {}
        """Of namespaces that were dropped, by tenant."""
        self._prefixes: dict[tuple[bytes, int], int] = {}
        self.loaded_bytes = 0
        self.stored_bytes = 0

    def of(self, namespace: int) -> NamespaceCounts:
        """The counts of a namespace, by its number."""
        return self._namespaces.get(namespace) or NamespaceCounts()

    def forget(self, namespace: int, fingerprint: bytes, tenant: str) -> None:
        """It was dropped, and its number is never used again."""
        if (counts := self._namespaces.pop(namespace, None)) is not None:
            self.gone.setdefault(tenant, Counter()).update(asdict(counts))
        self._prefixes = {each: loads for each, loads in self._prefixes.items() if not each[0].startswith(fingerprint)}

    def loaded(self, namespace: int, keys: Sequence[bytes], tiers: bytes, missed: int, page_bytes: int) -> None:
        """A load.

        Args:
            namespace: its number.
            keys: of the pages that were asked for.
            tiers: one byte for each page that was loaded, the :class:`PageTier` where it was.
            missed: how many more were asked for.
            page_bytes: of each.
        """
        arena, disk, redis, objects = map(
            tiers.count, (PageTier.ARENA, PageTier.DISK, PageTier.REDIS, PageTier.OBJECTS)
        )
        for counts in (self._counts(namespace), self.total):
            counts.arena += arena
            counts.disk += disk
            counts.redis += redis
            counts.objects += objects
            counts.missed += missed
        self.loaded_bytes += len(tiers) * page_bytes
        for depth in DEPTHS:
            if depth <= len(tiers):
                self._heat(keys[depth - 1], depth)

    def looked_up(self, namespace: int, asked: int, found: Sequence[int]) -> None:
        """A lookup of so many pages, of which so many were found in the arena, on disk, in Redis, in object storage;
        fewer figures are of the first of these."""
        arena, disk, redis, objects = (*found, 0, 0, 0, 0)[:4]
        for counts in (self._counts(namespace), self.total):
            if counts.looked_up + asked <= MOST_PAGES:
                counts.looked_up += asked
                counts.found_arena += arena
                counts.found_disk += disk
                counts.found_redis += redis
                counts.found_objects += objects

    def stored(self, namespace: int, page_bytes: int, *, stored: int = 0, present: int = 0, refused: int = 0) -> None:
        """Pages were offered."""
        for counts in (self._counts(namespace), self.total):
            counts.stored += stored
            counts.present += present
            counts.refused += refused
        self.stored_bytes += stored * page_bytes

    def hottest(self, most: int) -> list[HotPrefix]:
        """The prefixes by pages loaded, most first."""
        hottest = sorted(self._prefixes.items(), key=lambda each: each[1] * each[0][1], reverse=True)[:most]
        return [HotPrefix(key[:32], key[32:], depth, loads) for (key, depth), loads in hottest]

    def _counts(self, namespace: int) -> NamespaceCounts:
        return self._namespaces.setdefault(namespace, NamespaceCounts())

    def _heat(self, key: bytes, depth: int) -> None:
        prefix = key, depth
        if prefix not in self._prefixes and len(self._prefixes) >= MOST_PREFIXES:
            self._prefixes = {each: loads // 2 for each, loads in self._prefixes.items() if loads > 1}
            if len(self._prefixes) >= MOST_PREFIXES:  # all of them are hot: this one may be, later
                return
        self._prefixes[prefix] = self._prefixes.get(prefix, 0) + 1
