"""The state of a store, with one owner and one lock over it: pages, leases, namespaces, clients, readers.

:class:`StoreState` makes the objects that the parts of a store share; each part binds those that it needs, and none is
ever replaced. The lock guards the catalog, the leases, the headers and the pins. It is held for decisions only: payload
copies, checksums and all I/O of the tiers happen outside of it. Some locks are held over I/O and taken before it, never
behind it: ``WriteBack.writing`` and ``sharing``, ``Archive.writing``, and the one of :class:`kvstore.store.pins.Pins`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from kvstore.arena.arena import Arena
from kvstore.arena.clients import Clients
from kvstore.arena.epochs import LAST_EPOCH, ReaderEpochs
from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.catalog.slot_state import Slot
from kvstore.errors import (
    InvalidRequestError,
    LimitExceededError,
    NotAttachedError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.events.ring import EventRing
from kvstore.hashing import HASH_BYTES
from kvstore.host.atomic_files import AtomicFiles
from kvstore.host.forking import register_forked
from kvstore.limits import BATCH_BYTES, MOST_BATCH_PAGES, MOST_LOOKUP_PAGES
from kvstore.namespaces.registry import KnownNamespace, NamespaceRegistry
from kvstore.namespaces.usage import Usage
from kvstore.store.leases import (
    NODE,
    Leases,
    StoreLease,
)
from kvstore.store.promotion import Promotions
from kvstore.store.residency import Residency
from kvstore.tiers.lower_tiers import LowerTiers

SLOTS_A_LOOK = 1 << 14
"""Slots looked at under one hold of the lock, where all of them must be."""
PAGES_A_STEP = 256
"""Pages treated under one hold, where many must be."""
PAUSE_SECONDS = 0.001
"""Between two such holds, so that others have the lock, too."""
LONGEST_WAIT_FOR_READERS = 0.1
"""Longest time in seconds that a reservation waits for clients that read what was in its slots before."""


class StoreState:
    """What the parts of a store share, and what several of them ask of it. Methods that say so want the lock held by
    their caller.

    The arena is closed when the last thread of this process that may write into a slot is done; ``namespaces`` and
    ``small_files``, which the registers are written with, are closed with it.
    """

    def __init__(
        self, arena: Arena, namespaces: NamespaceRegistry, lower_tiers: LowerTiers, small_files: AtomicFiles
    ) -> None:
        self.arena = arena
        self.namespaces = namespaces
        self.lower_tiers = lower_tiers
        self._small_files = small_files
        self.lock = threading.Lock()
        self.clients = Clients(arena.directory / "clients")
        self.readers = ReaderEpochs(arena.lines, self.clients)
        self.events = EventRing()
        self.residency = Residency(arena, self.events)
        for tier in lower_tiers.all():
            tier.tell(self.events)
        self.catalog = self.residency.catalog
        self.slots = self.residency.slots
        self.leases = Leases()
        self.usage = Usage()
        self.promotions = Promotions(arena, self.residency, lower_tiers)
        self.half_frames = arena.arena_bytes // FRAME_BYTES // 2
        """Most frames that one owner may reserve and hold."""
        self.closed = False
        """Nothing new is begun."""
        self.all_written_back = False
        """At the end: everything that was stored is in lower tiers, for good."""
        self._ended = False
        """Once the last writer is done, the arena is another node's."""
        self._inherited = False
        register_forked(self)

    def forked(self) -> None:
        """In a child: this store is closed, and nobody who held the lock will let it go."""
        self._inherited = self.closed = True
        if self.lock.locked():
            self.lock.release()

    # -- clients -----------------------------------------------------------------------------------------------------

    def attach(self, lock_name: str, name: str) -> int:
        """Take in a client that maps the arena; see :mod:`kvstore.arena.clients`. Returns its number in this arena."""
        self.check_open()
        number = self.clients.attach(lock_name, name)
        self.readers.welcome(number)
        return self._arena_tag() | number

    def owner_of(self, client: int) -> int:
        """The number of an attached client.

        Raises:
            NotAttachedError: no such client is attached to this arena.
        """
        number = client & 0xFFFF
        if client - number != self._arena_tag() or number not in self.clients:
            raise NotAttachedError("this client is not attached to the node's arena: it must attach again")
        return number

    def _arena_tag(self) -> int:
        return int.from_bytes(self.arena.arena_id[:6], "little") << 16

    # -- what a request names ----------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises UnavailableError once the store is being closed, and in a forked child."""
        if self._inherited:
            raise UnavailableError("this store is the parent process's: a forked child opens one of its own")
        if self.closed:
            raise UnavailableError("the node is stopping")

    def known(self, fingerprint: bytes, *, used: bool = True) -> KnownNamespace:
        """The namespace of a fingerprint. ``used``: it counts as used now.

        Raises:
            UnknownNamespaceError: it was not opened, or was cleared.
        """
        known = self.namespaces.get(fingerprint)
        if known is None:
            raise UnknownNamespaceError(f"unknown namespace {fingerprint.hex()[:16] or '(empty)'}: open it first")
        if used:
            self.namespaces.note_use(known)
        return known

    def keys(self, known: KnownNamespace, hashes: Sequence[bytes]) -> list[bytes]:
        """The keys of a namespace's pages.

        Raises:
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``MOST_LOOKUP_PAGES`` pages.
        """
        if set(map(len, hashes)) - {HASH_BYTES}:
            wrong = next(len(block_hash) for block_hash in hashes if len(block_hash) != HASH_BYTES)
            raise InvalidRequestError(f"a block hash has {HASH_BYTES} bytes, got one of {wrong}")
        if len(hashes) > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"{len(hashes)} pages in one call, the limit is {MOST_LOOKUP_PAGES}")
        fingerprint = known.fingerprint
        return [fingerprint + block_hash for block_hash in hashes]

    def batch_pages(self, known: KnownNamespace) -> int:
        """Most pages that one ``prepare_store`` or ``prepare_load`` of this namespace may name."""
        page = frames_for(known.layout.page_bytes) * FRAME_BYTES
        return max(1, min(BATCH_BYTES // page, self.arena.arena_bytes // 4 // page, MOST_BATCH_PAGES))

    def batch_keys(self, known: KnownNamespace, hashes: Sequence[bytes]) -> list[bytes]:
        """The keys of one batch.

        Raises:
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        if len(hashes) > self.batch_pages(known):
            raise LimitExceededError(f"{len(hashes)} pages in one batch, the limit is {self.batch_pages(known)}")
        return self.keys(known, hashes)

    def are_here(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are in the arena now."""
        with self.lock:
            here: list[bool] = (self.catalog.find_all(keys) >= 0).tolist()
            return here

    def pages_here(self, namespace: int | None = None, *, dirty: bool = False) -> Iterator[list[int]]:
        """The stamps of the pages in the arena, a few at a time: of one namespace alone, or of dirty pages alone.

        For what must walk over all of them: the lock is taken to look at some slots, and let go in between, so the
        caller must not have it. Pages that come meanwhile may be passed over; :meth:`still_here` says which left.
        """
        for first in range(0, len(self.slots), SLOTS_A_LOOK):  # slots that are added later hold pages that come later
            with self.lock:
                stamps = self.slots.stamps_of(first, SLOTS_A_LOOK, namespace, dirty=dirty)
            for at in range(0, len(stamps), PAGES_A_STEP):
                yield stamps[at : at + PAGES_A_STEP]
                time.sleep(PAUSE_SECONDS)

    def still_here(self, stamps: Sequence[int]) -> list[Slot]:
        """Where those of the pages are that have not left; the caller holds the lock."""
        slots = map(self.slots.find_stamp, stamps)
        return [slot for slot in slots if slot is not None and self.slots.is_resident(slot)]

    # -- what leases hold --------------------------------------------------------------------------------------------

    def frames(self, slots: Sequence[Slot]) -> list[int]:
        """Where slots lie: the first frame of each."""
        return [self.slots.frame[slot] for slot in slots]

    def frames_of(self, owner: int) -> int:
        """Frames that one owner has reserved or holds, its loads under way included; the caller holds the lock."""
        frames = self.slots.frames
        leased = sum(frames[slot] for slot in self.leases.slots_of(owner))
        return leased + self.promotions.frames_under_way(owner)

    def allowance(self, owner: int, known: KnownNamespace) -> int:
        """Frames that an owner may reserve or hold now for pages of a namespace; the caller holds the lock.

        Clients that don't share the arena are one owner. Of its half of the arena a tenant gets half of what all others
        leave: so there is always some left, and nobody's stores and loads are refused for what others reserve and hold.
        """
        leased = self.frames_of(owner)
        tenant = known.layout.tenant
        if owner != NODE or not tenant:
            return self.half_frames - leased
        numbers = {each.number for each in self.namespaces.known() if each.layout.tenant == tenant}
        slots = self.slots
        own = sum(slots.frames[slot] for slot in self.leases.slots_of(NODE) if slots.namespace[slot] in numbers)
        own += self.promotions.frames_under_way(NODE, tenant)
        return (self.half_frames - (leased - own)) // 2 - own

    def give_up(self, lease: StoreLease) -> None:
        """Free a lease's slots: nobody writes into them any more. The caller holds the lock."""
        for slot in lease.slots:
            self.residency.free_written(slot)

    def retired_at(self, slot: Slot) -> int:
        """The epoch at which a page left a reserved slot last."""
        return self.arena.retired_at(self.slots.frame[slot], self.slots.frames[slot])

    def unread(self, slots: Sequence[Slot]) -> bool:
        """Wait until nobody reads what was in these reserved slots before. False: somebody does, for too long."""
        if self.readers.passed(LAST_EPOCH):
            return True
        epoch = max(map(self.retired_at, slots), default=0)
        return self.readers.wait(epoch, LONGEST_WAIT_FOR_READERS)

    def count_loaded(self, known: KnownNamespace, keys: Sequence[bytes], tiers: bytes, missed: int) -> None:
        """Count a load: the first of ``keys`` were found, each in its tier; the caller holds the lock."""
        count = self.arena.count
        count("asked", len(tiers) + missed)
        count("hit", len(tiers))
        count("missed", missed)
        if self.namespaces.is_open(known.number):
            self.usage.loaded(known.number, keys, tiers, missed, known.layout.page_bytes)

    # -- checking ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Compare catalog, leases and index with each other."""
        with self.lock:
            holders = [slot for lease in self.leases.loads.values() for slot in lease.slots]
            writers = [slot for lease in self.leases.stores.values() for slot in lease.slots]
            slots = self.slots
            self.catalog.check_integrity(holders, [*writers, *self.residency.quarantined])
            self.arena.check_index(
                [
                    (slots.frame[slot], slots.namespace[slot], slots.block_hash(slot), slots.length[slot])
                    for slot in self.catalog.resident()
                ]
            )

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Give the arena up as soon as nobody here can write into it. The caller holds the lock, and writes nothing."""
        self._ended = True
        self.give_arena_up()

    def give_arena_up(self) -> None:
        """At the end, unless a thread of this process may still write into a slot: then when the last one is done.

        The caller holds the lock.
        """
        if self._ended and not self.promotions.reserved and not self.leases.written_here():
            # What is reserved or held from now on is another node's to give.
            self.leases.stores.clear()
            self.leases.loads.clear()
            self.clients.close()
            self.namespaces.close()
            self._small_files.close()
            unwritten = self.catalog.dirty_pages > 0 or not self.all_written_back
            self.arena.close(needed=bool(self.lower_tiers.own) and unwritten)
