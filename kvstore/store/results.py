"""What the store's calls answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.layout import Layout
from kvstore.tiers.tier import TierStatistics


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
    """Pages by what happened to them since the node started; see :class:`kvstore.namespaces.usage.NamespaceCounts`."""


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
