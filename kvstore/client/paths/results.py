"""What a client's methods return: lookups, the counts of a store, and what was moved in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.page_codes import TIER_NAMES, PageTier


@dataclass(frozen=True, slots=True, repr=False)
class Lookup:
    """Which pages are here. An answer of the moment: nothing is leased for it."""

    prefix: int
    """How many leading pages are here."""
    present: tuple[bool, ...]
    """For each page whether it is here."""
    tiers: tuple[str | None, ...]
    """For each page the fastest tier that has it: ``"arena"``, ``"disk"``, ``"redis"``, ``"objects"`` or None."""

    def __repr__(self) -> str:
        counts = Counter(tier or "absent" for tier in self.tiers)
        where = ", ".join(f"{count} {tier}" for tier, count in counts.items())
        return f"<kvstore.Lookup: {self.prefix} leading of {len(self.tiers)} pages{where and f'; {where}'}>"

    @classmethod
    def of(cls, tiers: bytes) -> Lookup:
        """From one byte a page, as the store answers."""
        arena = PageTier.ARENA
        if tiers.count(arena) == len(tiers):  # the usual answer of a prefix that is here, many times faster
            return cls(len(tiers), (True,) * len(tiers), (TIER_NAMES[arena],) * len(tiers))
        absent = tiers.find(PageTier.ABSENT)
        return cls(
            prefix=absent if absent >= 0 else len(tiers),
            present=tuple(map(bool, tiers)),
            tiers=tuple(TIER_NAMES[tier] for tier in tiers),
        )


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of the pages of a ``store``: the three counts add up to the pages given."""

    stored: int = 0
    """New here, resident in the arena and findable when the answer was given."""
    present: int = 0
    """Here already; the copy that was here is kept."""
    refused: int = 0
    """Not stored and not findable: no slot could be had, or the node was lost on the way."""

    def __add__(self, other: StoreResult) -> StoreResult:
        return StoreResult(self.stored + other.stored, self.present + other.present, self.refused + other.refused)


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    """Pages that one :class:`kvstore.Namespace` moved since it was made. ``stored``, ``present`` and ``refused`` add up
    what :class:`StoreResult` says of each store."""

    loaded: Mapping[str, int] = field(default_factory=dict)
    """Pages loaded, by the tier that they came from: ``"arena"``, ``"disk"``, ``"redis"`` or ``"objects"``."""
    stored: int = 0
    present: int = 0
    refused: int = 0
