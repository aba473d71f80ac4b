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

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.answers import (
    ABSENT,
    ARENA,
    BATCH_BYTES,
    DISK,
    LONGEST_TICKET,
    MOST_BATCH_PAGES,
    MOST_LOOKUP_PAGES,
    PRESENT,
    REDIS,
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
from kvstore.arena.residency import Residency
from kvstore.bringup import BringUps
from kvstore.bytesize import format_size
from kvstore.catalog import Slot, SlotState
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
from kvstore.sharing import Sharing
from kvstore.tickets import NODE, LoadTicket, StoreTicket, Tickets
from kvstore.tiers.tier import PageWrite, Tier

Bytes = npt.NDArray[np.uint8]

_WRITE_BYTES = 8 << 20
"""Most bytes that are held for one write to the tiers below, unless it is one page."""
_WRITE_PAGES = 512
_SHARE_BYTES = 32 << 20
"""Most bytes that are held for one write to the shared tier, unless it is one page."""
_SHARE_PAGES = 2048
MOST_UNSHARED_PAGES = 1 << 16
"""Most pages that wait for the shared tier; the oldest are passed over first."""


class Store:
    """The heart of a node. Safe for threads; close it when done.

    Args:
        arena: opened for this process; closed with the store.
        tiers: the tiers below of this node alone, fastest first; closed with the store.
        namespace_directories: where the register of namespaces is kept, the arena's folder first.
        shared: the tier that several nodes share; closed with the store.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Sequence[Tier],
        namespace_directories: Sequence[Path],
        shared: Tier | None = None,
    ) -> None:
        self.arena = arena
        self.tiers = tuple(tiers)
        self.shared = shared
        self.namespaces = Namespaces(namespace_directories)
        self._clients = Clients(arena.directory / "clients")
        self._residency = Residency(arena)
        self._catalog = self._residency.catalog
        self._tickets = Tickets()
        self._bringups = BringUps(arena, self._residency, self.tiers, shared)
        self._to_share = Sharing(MOST_UNSHARED_PAGES)
        self._half_frames = arena.arena_bytes // FRAME_BYTES // 2
        """As much as one owner may have in hand."""
        self._lock = threading.Lock()
        self._dirtied = threading.Condition(self._lock)
        self._published = threading.Condition(self._lock)
        self._writing = threading.Lock()
        self._sharing = threading.Lock()
        self._closed = False
        self._ended = False
        self.kept_pages = 0
        """Pages that were found in the arena of an earlier node."""
        if arena.taken_over:
            self.kept_pages = self._residency.take_over(
                self.namespaces, self._clients, self._below, tiers=bool(self.tiers)
            )
        self.namespaces.save()

    # -- namespaces and clients --------------------------------------------------------------------------------------

    def open_namespace(self, layout: Layout) -> KnownNamespace:
        """The namespace of a layout, new or known.

        Raises:
            LayoutMismatchError: the same name is known with another page size.
            LimitExceededError: too many namespaces, or pages larger than half of the arena.
        """
        if frames_for(layout.page_bytes) > self._half_frames:
            raise LimitExceededError(
                f"page_bytes is {layout.page_bytes} ({format_size(layout.page_bytes)}), the limit is half of the arena,"
                f" {format_size(self._half_frames * FRAME_BYTES)}"
            )
        self._check_open()
        return self.namespaces.open(layout)

    def batch_pages(self, known: KnownNamespace) -> int:
        """Most pages that one ``prepare_store`` or ``prepare_load`` of this namespace may name."""
        page = frames_for(known.layout.page_bytes) * FRAME_BYTES
        return max(1, min(BATCH_BYTES // page, self.arena.arena_bytes // 4 // page, MOST_BATCH_PAGES))

    def attach(self, lock_name: str) -> int:
        """Take in a client that maps the arena; see :mod:`kvstore.arena.clients`. Returns its name in this arena."""
        self._check_open()
        return self._arena_tag() | self._clients.attach(lock_name)

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
        below = self._below_and_shared(asked)
        with self._lock:
            find = self._catalog.find
            return [
                bytes(ARENA if find(key) else under for key, under in zip(keys, unders, strict=True))
                for keys, unders in zip(asked, below, strict=True)
            ]

    # -- storing -----------------------------------------------------------------------------------------------------

    def prepare_store(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float, *, direct: bool
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

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        known = self._known(fingerprint)
        keys = self._batch_keys(known, hashes)
        below = self._below(keys)
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
            for key, here, under in zip(keys, resident, below, strict=True):
                if here is not None or under:
                    outcomes.append(PRESENT)
                    continue
                reserved = None if full or room < frames else self._residency.reserve(key, known, owner)
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
            return Reserved(ticket.number, bytes(outcomes), [slot.frame for slot in slots])

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
            stored = self._residency.publish(found.slots, checksums or [None] * pages, dirty=bool(self.tiers))
            # With what was here before: a prefix's old head must not count as older than its new tail.
            self._catalog.touch([slot for slot in map(self._catalog.find, found.batch) if slot is not None])
            self._count("stored", stored)
            self._count("present", pages - stored)
            self._dirtied.notify_all()
            if self.shared is not None:
                self._count("unshared", self._to_share.add(found.slots))
                self._published.notify_all()
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
        (below,) = self._below_and_shared([keys])
        deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
        with self._lock:
            self._check_open()
            room = max(0, self._half_frames - self._tickets.frames_of(owner))
            run = self._bringups.begin(known, keys[: room // frames_for(known.layout.page_bytes)], below)
        try:
            sums: dict[int, int] = {}
            try:
                sums = self._bringups.read(run)
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
            return len(slots)

    def evict(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """Drop pages from every tier. Returns how many were somewhere."""
        return self._drop(self._keys(self._known(fingerprint), hashes))

    def clear(self, fingerprint: bytes) -> int:
        """Drop every page of a namespace, and the namespace. Returns how many pages were somewhere."""
        self._check_open()
        self.namespaces.forget(self._known(fingerprint))
        with self._lock:
            keys = {slot.key for slot in self._catalog.resident() if slot.key.startswith(fingerprint)}
        for tier in self._all_tiers():
            keys.update(tier.keys(fingerprint))
        return self._drop(sorted(keys))

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
        self._share_all(deadline)
        return self._flush(deadline)

    # -- work of the node's own threads ------------------------------------------------------------------------------

    def wait_for_dirty(self, timeout: float) -> bool:
        """Wait until some page must be written below. False: none within ``timeout`` seconds."""
        with self._dirtied:
            if not self._catalog.dirty_pages:
                self._dirtied.wait(timeout)
            return self._catalog.dirty_pages > 0

    def wait_for_unshared(self, timeout: float) -> bool:
        """Wait until some page is to be offered to the shared tier. False: none within ``timeout`` seconds."""
        with self._published:
            if not self._to_share:
                self._published.wait(timeout)
            return bool(self._to_share)

    def wake(self) -> None:
        """Let ``wait_for_dirty`` and ``wait_for_unshared`` return."""
        with self._lock:
            self._dirtied.notify_all()
            self._published.notify_all()

    def share(self) -> int:
        """Offer one batch of new pages, oldest first, to the shared tier. Returns how many it has now.

        A page that has left the arena meanwhile is counted as unshared, and so is one that the tier does not take:
        there is no second try, since what comes behind is as good.
        """
        if self.shared is None:
            return 0
        with self._sharing:
            with self._lock:
                batch, gone = self._to_share.take(_SHARE_PAGES, min(_SHARE_BYTES, self.arena.arena_bytes // 8))
                self._count("unshared", gone)
                for slot in batch:
                    self._catalog.hold(slot)
            shared = 0
            sums: list[int | None] = [None] * len(batch)
            try:
                pages, sums = self._writes_of(batch)
                shared = sum(self.shared.write(pages)) if pages else 0
            finally:
                with self._lock:
                    self._residency.note_checksums(batch, sums)
                    for slot in batch:
                        self._catalog.release(slot)
                    self._count("shared", shared)
                    self._count("unshared", len(batch) - shared)
        return shared

    def write_back(self) -> int:
        """Write one batch of dirty pages, oldest first, to the tiers below. Returns how many are clean now."""
        with self._writing:
            with self._lock:
                batch, _ = self._hold_batch(self._catalog.dirty(_WRITE_PAGES))
            return self._write(batch)

    def sweep(self) -> None:
        """End what is past its deadline, and what dead clients left open."""
        dead = self._clients.dead()

        def gone(owner: int) -> bool:
            # A call may come through behind its client's end, and open a ticket for nobody.
            return owner in dead or (owner != NODE and owner not in self._clients)

        with self._lock:
            if self._closed:
                return
            stores, loads = self._tickets.overdue(time.monotonic())
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
        below = {tier.name: tier.statistics() for tier in self._all_tiers()}
        with self._lock:
            return StoreStatistics(
                arena_used_bytes=self._catalog.used_frames * FRAME_BYTES,
                arena_limit_bytes=self.arena.arena_bytes,
                arena_pages=len(self._catalog),
                dirty_pages=self._catalog.dirty_pages,
                counters=self.arena.counters(),
                below=below,
                namespaces=tuple(
                    NamespaceUsage(known.layout, self._catalog.pages_of(known.number))
                    for known in self.namespaces.known()
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

    def close(self, deadline: float = math.inf) -> None:
        """Write back what is dirty, and give everything up. The arena's pages stay for the next node.

        Raises:
            ResourceError: not everything could be written back. Everything was given up all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._dirtied.notify_all()
        with ExitStack() as closing:
            closing.callback(self._end)
            for tier in self._all_tiers():
                closing.callback(tier.close)
            closing.callback(self._bringups.close)
            self._share_all(deadline)
            self._flush(deadline)

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

    def _below(self, keys: Sequence[bytes]) -> bytes:
        """For each key ``DISK`` where a tier below has it, else ``ABSENT``."""
        found = bytearray(len(keys))
        for tier in self.tiers:
            for place, here in enumerate(tier.contains(keys)):
                if here:
                    found[place] = DISK
        return bytes(found)

    def _below_and_shared(self, asked: Sequence[Sequence[bytes]]) -> list[bytes]:
        """For each list of keys, where below the arena each page is. The shared tier is asked once, for all that this
        node has nowhere."""
        answers = [bytearray(self._below(keys)) for keys in asked]
        if self.shared is not None:
            with self._lock:
                nowhere = [
                    (answer, place, key)
                    for keys, answer in zip(asked, answers, strict=True)
                    for place, key in enumerate(keys)
                    if answer[place] == ABSENT and self._catalog.find(key) is None
                ]
            there = self.shared.contains([key for _, _, key in nowhere]) if nowhere else []
            for (answer, place, _), here in zip(nowhere, there, strict=True):
                if here:
                    answer[place] = REDIS
        return list(map(bytes, answers))

    def _all_tiers(self) -> tuple[Tier, ...]:
        return self.tiers if self.shared is None else (*self.tiers, self.shared)

    def _share_all(self, deadline: float) -> None:
        """Offer everything that waits now to the shared tier."""
        if self.shared is None:
            return
        with self._lock:
            left = len(self._to_share)
        while left > 0 and time.monotonic() < deadline:
            with self._lock:
                before = len(self._to_share)
            self.share()
            with self._lock:
                left -= max(before - len(self._to_share), 1)

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the node is stopping")

    def _count(self, counter: str, pages: int = 1) -> None:
        self.arena.count(counter, pages)

    def _end(self) -> None:
        with self._writing, self._lock:  # who writes pages below writes their checksums into headers afterwards
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
            self.arena.close()

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
        dropped = self._drop_here(keys)
        # Not while pages are being written below, which may be some of these.
        for lock, tiers in ((self._writing, self.tiers), (self._sharing, self._all_tiers()[len(self.tiers) :])):
            with lock:
                for tier in tiers:
                    dropped.update(key for key, here in zip(keys, tier.contains(keys), strict=True) if here)
                    tier.remove(keys)
        if self._all_tiers():  # until now, pages could come up from there
            dropped |= self._drop_here(keys)
        return len(dropped)

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

    def _flush(self, deadline: float) -> int:
        with self._lock:
            todo = self._catalog.dirty(self._catalog.dirty_pages)
        done = 0
        while done < len(todo) and time.monotonic() < deadline:
            with self._writing:
                with self._lock:
                    batch, seen = self._hold_batch(todo[done : done + _WRITE_PAGES])
                self._write(batch)
            done += seen
        for tier in self.tiers:
            tier.flush()
        left = sum(slot.dirty for slot in todo)
        if left:
            raise ResourceError(f"{left} of {len(todo)} pages are not on disk: no tier below would take them (in time)")
        return self._below([slot.key for slot in todo]).count(DISK)

    def _hold_batch(self, slots: Sequence[Slot]) -> tuple[list[Slot], int]:
        """Hold the dirty ones of ``slots``, as many as one write takes, and never more than an eighth of the arena.

        Returns:
            These, and how many of ``slots`` that deals with.
        """
        budget = min(_WRITE_BYTES, self.arena.arena_bytes // 8)
        batch: list[Slot] = []
        for seen, slot in enumerate(slots):
            if not slot.dirty:
                continue
            if batch and budget < slot.length:
                return batch, seen
            self._catalog.hold(slot)
            batch.append(slot)
            budget -= slot.length
        return batch, len(slots)

    def _write(self, batch: Sequence[Slot]) -> int:
        """Write held pages to the tiers below, and end the holds. Returns how many are clean now."""
        written: list[bool] = [False] * len(batch)
        sums: list[int | None] = [None] * len(batch)
        try:
            pages, sums = self._writes_of(batch)
            for tier in self.tiers:
                written = [a or b for a, b in zip(written, tier.write(pages), strict=True)]
        finally:
            with self._lock:
                self._residency.note_checksums(batch, sums)
                for slot, done in zip(batch, written, strict=True):
                    if done:
                        self._catalog.mark_clean(slot)
                    else:
                        self._catalog.defer(slot)
                    self._catalog.release(slot)
        return sum(written)

    def _writes_of(self, held: Sequence[Slot]) -> tuple[list[PageWrite], list[int | None]]:
        """Held pages as tiers take them, with checksums made where there are none yet."""
        pages = []
        for slot in held:
            view = self.arena.view(slot.frame, slot.length)
            pages.append(PageWrite(slot.key, slot.checksum if slot.checksum is not None else checksum_of(view), view))
        return pages, [page.checksum for page in pages]


def checksum_of(payload: Bytes) -> int:
    """xxh3_64 of a payload, unsigned."""
    return xxhash.xxh3_64_intdigest(payload.data)
