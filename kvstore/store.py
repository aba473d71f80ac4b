"""The store: the primitives of a node, over the catalog, the arena and the tiers below. No network in it.

Primitives come in pairs that mark exactly while a page's bytes belong to somebody:

* ``prepare_store`` reserves slots, the caller writes the payloads, ``complete_store`` publishes them.
* ``prepare_load`` brings pages up and holds them, the caller copies, ``complete_load`` ends the hold and says whether
  it lasted: bytes copied under a hold that lapsed are to be thrown away.

One lock guards catalog, tickets and headers. It is held for decisions only: payload copies, checksums and all I/O of
the tiers happen outside of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.answers import (
    ARENA,
    BATCH_BYTES,
    LONGEST_TICKET,
    MOST_BATCH_PAGES,
    MOST_LOOKUP_PAGES,
    PRESENT,
    REFUSED,
    RESERVED,
    Held,
    NamespaceUsage,
    Published,
    Reserved,
    StoreStatistics,
)
from kvstore.arena.arena import Arena
from kvstore.arena.clients import Clients
from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.arena.readers import LAST_EPOCH, Readers
from kvstore.arena.residency import Residency
from kvstore.below import Below
from kvstore.bringup import BringUps, Run
from kvstore.bytesize import format_size
from kvstore.checksum import checksum_of
from kvstore.errors import (
    InvalidRequestError,
    LimitExceededError,
    NotAttachedError,
    ResourceError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.hashing import HASH_BYTES
from kvstore.layout import Layout
from kvstore.namespaces import KnownNamespace, Namespaces
from kvstore.pins import LONGEST_PIN, Pins
from kvstore.rules import DURABILITIES, NamespaceRule, rule_for, warn_of_quotas_below_a_page
from kvstore.slot import Slot, SlotState
from kvstore.small_files import SmallFiles
from kvstore.tickets import NODE, LoadTicket, StoreTicket, Tickets
from kvstore.tiers.tier import Tier
from kvstore.write_behind import WriteBehind

_PINNED_SHARE = 4
"""Pinned pages take at most this part of the arena."""

LONGEST_WAIT_FOR_READERS = 0.1
"""Longest time in seconds that a reservation waits for clients that read what was in its slots before."""


class Store:
    """The heart of a node. Safe for threads; close it when done.

    Args:
        arena: opened for this process; closed with the store.
        tiers: the tiers below of this node alone, fastest first; closed with the store.
        namespace_directories: where the register of namespaces is kept, the arena's folder first.
        shared: the tier that several nodes share; closed with the store.
        rules: what namespaces are granted.
        small_files: replaces the registers in ``namespace_directories``.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Sequence[Tier],
        namespace_directories: Sequence[Path],
        shared: Tier | None = None,
        rules: Sequence[NamespaceRule] = (),
        small_files: SmallFiles | None = None,
    ) -> None:
        self.arena = arena
        self.below = Below(tiers, shared)
        self._small_files = small_files = small_files or SmallFiles()
        self.namespaces = Namespaces(namespace_directories, small_files)
        self._rules = tuple(rules)
        self._clients = Clients(arena.directory / "clients")
        self._readers = Readers(arena.lines, self._clients)
        self._residency = Residency(arena)
        self._catalog = self._residency.catalog
        self._tickets = Tickets()
        self._bringups = BringUps(arena, self._residency, self.below.own, shared)
        self._half_frames = arena.arena_bytes // FRAME_BYTES // 2
        """As much as one owner may have in hand."""
        self._lock = threading.Lock()
        self.write_behind = WriteBehind(arena, self._residency, self.below, self._lock)
        self._pins = Pins(
            namespace_directories[-1] / "pins",
            time.time(),
            arena.arena_bytes // FRAME_BYTES // _PINNED_SHARE,
            small_files,
        )
        self._saving_pins = threading.Lock()
        self._residency.pins = self._pins
        for known in self.namespaces.known():
            self._grant(known)
        self._closed = False
        self._ended = False
        self.kept_pages = 0
        """Pages that were found in the arena of an earlier node."""
        if arena.taken_over:
            self.kept_pages = self._residency.take_over(
                self.namespaces, self._clients, self.below.find_own, tiers=bool(tiers)
            )
        self.namespaces.save()
        arena.open_for_readers(below=bool(self.below.all()))

    # -- namespaces and clients --------------------------------------------------------------------------------------

    def open_namespace(self, layout: Layout, durability: str = "") -> KnownNamespace:
        """The namespace of a layout, new or known.

        Args:
            layout: of its pages.
            durability: ``disk``: from now on its stores are refused rather than that pages leave the arena before they
                are on disk. Empty: as it was opened before, or as a rule has it.

        Raises:
            InvalidRequestError: no such durability, or the node has no disk to keep it.
            LayoutMismatchError: the same name is known with another page size.
            LimitExceededError: too many namespaces, or pages larger than half of the arena.
        """
        if frames_for(layout.page_bytes) > self._half_frames:
            raise LimitExceededError(
                f"page_bytes is {layout.page_bytes} ({format_size(layout.page_bytes)}), the limit is half of the arena,"
                f" {format_size(self._half_frames * FRAME_BYTES)}"
            )
        if durability not in DURABILITIES:
            raise InvalidRequestError(f'durability must be "disk" or empty, got {durability!r}')
        durability = durability or rule_for(self._rules, layout.name).durability
        if durability == "disk" and not self.below.own:
            raise InvalidRequestError(
                f'namespace {layout.name!r} asks for durability "disk": this node has no disk tier'
            )
        self._check_open()
        return self.namespaces.open(layout, durability, self._grant)

    def batch_pages(self, known: KnownNamespace) -> int:
        """Most pages that one ``prepare_store`` or ``prepare_load`` of this namespace may name."""
        page = frames_for(known.layout.page_bytes) * FRAME_BYTES
        return max(1, min(BATCH_BYTES // page, self.arena.arena_bytes // 4 // page, MOST_BATCH_PAGES))

    def attach(self, lock_name: str) -> int:
        """Take in a client that maps the arena; see :mod:`kvstore.arena.clients`. Returns its name in this arena."""
        self._check_open()
        number = self._clients.attach(lock_name)
        self._readers.welcome(number)
        return self._arena_tag() | number

    def owner_of(self, client: int) -> int:
        """The number of an attached client.

        Raises:
            NotAttachedError: no such client is attached to this arena.
        """
        number = client & 0xFFFF
        if client - number != self._arena_tag() or number not in self._clients:
            raise NotAttachedError("this client is not attached to the node's arena: it must attach again")
        return number

    def _arena_tag(self) -> int:
        return int.from_bytes(self.arena.arena_id[:6], "little") << 16

    # -- lookup ------------------------------------------------------------------------------------------------------

    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[bytes]:
        """Which pages are here: for each (fingerprint, hashes) one byte a page, ``ABSENT``, ``ARENA`` or ``DISK``.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``MOST_LOOKUP_PAGES`` pages.
        """
        pages = sum(len(hashes) for _, hashes in queries)
        if pages > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"a lookup of {pages} pages, the limit is {MOST_LOOKUP_PAGES}")
        asked = [self._keys(self._known(fingerprint), hashes) for fingerprint, hashes in queries]
        below = self.below.find(asked, self._catalog.find)
        with self._lock:
            find = self._catalog.find
            return [
                bytes(ARENA if find(key) else under for key, under in zip(keys, unders, strict=True))
                for keys, unders in zip(asked, below, strict=True)
            ]

    # -- storing -----------------------------------------------------------------------------------------------------

    def prepare_store(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float, *, direct: bool, parent: bytes = b""
    ) -> Reserved:
        """Reserve a slot for each page that is not here, head of the prefix first.

        Pages for which there is no room, or which pass half of the arena in this owner's hands, are refused, and so
        is everything behind them.

        Args:
            owner: who writes the payloads.
            fingerprint: the namespace.
            hashes: at most ``batch_pages`` of it.
            ttl: seconds until the reservation lapses, at most ``LONGEST_TICKET``.
            direct: whether the writer has the slots' memory before it; see :class:`StoreTicket`.
            parent: hash of the page before the first one in its chain; empty: it is the head, or nobody knows.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        known = self._known(fingerprint)
        keys = self._batch_keys(known, hashes)
        before = [*(self._keys(known, [parent]) if parent else [b""]), *keys]
        below = self.below.find_own(keys)
        frames = frames_for(known.layout.page_bytes)
        outcomes = bytearray()
        slots: list[Slot] = []
        with self._lock:
            self._check_open()
            room = self._half_frames - self._tickets.frames_of(owner)
            full = False
            resident = [self._catalog.find(key) for key in keys]
            present = [slot for slot in resident if slot is not None]
            for slot in present:  # until the end of this call: a batch must not push out its own pages
                self._catalog.hold(slot)
            for key, previous, here, under in zip(keys, before[:-1], resident, below, strict=True):
                if here is not None or under:
                    outcomes.append(PRESENT)
                    continue
                reserved = None if full or room < frames else self._residency.reserve(key, known, owner, previous)
                if reserved is None:
                    full = True
                    outcomes.append(REFUSED)
                    continue
                room -= frames
                slots.append(reserved)
                outcomes.append(RESERVED)
            for slot in present:
                self._catalog.release(slot)
            self._catalog.touch(present)
            self._count("present", outcomes.count(PRESENT))
            self._count("refused", outcomes.count(REFUSED))
            if not slots:
                return Reserved(0, bytes(outcomes), [])
            deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
            ticket = self._tickets.open_store(owner, slots, keys, deadline, direct=direct)
        if not self._unread(slots):
            self._shorten(ticket, outcomes)
        return Reserved(ticket.number * bool(slots), bytes(outcomes), [slot.frame for slot in slots])

    def take_over_writing(self, owner: int, ticket: int) -> list[Slot] | None:
        """Begin to write an indirect ticket's payloads from one of the node's own threads.

        From now on the ticket does not lapse, and the calling thread alone can complete it: it does so in any case.

        Returns:
            The slots to fill, in order; None when the ticket is not open any more.
        """
        with self._lock:
            found = self._tickets.stores.get(ticket)
            if found is None or found.owner != owner or found.direct:
                return None
            found.direct = True
            found.writer = threading.get_ident()
            found.deadline = math.inf
            return list(found.slots)

    def complete_store(
        self, owner: int, ticket: int, *, publish: bool, checksums: Sequence[int] | None = None
    ) -> Published:
        """End a reservation: make its pages findable, all at once, or give them up.

        Args:
            owner: whose ticket it is.
            ticket: the number that ``prepare_store`` gave.
            publish: whether every payload is complete.
            checksums: xxh3_64 of each reserved page, where the writer made them.
        """
        with self._lock:
            found = self._tickets.take_store(ticket, owner)
            if found is None:
                return Published(0, 0, 0)
            pages = len(found.slots)
            if found.lapsed or not publish or not self.namespaces.is_open(found.slots[0].namespace):
                self._give_up(found)
                self._count("refused", pages)
                self._give_arena_up()
                return Published(0, 0, pages)
            stored = self._residency.publish(found.slots, checksums or [None] * pages, dirty=bool(self.below.own))
            # With what was here before: a prefix's old head must not count as older than its new tail.
            self._catalog.touch([slot for slot in map(self._catalog.find, found.batch) if slot is not None])
            self._count("stored", stored)
            self._count("present", pages - stored)
            self.write_behind.add(found.slots)
            self._give_arena_up()
            return Published(stored, pages - stored, 0)

    # -- loading -----------------------------------------------------------------------------------------------------

    def prepare_load(self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float) -> Held:
        """Bring the leading pages up into the arena and hold them there. Blocks on I/O of the tiers below.

        The answer is shorter than ``hashes`` from the first page that is nowhere, is damaged below, or finds no room,
        and where it would pass half of the arena in this owner's hands.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        known = self._known(fingerprint)
        keys = self._batch_keys(known, hashes)
        (below,) = self.below.find([keys], self._catalog.find)
        deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
        with self._lock:
            self._check_open()
            room = max(0, self._half_frames - self._tickets.frames_of(owner))
            run = self._bringups.begin(known, keys[: room // frames_for(known.layout.page_bytes)], below)
        try:
            sums: dict[int, int] = {}
            try:
                sums = self._bringups.read(run, self._places_unread(run))
            finally:
                with self._lock:
                    if not self.namespaces.is_open(known.number):  # cleared meanwhile
                        sums = {}
                    self._bringups.publish(run, sums)
                    self._give_arena_up()
            self._bringups.wait(run, deadline)
        except BaseException:
            with self._lock:
                self._bringups.give_up(run)
            raise
        with self._lock:
            held = self._bringups.end(run)
            self._count("asked", len(keys))
            self._count("hit", len(held))
            self._count("missed", len(keys) - len(held))
            self.write_behind.note_use(held)
            if not held:
                return Held(0, b"", [])
            ticket = self._tickets.open_load(owner, held, deadline)
            return Held(ticket.number, bytes(run.tiers[: len(held)]), [slot.frame for slot in held])

    def complete_load(self, owner: int, ticket: int) -> bool:
        """End a hold. False: it had lapsed, and the bytes may have changed while they were copied."""
        with self._lock:
            found = self._tickets.take_load(ticket, owner)
            if found is None:
                return False
            self._end_holds(found)
            return True

    def still_held(self, owner: int, ticket: int) -> bool:
        """Whether everything copied so far under this hold is good."""
        with self._lock:
            found = self._tickets.loads.get(ticket)
            return found is not None and found.owner == owner

    def checksums(self, owner: int, ticket: int) -> list[int] | None:
        """xxh3_64 of the pages that a ticket holds, made now where no one has yet. None: the hold has lapsed."""
        with self._lock:
            found = self._tickets.loads.get(ticket)
            if found is None or found.owner != owner:
                return None
            slots = found.slots
            made = [slot.checksum for slot in slots]
        sums = [
            checksum if checksum is not None else checksum_of(self.arena.view(slot.frame, slot.length))
            for slot, checksum in zip(slots, made, strict=True)
        ]
        with self._lock:
            if ticket not in self._tickets.loads:
                return None
            self._residency.note_checksums(slots, sums)
        return sums

    # -- keeping and dropping ----------------------------------------------------------------------------------------

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """Mark pages as used, head of the prefix first. Returns how many are in the arena."""
        keys = self._keys(self._known(fingerprint), hashes)
        with self._lock:
            slots = [slot for slot in map(self._catalog.find, keys) if slot is not None]
            self._catalog.touch(slots)
            self.write_behind.note_use(slots)
            return len(slots)

    def pin(self, fingerprint: bytes, hashes: Sequence[bytes], seconds: float) -> int:
        """Bring the leading pages up and keep them in the arena, whatever else wants their room. Blocks on I/O.

        Pinned pages take at most a quarter of the arena, and of their namespace's quota there. The pin outlives the
        node, and a page that is dropped all the same (by ``evict``) loses it.

        Args:
            fingerprint: the namespace.
            hashes: head of the prefix first.
            seconds: how long, from now; a longer pin of the same page stays.

        Returns:
            How many leading pages are pinned: fewer than asked for when one is nowhere, or the quota is full.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes, or a time that is not above 0 and at most 366 days.
        """
        known = self._known(fingerprint)
        if not 0 < seconds <= LONGEST_PIN:
            raise InvalidRequestError(
                f"a pin lasts above 0 and at most {LONGEST_PIN} seconds (366 days), not {seconds:g}"
            )
        keys = self._keys(known, hashes)
        until = time.time() + seconds
        pinned, size = 0, self.batch_pages(known)
        frames = frames_for(known.layout.page_bytes)
        quota = rule_for(self._rules, known.layout.name).quotas.get("arena", self.arena.arena_bytes)
        most = quota // FRAME_BYTES // _PINNED_SHARE // frames
        while pinned < len(keys):
            batch = hashes[pinned : pinned + size]
            held = self.prepare_load(NODE, fingerprint, batch, LONGEST_TICKET)
            with self._lock:
                here = keys[pinned : pinned + len(held.frames)]
                # A pin of what is cleared meanwhile would stay for nothing.
                taken = self._pins.add(here, until, frames, most) if self.namespaces.is_open(known.number) else 0
                for slot in [self._catalog.find(key) for key in here[:taken]]:
                    if slot is not None:
                        self._catalog.pin(slot)
            if held.ticket:
                self.complete_load(NODE, held.ticket)
            pinned += taken
            if taken < len(batch):
                break
        self._save_pins()
        return pinned

    def unpin(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """End pins. Returns how many there were."""
        ended = self._end_pins(self._keys(self._known(fingerprint), hashes))
        self._save_pins()
        return ended

    def note_use(self, fingerprint: bytes, hashes: Sequence[bytes], *, read: bool, missed: int) -> int:
        """A client read pages without a call, or says in what order pages are wanted that it read before.

        Args:
            fingerprint: the namespace; one that was dropped meanwhile is passed over.
            hashes: of a prefix, head first.
            read: whether this is how the node learns that they were read; pages are counted then.
            missed: pages of the same call that were not here; not more are counted than a lookup may name.

        Raises:
            LimitExceededError: more than ``MOST_LOOKUP_PAGES`` pages.

        Returns:
            How many of them are still in the arena.
        """
        known = self.namespaces.get(fingerprint)
        if known is None:
            return 0
        if len(hashes) > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"{len(hashes)} pages in one report, the limit is {MOST_LOOKUP_PAGES}")
        missed = min(missed, MOST_LOOKUP_PAGES)
        keys = self._keys(known, hashes)
        with self._lock:
            slots = [slot for slot in map(self._catalog.find, keys) if slot is not None]
            if read:
                self._catalog.use(slots)
                self._count("asked", len(keys) + missed)
                self._count("hit", len(keys))
                self._count("missed", missed)
            else:
                self._catalog.touch(slots)
            self.write_behind.note_use(slots)
            return len(slots)

    def evict(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """Drop pages from every tier. Returns how many were somewhere.

        Raises:
            ResourceError: a tier could not be reached, and may still have some. All others are gone.
        """
        keys = self._keys(self._known(fingerprint), hashes)
        if self._end_pins(keys):
            self._save_pins()
        return self._drop(keys)

    def clear(self, fingerprint: bytes) -> int:
        """Drop every page of a namespace, and the namespace. Returns how many pages were somewhere.

        Raises:
            ResourceError: a tier could not be reached, and may still have some. The namespace stays, for a second try.
        """
        self._check_open()
        known = self._known(fingerprint)
        self.namespaces.forget(known)
        self.arena.new_edition()
        with self._lock:
            keys = {slot.key for slot in self._catalog.resident() if slot.key.startswith(fingerprint)}
            pinned = self._pins.keys(fingerprint)
        failed: ResourceError | None = None
        for tier in self.below.all():
            try:
                keys.update(tier.keys(fingerprint))
            except ResourceError as error:
                failed = error
        if self._end_pins(pinned):
            self._save_pins()
        dropped = 0
        try:
            dropped = self._drop(sorted(keys))
        except ResourceError as error:
            failed = error
        with self._lock:
            self._catalog.forget_namespace(known.number)
        if failed is not None:
            self.open_namespace(known.layout, known.durability)  # to be cleared once more
            raise failed
        return dropped

    def flush(self, deadline: float = math.inf) -> int:
        """Write everything that is dirty now, and return when it is durable: the pages that became so.

        What waits for the shared tier is offered to it as well; what it takes is not counted.

        Args:
            deadline: when to stop writing, on the clock of ``time.monotonic``.

        Raises:
            ResourceError: some of them are not, since the tiers below would not take them, or not in time.
            UnavailableError: the store is closed.
        """
        self._check_open()
        self.write_behind.share_all(deadline)
        return self.write_behind.flush(deadline)

    # -- work of the node's own threads ------------------------------------------------------------------------------

    def sweep(self) -> None:
        """End what is past its deadline, and what dead clients left open; tell the tiers below what is used above."""
        dead = self._clients.dead()

        def gone(owner: int) -> bool:
            # A call may come through behind its client's end, and open a ticket for nobody.
            return owner in dead or (owner != NODE and owner not in self._clients)

        with self._lock:
            if self._closed:
                return
            stores, loads = self._tickets.overdue(time.monotonic())
            overdue = self._pins.end_overdue(time.time())
            self._unpin(overdue)
            for load in loads:
                self._tickets.take_load(load.number, load.owner)
                self._end_holds(load)
            for store in stores:
                self._lapse(store)
            for store in [ticket for ticket in self._tickets.stores.values() if gone(ticket.owner)]:
                self._tickets.take_store(store.number, store.owner)
                self._give_up(store)
            for load in [ticket for ticket in self._tickets.loads.values() if gone(ticket.owner)]:
                self._tickets.take_load(load.number, load.owner)
                self._end_holds(load)
        for number in dead:
            self._clients.forget(number)
        self._clients.remove_abandoned()
        with self._lock:
            if not self._closed:
                self._residency.release_quarantine(self._clients)
        if overdue:
            self._save_pins()
        self.write_behind.tell_own()

    def verify(self, stop: threading.Event) -> int:
        """Check every page that was taken over against its checksum; drop the damaged ones. Returns how many were."""
        with self._lock:
            slots = [slot for slot in self._catalog.resident() if slot.checksum is not None]
        damaged = 0
        for slot in slots:
            if stop.is_set():
                break
            with self._lock:
                if slot.state is not SlotState.RESIDENT:
                    continue
                self._catalog.hold(slot)
            right = checksum_of(self.arena.view(slot.frame, slot.length)) == slot.checksum
            with self._lock:
                if not right and slot.state is SlotState.RESIDENT:
                    damaged += 1
                    self._count("corrupt")
                    self._residency.drop(slot)
                self._catalog.release(slot)
        return damaged

    def statistics(self) -> StoreStatistics:
        """A frozen view of everything."""
        below = {tier.name: tier.statistics() for tier in self.below.all()}
        used_below = [
            (known, {tier.name: tier.used_by(known.fingerprint) for tier in self.below.all()})
            for known in self.namespaces.known()
        ]
        with self._lock:
            return StoreStatistics(
                arena_used_bytes=self._catalog.used_frames * FRAME_BYTES,
                arena_limit_bytes=self.arena.arena_bytes,
                arena_pages=len(self._catalog),
                dirty_pages=self._catalog.dirty_pages,
                counters=self.arena.counters(),
                below=below,
                namespaces=tuple(
                    NamespaceUsage(
                        known.layout,
                        self._catalog.pages_of(known.number),
                        {"arena": self._catalog.frames_of(known.number) * FRAME_BYTES} | used,
                        rule_for(self._rules, known.layout.name).quotas,
                        known.durability,
                        self._pins.pages_of(known.fingerprint),
                    )
                    for known, used in used_below
                ),
                clients=len(self._clients),
            )

    def check_integrity(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: something does not add up.
        """
        with self._lock:
            holders = [slot for ticket in self._tickets.loads.values() for slot in ticket.slots]
            writers = [slot for ticket in self._tickets.stores.values() for slot in ticket.slots]
            self._catalog.check_integrity(holders, writers + self._residency.quarantined)
            self.arena.check_index(
                [(slot.frame, slot.namespace, slot.key[-HASH_BYTES:], slot.length) for slot in self._catalog.resident()]
            )

    def close(self, deadline: float = math.inf) -> None:
        """Write back what is dirty, and give everything up. The arena's pages stay for the next node.

        Raises:
            ResourceError: not everything could be written back. Everything was given up all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with ExitStack() as closing:
            closing.callback(self._end)
            for tier in self.below.all():
                closing.callback(tier.close)
            closing.callback(self._bringups.close)
            self.write_behind.wake()
            self.write_behind.share_all(deadline)
            self.write_behind.flush(deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _known(self, fingerprint: bytes) -> KnownNamespace:
        known = self.namespaces.get(fingerprint)
        if known is None:
            raise UnknownNamespaceError(f"unknown namespace {fingerprint.hex()[:16] or '(empty)'}: open it first")
        return known

    def _keys(self, known: KnownNamespace, hashes: Sequence[bytes]) -> list[bytes]:
        for block_hash in hashes:
            if len(block_hash) != HASH_BYTES:
                raise InvalidRequestError(f"a block hash has {HASH_BYTES} bytes, got one of {len(block_hash)}")
        return [known.fingerprint + block_hash for block_hash in hashes]

    def _batch_keys(self, known: KnownNamespace, hashes: Sequence[bytes]) -> list[bytes]:
        if len(hashes) > self.batch_pages(known):
            raise LimitExceededError(f"{len(hashes)} pages in one batch, the limit is {self.batch_pages(known)}")
        return self._keys(known, hashes)

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the node is stopping")

    def _count(self, counter: str, pages: int = 1) -> None:
        self.arena.count(counter, pages)

    def _end(self) -> None:
        with (
            self.write_behind.writing,
            self._lock,
        ):  # who writes pages below writes their checksums into headers afterwards
            self._ended = True
            self._give_arena_up()

    def _give_arena_up(self) -> None:
        """At the end, unless a thread of this process may still write into a slot: then when the last one is done."""
        if self._ended and not self._bringups.reserved and not self._tickets.written_here():
            # What is reserved or held from now on is another node's to give.
            self._tickets.stores.clear()
            self._tickets.loads.clear()
            self._clients.close()
            self.namespaces.close()
            self._small_files.close()
            self.arena.close()

    def _unread(self, slots: Sequence[Slot]) -> bool:
        """Wait until nobody reads what was in these reserved slots before. False: somebody does, for too long."""
        if self._readers.passed(LAST_EPOCH):
            return True
        epoch = max((self.arena.retired_at(slot.frame, slot.frames) for slot in slots), default=0)
        return self._readers.wait(epoch, LONGEST_WAIT_FOR_READERS)

    def _places_unread(self, run: Run) -> list[int]:
        """The places of a run whose reserved slots nobody reads in any more; waits for the others, but not for long."""
        places = list(run.own)
        if self._unread([run.own[place].slot for place in places]):
            return places
        slots = {place: run.own[place].slot for place in places}
        return [
            place
            for place, slot in slots.items()
            if self._readers.passed(self.arena.retired_at(slot.frame, slot.frames))
        ]

    def _shorten(self, ticket: StoreTicket, outcomes: bytearray) -> None:
        """Refuse the reserved pages from the first one on whose slot is still being read: nobody knows of them yet."""
        with self._lock:
            slots, passed = ticket.slots, self._readers.passed
            kept = 0
            if ticket.number in self._tickets.stores:  # else its client is dead, and they are free already
                while kept < len(slots) and passed(self.arena.retired_at(slots[kept].frame, slots[kept].frames)):
                    kept += 1
                for slot in slots[kept:]:
                    self._residency.free_written(slot)
                self._count("refused", len(slots) - kept)
                if not kept:
                    self._tickets.take_store(ticket.number, ticket.owner)
            reserved = [place for place, outcome in enumerate(outcomes) if outcome == RESERVED]
            for place in reserved[kept:]:
                outcomes[place] = REFUSED
            del slots[kept:]

    def _lapse(self, ticket: StoreTicket) -> None:
        """A reservation is past its deadline: it can't be published any more."""
        self._count("lapsed", len(ticket.slots))
        if not ticket.direct:
            self._tickets.take_store(ticket.number, ticket.owner)
            self._give_up(ticket)
            return
        ticket.lapsed = True
        for slot in ticket.slots:
            self._catalog.lapse(slot)

    def _give_up(self, ticket: StoreTicket) -> None:
        """Free a ticket's slots: nobody writes into them any more."""
        for slot in ticket.slots:
            self._residency.free_written(slot)

    def _end_holds(self, ticket: LoadTicket) -> None:
        for slot in ticket.slots:
            self._catalog.release(slot)

    def _drop(self, keys: Sequence[bytes]) -> int:
        """Drop pages everywhere.

        Raises:
            ResourceError: a tier could not be reached, and may still have some. All others are gone.
        """
        dropped = self._drop_here(keys)
        removed = 0
        failed: ResourceError | None = None
        # Not while pages are being written below, which may be some of these.
        for tier in self.below.all():
            with self.write_behind.sharing if tier is self.below.shared else self.write_behind.writing:
                dropped.update(key for key, here in zip(keys, tier.contains(keys), strict=True) if here)
                try:
                    removed = max(removed, tier.remove(keys))
                except ResourceError as error:
                    failed = error
        if self.below.all():  # until now, pages could come up from there
            dropped |= self._drop_here(keys)
        if failed is not None:
            raise failed
        return max(len(dropped), removed)  # a shared tier may be too slow to say which of them it had

    def _drop_here(self, keys: Sequence[bytes]) -> set[bytes]:
        dropped = set()
        with self._lock:
            self._check_open()
            self._bringups.drop(keys)
            for key in keys:
                slot = self._catalog.find(key)
                if slot is not None:
                    self._residency.drop(slot)
                    dropped.add(key)
        return dropped

    # -- what namespaces are granted, and pins -----------------------------------------------------------------------

    def _grant(self, known: KnownNamespace) -> None:
        """Let a namespace have what its rule says: before anybody finds it, and again when its durability changes."""
        quotas = rule_for(self._rules, known.layout.name).quotas
        with self._lock:
            if known.durability == "disk":
                self._catalog.set_durable(known.number)
            if "arena" in quotas:
                self._catalog.set_quota(known.number, quotas["arena"] // FRAME_BYTES)
        warn_of_quotas_below_a_page(rule_for(self._rules, known.layout.name), known.layout)
        for tier in self.below.all():
            tier.set_quota(known.fingerprint, quotas.get(tier.name, 0))

    def _end_pins(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            ended = self._pins.remove(keys)
            self._unpin(ended)
            return len(ended)

    def _unpin(self, keys: Sequence[bytes]) -> None:
        """Let pages leave again; the caller holds the lock."""
        for slot in map(self._catalog.find, keys):
            if slot is not None:
                self._catalog.unpin(slot)

    def _save_pins(self) -> None:
        with self._saving_pins:
            with self._lock:
                table = None if self._closed else self._pins.copy()
            if table is not None:
                self._pins.save(table)
