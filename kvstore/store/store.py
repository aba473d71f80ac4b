"""The store: the primitives of a node, over the catalog, the arena and the tiers below. No network in it.

Primitives come in pairs that mark exactly while a page's bytes belong to somebody:

* ``prepare_store`` reserves slots, the caller writes the payloads, ``complete_store`` publishes them.
* ``prepare_load`` brings pages up and holds them, the caller copies, ``complete_load`` ends the hold and says whether
  it lasted: bytes copied under a hold that lapsed are to be thrown away.

Each concern has a class of its own; what they share, and the lock over it, is in :mod:`kvstore.store.state`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.arena.arena import Arena
from kvstore.arena.format import FRAME_BYTES
from kvstore.config.rules import NamespaceRule, TenantRule
from kvstore.events.ring import PageEvent
from kvstore.host.atomic_files import AtomicFiles
from kvstore.namespaces.pin_table import PINNED_SHARE, PINS_NAME, PinTable
from kvstore.namespaces.registry import NamespaceRegistry
from kvstore.namespaces.usage import Activity
from kvstore.store.expiry import Expiry
from kvstore.store.loads import Loads
from kvstore.store.lookup import Lookups
from kvstore.store.orphans import Orphans
from kvstore.store.pins import Pins
from kvstore.store.quotas import NamespaceQuotas
from kvstore.store.removal import Removal
from kvstore.store.results import NamespaceUsage, StoreStatistics
from kvstore.store.state import StoreState
from kvstore.store.stores import Stores
from kvstore.store.sweeper import Sweeper
from kvstore.store.verification import Verification
from kvstore.store.watch import Told, contents, follow
from kvstore.store.write_back import WriteBack
from kvstore.tiers.lower_tiers import LowerTiers
from kvstore.tiers.tier import OwnTier, SharedTier


class Store:
    """The heart of a node. Safe for threads; close it when done.

    Args:
        arena: opened for this process; closed with the store.
        tiers: the tiers below of this node alone, fastest first; closed with the store.
        namespace_directories: where the register of namespaces is kept, the arena's folder first.
        shared: the tier that several nodes share; closed with the store.
        rules: what namespaces are granted.
        small_files: replaces the registers in ``namespace_directories``.
        life: seconds after which a namespace that nobody uses is dropped, unless its rule says otherwise; 0: never.
        tenants: what tenants have for all of their namespaces together.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Sequence[OwnTier],
        namespace_directories: Sequence[Path],
        shared: SharedTier | None = None,
        rules: Sequence[NamespaceRule] = (),
        small_files: AtomicFiles | None = None,
        life: float = 0.0,
        tenants: Sequence[TenantRule] = (),
    ) -> None:
        small_files = small_files or AtomicFiles()
        self.arena = arena
        self.below = below = LowerTiers(tiers, shared)
        self.namespaces = NamespaceRegistry(namespace_directories, small_files)
        self._state = state = StoreState(arena, self.namespaces, below, small_files)
        self._catalog = state.catalog
        self.write_back = WriteBack(arena, state.residency, below, state.lock)
        most_pinned = arena.arena_bytes // FRAME_BYTES // PINNED_SHARE
        pins = PinTable(
            namespace_directories[-1] / PINS_NAME,
            time.monotonic(),
            time.time() - time.monotonic(),
            most_pinned,
            small_files,
        )
        self._quotas = NamespaceQuotas(state, below, rules, life, tenants)
        finding = Lookups(state, below, self.write_back)
        storing = Stores(state, below, self.write_back)
        loading = Loads(state, below, self.write_back)
        self._pins = Pins(state, loading, self._quotas, pins)
        self._removal = Removal(state, below, self.write_back, self._pins, self._quotas)
        self.expiry = Expiry(state, self._quotas, self._pins, self._removal)
        sweeping = Sweeper(state, storing, self._pins, self.write_back)

        self.attach, self.owner_of = state.attach, state.owner_of
        self.open_namespace, self.batch_pages = self._quotas.open_namespace, state.batch_pages
        self.lookup, self.explain = finding.lookup, finding.explain
        self.touch, self.note_use = finding.touch, finding.note_use
        self.prepare_store, self.complete_store = storing.prepare_store, storing.complete_store
        self.reserve_ahead, self.complete_ahead = storing.reserve_ahead, storing.complete_ahead
        self.take_over_writing, self.catch_up = storing.take_over_writing, storing.catch_up
        self.prepare_load, self.complete_load = loading.prepare_load, loading.complete_load
        self.load_parts = loading.load_parts
        self.still_held, self.checksums = loading.still_held, loading.checksums
        self.set_rules, self.regroup = self._quotas.set_rules, self._quotas.regroup
        self.pin, self.unpin = self._pins.pin, self._pins.unpin
        self.evict, self.clear = self._removal.evict, self._removal.clear
        self.sweep, self.verify = sweeping.sweep, Verification(state).verify

        self.kept_pages = 0
        """Pages that were found in the arena of an earlier node."""
        if arena.taken_over:
            self.kept_pages = state.residency.take_over(
                self.namespaces, state.clients, below.find_own, time.monotonic(), tiers=bool(tiers)
            )
        self.namespaces.save()
        self.orphans = Orphans(state, below, self._pins, self._removal)
        arena.open_for_readers(below=bool(below.all()))

    def follow(self, visible: Callable[[bytes], bool] = lambda fingerprint: True) -> Iterator[Told]:
        """Which pages are in which tier, and how that changes: see :func:`kvstore.store.watch.follow`.

        Args:
            visible: which namespaces, by fingerprint, are told of.
        """
        return follow(self._state, visible)

    def contents(self) -> Iterator[Sequence[PageEvent]]:
        """Which pages are in the arena and on disk now, in pieces."""
        return contents(self._state)

    def flush(self, deadline: float = math.inf) -> int:
        """Write everything that is dirty now, and return when it is durable: the pages that became so.

        What waits for the shared tier is offered to it as well; what it takes is not counted.

        Args:
            deadline: when to stop writing, on the clock of ``time.monotonic``.

        Raises:
            ResourceError: some of them are not, since the tiers below would not take them, or not in time.
            UnavailableError: the store is closed.
        """
        self._state.check_open()
        self.write_back.share_all(deadline)
        return self.write_back.flush(deadline)

    @property
    def dirty_pages(self) -> int:
        """Pages of the arena that no tier below has; also when it is closed, or hangs in closing."""
        with self._state.lock:
            return self._catalog.dirty_pages if self.below.own else 0

    def statistics(self) -> StoreStatistics:
        """A frozen view of everything."""
        below = {tier.name: tier.statistics() for tier in self.below.all()}
        used_below = [
            (known, {tier.name: tier.used_by(known.fingerprint) for tier in self.below.all()})
            for known in self.namespaces.known()
        ]
        with self._state.lock:
            return StoreStatistics(
                arena_used_bytes=self._catalog.used_frames * FRAME_BYTES,
                arena_limit_bytes=self.arena.arena_bytes,
                arena_pages=len(self._catalog),
                dirty_pages=self._catalog.dirty_pages,
                counters=self.arena.counters(),
                below=below,
                namespaces=tuple(
                    NamespaceUsage(
                        known.number,
                        known.layout,
                        self._catalog.pages_of(known.number),
                        {"arena": self._catalog.frames_of(known.number) * FRAME_BYTES} | used,
                        self._quotas.quotas(known),
                        known.durability,
                        self._pins.pages_of(known.fingerprint),
                        max(0.0, time.time() - known.created),
                        self.namespaces.idle_seconds(known),
                        asdict(self._state.usage.of(known.number)),
                    )
                    for known, used in used_below
                ),
                gone={tenant: dict(counts) for tenant, counts in self._state.usage.gone.items()},
                clients=len(self._state.clients),
            )

    def activity(self, most_prefixes: int) -> Activity:
        """What was loaded and stored since the node started, and so many of the prefixes that are loaded most."""
        with self._state.lock:
            usage = self._state.usage
            return Activity(replace(usage.total), usage.loaded_bytes, usage.stored_bytes, usage.hottest(most_prefixes))

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: something does not add up.
        """
        state = self._state
        with state.lock:
            holders = [slot for ticket in state.leases.loads.values() for slot in ticket.slots]
            writers = [slot for ticket in state.leases.stores.values() for slot in ticket.slots]
            slots = state.slots
            self._catalog.check_integrity(holders, [*writers, *state.residency.quarantined])
            self.arena.check_index(
                [
                    (slots.frame[slot], slots.namespace[slot], slots.block_hash(slot), slots.length[slot])
                    for slot in self._catalog.resident()
                ]
            )

    def close(self, deadline: float = math.inf) -> None:
        """Write back what is dirty, and give everything up. The arena's pages stay for the next node; an embedded
        store's arena goes, where everything could be written back.

        Raises:
            ResourceError: not everything could be written back. Everything was given up all the same.
        """
        with self._state.lock:
            if self._state.closed:
                return
            self._state.closed = True
        with ExitStack() as closing:
            closing.callback(self._end)
            for tier in self.below.all():
                closing.callback(tier.close)
            closing.callback(self._state.promotions.close)
            self.write_back.wake()
            self.namespaces.save()  # with how long each was not used
            self.write_back.share_all(deadline)
            self.write_back.flush(deadline)
            self._state.all_below = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        # Who writes pages below writes their checksums into headers afterwards.
        with self.write_back.writing, self._state.lock:
            self._state.end()
