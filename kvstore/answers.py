"""What the store's primitives answer, and the limits that they keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.layout import Layout
from kvstore.tiers.tier import TierStatistics

ABSENT, ARENA, DISK, REDIS = 0, 1, 2, 3
"""What a lookup says of a page: the fastest tier that has it."""
TIER_NAMES = (None, "arena", "disk", "redis")
"""What people call these."""
RESERVED, PRESENT, REFUSED = 0, 1, 2
"""What ``prepare_store`` says of a page."""

HERE, UNKNOWN, EVICTED = 0, 1, 2
"""What ``explain`` says of a page: it is here; nothing is remembered of it; it left the arena to make room."""

MOST_LOOKUP_PAGES = 1 << 17
"""Most pages that one lookup may name, over all its namespaces."""
MOST_QUERIES = 4096
"""Most queries that it may be made of, and uses in one report."""
BATCH_BYTES = 16 << 20
MOST_BATCH_PAGES = 256
LONGEST_TICKET = 60.0
"""Longest time, in seconds, that a reservation or a hold may last."""


class Reserved(NamedTuple):
    """The answer to ``prepare_store``."""

    ticket: int
    """0: nothing was reserved."""
    outcomes: bytes
    """One byte a page: ``RESERVED``, ``PRESENT`` or ``REFUSED``."""
    frames: list[int]
    """Where each reserved page goes, in order."""


class Held(NamedTuple):
    """The answer to ``prepare_load``: the leading pages, held."""

    ticket: int
    """0: nothing is held."""
    tiers: bytes
    """One byte for each leading page: where it was when it was asked for."""
    frames: list[int]


class Published(NamedTuple):
    """The answer to ``complete_store``, in pages."""

    stored: int
    present: int
    refused: int


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """A namespace and its pages."""

    number: int = field(compare=False)
    """Another one when it is opened again after it was dropped."""
    layout: Layout
    arena_pages: int
    used_bytes: dict[str, int]
    """Tier → bytes that its pages take there, padding included."""
    quota_bytes: dict[str, int]
    """Tier → most bytes that they may take; only where there is a quota."""
    durability: str
    pinned_pages: int
    age_seconds: float = field(compare=False)
    idle_seconds: float = field(compare=False)
    counters: dict[str, int] = field(compare=False)
    """Pages by what happened to them since the node started; see :class:`kvstore.usage.NamespaceCounts`."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store holds and has done."""

    arena_used_bytes: int
    arena_limit_bytes: int
    arena_pages: int
    dirty_pages: int
    counters: dict[str, int]
    """Since the arena was made, restarts included; see ``kvstore.arena.format.COUNTERS``."""
    below: dict[str, TierStatistics]
    namespaces: tuple[NamespaceUsage, ...]
    gone: dict[str, dict[str, int]]
    """What was counted of namespaces that were dropped, by tenant."""
    clients: int
