"""Statistics: what a store holds and has done, counted under its lock and handed out frozen."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from kvstore.arena.format import FRAME_BYTES
from kvstore.layout import Layout
from kvstore.status import ClientStatus
from kvstore.store.pins import Pins
from kvstore.store.quotas import NamespaceQuotas
from kvstore.store.state import StoreState
from kvstore.tiers.tier import TierStatistics


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """A namespace and its pages."""

    number: int = field(compare=False)
    """Another one when it is opened again after it was dropped."""
    name: str
    """As :attr:`kvstore.namespaces.registry.KnownNamespace.name`."""
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
    labels: tuple[str, ...]
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
    lower_tiers: dict[str, TierStatistics]
    """By name."""
    namespaces: tuple[NamespaceUsage, ...]
    total: dict[str, int] = field(compare=False)
    """What was counted of all namespaces, those included that were dropped."""
    gone: dict[str, dict[str, int]]
    """What was counted of namespaces that were dropped, by tenant."""
    clients: int
    connected: tuple[ClientStatus, ...] = field(compare=False)
    """Clients that share the arena."""


def statistics_of(state: StoreState, quotas: NamespaceQuotas, pins: Pins) -> StoreStatistics:
    """Those of a store, by its parts."""
    arena, catalog, usage = state.arena, state.catalog, state.usage
    tiers = state.lower_tiers.all()
    lower_tiers = {tier.name: tier.statistics() for tier in tiers}
    used_there = [
        (known, {tier.name: tier.used_by(known.fingerprint) for tier in tiers}) for known in state.namespaces.known()
    ]
    connected = tuple(state.clients.connected())
    with state.lock:
        return StoreStatistics(
            arena_used_bytes=catalog.used_frames * FRAME_BYTES,
            arena_limit_bytes=arena.arena_bytes,
            arena_pages=len(catalog),
            dirty_pages=catalog.dirty_pages,
            counters=arena.counters(),
            lower_tiers=lower_tiers,
            namespaces=tuple(
                NamespaceUsage(
                    known.number,
                    known.name,
                    known.layout,
                    catalog.pages_of(known.number),
                    {"arena": catalog.frames_of(known.number) * FRAME_BYTES} | used,
                    quotas.quotas(known),
                    known.durability,
                    pins.pages_of(known.fingerprint),
                    max(0.0, time.time() - known.created),
                    state.namespaces.idle_seconds(known),
                    known.labels,
                    asdict(usage.of(known.number)),
                )
                for known, used in used_there
            ),
            total=asdict(usage.total),
            gone={tenant: dict(counts) for tenant, counts in usage.gone.items()},
            clients=len(connected),
            connected=connected,
        )
