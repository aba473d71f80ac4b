"""The store: what a node can do with pages, as plain calls over the arena and the lower tiers. No network in it.

Calls around the bytes of a page come in pairs, which mark exactly while a slot of the arena is somebody's. A *lease* is
what is open in between; each is ended by its own call, by its deadline, or because its client died.

* ``prepare_store`` reserves slots; the caller writes the payloads; ``complete_store`` publishes them. Nobody finds a
  page before that. ``reserve_ahead`` and ``complete_ahead`` are the same pair for pages that are not known yet.
* ``prepare_load`` promotes pages into the arena and holds them; the caller copies; ``complete_load`` ends the hold and
  says whether it lasted: bytes copied under a hold that lapsed are to be thrown away.

An *owner* is a client that maps the arena, by the number that :meth:`Store.owner_of` gives, or
:data:`kvstore.store.leases.NODE`, under which the node's own threads copy for all others.

:class:`Store` only says what there is; each part is a class of its own (:mod:`~kvstore.store.lookup`,
:mod:`~kvstore.store.stores`, :mod:`~kvstore.store.loads`, :mod:`~kvstore.store.pins`, :mod:`~kvstore.store.removal`,
:mod:`~kvstore.store.quotas`, …), and what they share, with the lock over it, is in :mod:`kvstore.store.state`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.arena.arena import Arena
from kvstore.arena.format import FRAME_BYTES
from kvstore.config.rules import NamespaceRule, TenantRule
from kvstore.events.ring import PageEvent
from kvstore.host.atomic_files import AtomicFiles
from kvstore.layout import Layout
from kvstore.namespaces.pin_table import PINNED_SHARE, PINS_NAME, PinTable
from kvstore.namespaces.registry import KnownNamespace, NamespaceRegistry
from kvstore.namespaces.usage import Activity
from kvstore.store.archive import Archive
from kvstore.store.expiry import Expiry
from kvstore.store.leases import Part
from kvstore.store.loads import Loads
from kvstore.store.lookup import Lookups
from kvstore.store.orphans import Orphans
from kvstore.store.own_summary import OwnSummary
from kvstore.store.pins import Pins
from kvstore.store.quotas import NamespaceQuotas
from kvstore.store.removal import Removal
from kvstore.store.results import Held, Published, Reserved
from kvstore.store.state import StoreState
from kvstore.store.statistics import StoreStatistics, statistics_of
from kvstore.store.stores import Stores
from kvstore.store.sweeper import Sweeper
from kvstore.store.verification import Verification
from kvstore.store.watch import Told, contents, follow
from kvstore.store.write_back import WriteBack
from kvstore.tiers.lower_tiers import LowerTiers
from kvstore.tiers.tier import ClaimedTier, ObjectStorage, OwnTier, PageBytes


class Store:
    """The heart of a node. Safe for threads; close it when done.

    Unless it says otherwise, a call that names a namespace by its ``fingerprint`` (32 bytes) raises
    :class:`UnknownNamespaceError` where it was not opened, or was cleared; one that takes ``hashes`` (block hashes,
    head of the prefix first) raises :class:`InvalidRequestError` for a hash that has not 32 bytes, and
    :class:`LimitExceededError` for more than ``MOST_LOOKUP_PAGES`` of them.

    Args:
        arena: opened for this process; closed with the store.
        tiers: the lower tiers of this node alone, fastest first; closed with the store.
        namespace_directories: where the register of namespaces is kept, the arena's folder first.
        shared: the tier that several nodes share; closed with the store.
        objects: the object tier; closed with the store.
        archive_all: whether every page goes to the object tier, not only those that are worth it.
        rules: of namespaces: quotas, durability, and how long nobody may use them; the first that matches counts.
        small_files: replaces the registers in ``namespace_directories``.
        life: seconds after which a namespace that nobody uses is dropped, unless its rule says otherwise; 0: never.
        tenants: what tenants have for all of their namespaces together.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Sequence[OwnTier],
        namespace_directories: Sequence[Path],
        shared: ClaimedTier | None = None,
        rules: Sequence[NamespaceRule] = (),
        small_files: AtomicFiles | None = None,
        life: float = 0.0,
        tenants: Sequence[TenantRule] = (),
        objects: ObjectStorage | None = None,
        *,
        archive_all: bool = False,
    ) -> None:
        small_files = small_files or AtomicFiles()
        self.arena = arena
        self.lower_tiers = lower_tiers = LowerTiers(tiers, shared, objects)
        self.namespaces = NamespaceRegistry(namespace_directories, small_files)
        self._state = state = StoreState(arena, self.namespaces, lower_tiers, small_files)
        self._catalog = state.catalog
        pins = PinTable(
            namespace_directories[-1] / PINS_NAME,
            time.monotonic(),
            time.time() - time.monotonic(),
            arena.arena_bytes // FRAME_BYTES // PINNED_SHARE,
            small_files,
        )
        self.archive = Archive(state, everything=archive_all)
        self.write_back = WriteBack(state, self.archive)
        self._quotas = NamespaceQuotas(state, rules, life, tenants)
        self._lookups = Lookups(state, self.write_back)
        self._stores = Stores(state, self.write_back)
        self._loads = Loads(state, self.write_back)
        self._pins = Pins(state, self._loads, self._quotas, pins)
        self._removal = Removal(state, self.write_back, self.archive, self._pins, self._quotas)
        self._sweeper = Sweeper(state, self._stores, self._pins, self.write_back)
        self._verification = Verification(state)
        self.expiry = Expiry(state, self._quotas, self._pins, self._removal)
        self.kept_pages = 0
        """Pages that were found in the arena of an earlier node."""
        if arena.taken_over:
            self.kept_pages = state.residency.take_over(
                self.namespaces, state.clients, lower_tiers.find_own, time.monotonic(), tiers=bool(tiers)
            )
        self.namespaces.save()
        self.orphans = Orphans(state, self._pins, self._removal)
        self.summary = OwnSummary(arena, lower_tiers)
        arena.open_for_readers(own_tiers=bool(lower_tiers.known()), shared_tier=lower_tiers.shared is not None)

    # -- clients and namespaces --------------------------------------------------------------------------------------

    def attach(self, lock_name: str, name: str = "") -> int:
        """Take in a client that maps the arena, and that holds a lock on the file ``lock_name`` in the arena's folder
        for as long as it lives; see :mod:`kvstore.arena.clients`. ``name`` is what it calls itself. Returns its number
        in this arena.

        Raises:
            UnavailableError: the store is being closed.
            LimitExceededError: too many clients are attached.
            InvalidRequestError: there is no such lock.
        """
        return self._state.attach(lock_name, name)

    def owner_of(self, client: int) -> int:
        """The owner that an attached client is, by the number that ``attach`` gave it.

        Raises:
            NotAttachedError: no such client is attached to this arena.
        """
        return self._state.owner_of(client)

    def open_namespace(
        self, layout: Layout, durability: str = "", *, label: str = "", of_tenant: bool = False
    ) -> KnownNamespace:
        """The namespace of a layout, new or known.

        Args:
            layout: of its pages.
            durability: ``disk``: from now on its stores are refused rather than that pages leave the arena before they
                are on disk. Empty: as it was opened before, or as a rule has it.
            label: what the caller calls its model (:mod:`kvstore.labels`); empty: nothing. A rule that matches it
                counts from now on; the first quota of a namespace with pages waits for the next ``migrate_orders``.
            of_tenant: whether a tenant asks.

        Raises:
            InvalidRequestError: no such durability, no such label, or the node has no disk to keep it.
            LayoutMismatchError: the same name is known with another page size.
            LimitExceededError: too many namespaces, or pages larger than half of the arena.
        """
        return self._quotas.open_namespace(layout, durability, label=label, of_tenant=of_tenant)

    def batch_pages(self, known: KnownNamespace) -> int:
        """Most pages that one ``prepare_store``, ``reserve_ahead`` or ``prepare_load`` of this namespace may name."""
        return self._state.batch_pages(known)

    def set_rules(
        self,
        rules: Sequence[NamespaceRule],
        life: float,
        tenants: Sequence[TenantRule] = (),
        leave: Callable[[], bool] = lambda: False,
    ) -> None:
        """Other rules from now on. A quota that is smaller than what is used takes effect with the next pages.

        The first quota of a namespace counts when this returns: its pages are put into an eviction order of their own,
        which takes up to a minute for a million. Once ``leave`` says so that is left undone, and where it fails the
        quota waits for the next ``migrate_orders``.

        A durability that a namespace was opened with stays; a new rule's counts when it is opened again.
        """
        self._quotas.set_rules(rules, life, tenants, leave)

    # -- lookups -----------------------------------------------------------------------------------------------------

    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[bytes]:
        """Which tier has each page: for each (fingerprint, hashes) one byte a page, a
        :class:`kvstore.page_codes.PageTier`. May block until the shared tier's deadline.

        Raises:
            LimitExceededError: more than ``MOST_LOOKUP_PAGES`` pages, or ``MOST_QUERIES`` queries.
        """
        return self._lookups.lookup(queries)

    def explain(self, fingerprint: bytes, hashes: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Which tier has each page, as ``lookup`` says it, and why none has it: one byte a page, a
        :class:`kvstore.page_codes.Explanation`. It does not count as a use of the namespace."""
        return self._lookups.explain(fingerprint, hashes)

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """Mark pages as used. Returns how many are in the arena."""
        return self._lookups.touch(fingerprint, hashes)

    def note_use(self, fingerprint: bytes, hashes: Sequence[bytes], *, read: bool, missed: int) -> int:
        """A client read pages without a call, or says in what order pages are wanted that it read before.

        Args:
            fingerprint: the namespace; one that was dropped meanwhile is passed over.
            hashes: of a prefix, head first.
            read: whether this is how the node learns that they were read; pages are counted then.
            missed: pages of the same call that were not here; not more are counted than a lookup may name.

        Returns:
            How many of them are still in the arena.
        """
        return self._lookups.note_use(fingerprint, hashes, read=read, missed=missed)

    def note_lookups(self, fingerprint: bytes, asked: int, found: Sequence[int]) -> None:
        """A client's lookups asked for pages, which is counted; a load of pages that were not looked up is one, too.

        Args:
            fingerprint: the namespace; one that was dropped meanwhile is passed over.
            asked: pages; not more are counted than ``MOST_LOOKED_UP``.
            found: of these, in the arena, on disk, in Redis, in object storage; not more are counted than were asked
                for.
        """
        self._lookups.note_lookups(fingerprint, asked, found)

    # -- stores ------------------------------------------------------------------------------------------------------

    def prepare_store(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float, *, direct: bool, parent: bytes = b""
    ) -> Reserved:
        """Reserve a slot for each page that is not here.

        Pages for which no slot can be had, or which pass half of the arena in this owner's leases, are refused, and so
        is everything behind them.

        Args:
            owner: who writes the payloads.
            fingerprint: the namespace.
            hashes: at most ``batch_pages`` of it.
            ttl: seconds until the reservation lapses, at most ``LONGEST_LEASE``.
            direct: whether the writer has the slots' memory before it; see :class:`kvstore.store.leases.StoreLease`.
            parent: hash of the page before the first one in its chain; empty: it is the head, or nobody knows.

        Raises:
            LimitExceededError: more than ``batch_pages`` pages.
        """
        return self._stores.prepare_store(owner, fingerprint, hashes, ttl, direct=direct, parent=parent)

    def take_over_writing(self, owner: int, lease: int) -> list[PageBytes] | None:
        """Begin to write the payloads of a lease that is not direct from one of the node's own threads.

        From now on the lease does not lapse, and the calling thread alone can complete it: it does so in any case.

        Returns:
            What to fill, in order; None when the lease is not open any more.
        """
        return self._stores.take_over_writing(owner, lease)

    def complete_store(
        self,
        owner: int,
        lease: int,
        *,
        publish: bool,
        checksums: Sequence[int] | None = None,
        part: Part | None = None,
    ) -> Published:
        """End a reservation, or a part of it: make its pages findable, all at once, or give them up.

        Args:
            owner: whose lease it is.
            lease: the number that ``prepare_store`` gave.
            publish: whether every payload is complete.
            checksums: xxh3_64 of each reserved page, where the writer made them.
            part: of which slots, in the order of the reservation; the others stay reserved.

        Raises:
            InvalidRequestError: there is no such part.
        """
        return self._stores.complete_store(owner, lease, publish=publish, checksums=checksums, part=part)

    def reserve_ahead(self, owner: int, fingerprint: bytes, pages: int, ttl: float, *, evict: bool = False) -> Reserved:
        """Reserve slots for pages that ``complete_ahead`` names: all of them, or none where they can't be had.

        They take at most a quarter of the arena in this owner's leases. A durable namespace has none: what may be at
        risk is scarce. Nor has one of whose quota a single reservation would take much.

        Args:
            owner: a client that has the slots' memory before it.
            fingerprint: the namespace.
            pages: at most ``batch_pages`` of it.
            ttl: seconds until the reservation lapses, at most ``LONGEST_LEASE``.
            evict: whether other pages may leave for them: not for pages that may never come.

        Returns:
            Slots in the order in which they lie in the arena: those side by side can be written by one copy.

        Raises:
            InvalidRequestError: the owner does not share the arena.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        return self._stores.reserve_ahead(owner, fingerprint, pages, ttl, evict=evict)

    def complete_ahead(
        self,
        owner: int,
        lease: int,
        fingerprint: bytes,
        hashes: Sequence[bytes],
        outcomes: bytes,
        parent: bytes = b"",
        part: Part | None = None,
    ) -> Published:
        """End a reservation of ``reserve_ahead``, or a part of it: name the pages that were written, and make them
        findable.

        Args:
            owner: whose lease it is.
            lease: the number that ``reserve_ahead`` gave.
            fingerprint: the namespace of the reservation.
            hashes: a batch.
            outcomes: one byte a page: ``StoreOutcome.RESERVED`` for those that were written, into the slots in their
                order; ``StoreOutcome.PRESENT`` for those that the writer found here.
            parent: as for ``prepare_store``.
            part: which slots were written, if others still are.

        Returns:
            What became of the written pages: all are refused where the reservation lapsed or the namespace was cleared.

        Raises:
            InvalidRequestError: hashes, outcomes, part or the namespace do not go with each other or with the lease.
                What was written is free again, or stays reserved where nobody can tell which slots these are.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        return self._stores.complete_ahead(owner, lease, fingerprint, hashes, outcomes, parent, part)

    def catch_up(self) -> None:
        """Work out in which order pages leave: what stores leave to be done behind their answers."""
        self._stores.catch_up()

    # -- loads -------------------------------------------------------------------------------------------------------

    def prepare_load(self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float) -> Held:
        """Promote the leading pages into the arena and hold them there. Blocks on I/O of the lower tiers.

        The answer is shorter than ``hashes`` from the first page that is nowhere, is damaged, or for which no slot can
        be had, and where it would pass half of the arena in this owner's leases.

        Args:
            owner: who copies.
            fingerprint: the namespace.
            hashes: at most ``batch_pages`` of it.
            ttl: seconds until the hold lapses, at most ``LONGEST_LEASE``.

        Raises:
            LimitExceededError: more than ``batch_pages`` pages.
        """
        return self._loads.prepare_load(owner, fingerprint, hashes, ttl)

    def load_parts(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float
    ) -> Generator[tuple[Held, bool]]:
        """:meth:`prepare_load`, answered in parts as pages are promoted, under one lease: first those that are in the
        arena, then the first one of a lower tier, or a mebibyte of them, then as many again as were read, until all
        are.

        Yields:
            A part, and whether it is the last one, which may have no pages. Whoever closes the iterator before its end
            gives up all of them.

        Raises:
            Exception: as :meth:`prepare_load`, before the first part.
        """
        return self._loads.load_parts(owner, fingerprint, hashes, ttl)

    def still_held(self, owner: int, lease: int) -> bool:
        """Whether everything copied so far under this hold is good."""
        return self._loads.still_held(owner, lease)

    def checksums(self, owner: int, lease: int) -> list[int] | None:
        """xxh3_64 of the pages that a lease holds, made now where no one has yet. None: the hold has lapsed."""
        return self._loads.checksums(owner, lease)

    def complete_load(self, owner: int, lease: int) -> bool:
        """End a hold. False: it had lapsed, and the bytes may have changed while they were copied."""
        return self._loads.complete_load(owner, lease)

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, fingerprint: bytes, hashes: Sequence[bytes], seconds: float) -> int:
        """Promote the leading pages and keep them in the arena, whatever else wants their slots. Blocks on I/O.

        Pinned pages take at most a quarter of the arena, and of their namespace's quota there. The pin outlives the
        node, and a page that is dropped all the same (by ``evict``, if it says so, or ``clear``) loses it.

        Args:
            fingerprint: the namespace.
            hashes: of a prefix.
            seconds: how long, from now; a longer pin of the same page stays.

        Returns:
            How many leading pages are pinned: fewer than asked for when one is nowhere, or the quota is full.

        Raises:
            InvalidRequestError: a time that is not above 0 and at most 366 days.
        """
        return self._pins.pin(fingerprint, hashes, seconds)

    def unpin(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """End pins. Returns how many there were."""
        return self._pins.unpin(fingerprint, hashes)

    # -- removal -----------------------------------------------------------------------------------------------------

    def evict(self, fingerprint: bytes, hashes: Sequence[bytes], *, pinned: bool = False) -> int:
        """Drop pages from every tier. Returns how many were somewhere.

        Args:
            fingerprint: the namespace.
            hashes: of the pages.
            pinned: drop pinned pages, too, and end their pins. Otherwise they stay, in every tier.

        Raises:
            UnavailableError: the store is being closed.
            ResourceError: a tier could not be reached, and may still have some. All others are gone.
        """
        return self._removal.evict(fingerprint, hashes, pinned=pinned)

    def clear(self, fingerprint: bytes) -> int:
        """Drop every page of a namespace, and the namespace. Returns how many pages were somewhere.

        Raises:
            UnavailableError: the store is being closed.
            ResourceError: a tier could not be reached, and may still have some. The namespace stays, for a second try.
        """
        return self._removal.clear(fingerprint)

    # -- maintenance: see kvstore.store.maintenance, which calls most of these ---------------------------------------

    def sweep(self) -> None:
        """End what is past its deadline, and what dead clients left open; tell the node's own lower tiers which of
        their pages were used in the arena."""
        self._sweeper.sweep()

    def migrate_orders(self, stop: threading.Event) -> None:
        """Put the pages of namespaces that have their first quota into eviction orders of their own, and log what
        fails: that is left to the next call. Another thread that is at it is waited for, until ``stop`` is set."""
        self._quotas.migrate_orders(stop)

    def verify(self, stop: threading.Event) -> int:
        """Compare every page that was taken over from an earlier node with its checksum, and drop those that are
        damaged; once ``stop`` is set, the rest is left as it is. Returns how many were damaged."""
        return self._verification.verify(stop)

    def flush(self, deadline: float = math.inf) -> int:
        """Write everything that is dirty now, and return when it is durable: the pages that became so.

        What waits for a shared tier is offered to it as well; what it takes is not counted.

        Args:
            deadline: when to stop writing, on the clock of ``time.monotonic``.

        Raises:
            ResourceError: some of them are not, since the lower tiers would not take them, or not in time.
            UnavailableError: the store is closed.
        """
        self._state.check_open()
        self.write_back.share_all(deadline)
        try:
            return self.write_back.flush(deadline)
        finally:  # a bucket that hangs keeps nothing off the disk
            self.archive.write_all(deadline)

    # -- views -------------------------------------------------------------------------------------------------------

    def follow(self, visible: Callable[[bytes], bool] = lambda fingerprint: True) -> Iterator[Told]:
        """Which pages are in which tier, and how that changes: see :func:`kvstore.store.watch.follow`.

        Args:
            visible: which namespaces, by fingerprint, are told of.
        """
        return follow(self._state, visible)

    def contents(self) -> Iterator[Sequence[PageEvent]]:
        """Which pages are in the arena and on disk now, in pieces."""
        return contents(self._state)

    @property
    def dirty_pages(self) -> int:
        """Pages of the arena that no lower tier has; also when it is closed, or hangs in closing."""
        with self._state.lock:
            return self._catalog.dirty_pages if self.lower_tiers.own else 0

    def statistics(self) -> StoreStatistics:
        """A frozen view of everything."""
        return statistics_of(self._state, self._quotas, self._pins)

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
        self._state.check_integrity()

    # -- the end -----------------------------------------------------------------------------------------------------

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
            for tier in self.lower_tiers.all():
                closing.callback(tier.close)
            closing.callback(self.summary.withdraw)
            closing.callback(self._state.promotions.close)
            self.write_back.wake()
            self.namespaces.save()  # with how long each was not used
            self.archive.wake()
            self.write_back.share_all(deadline, claimed=False)
            self.write_back.flush(deadline)
            self.archive.write_all(deadline)
            self._state.all_written_back = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        # Who writes pages back writes their checksums into headers afterwards.
        with self.write_back.writing, self.archive.writing, self._state.lock:
            self._state.end()
