"""Storing: slots are reserved, the caller writes the payloads, then they are published."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Container, Sequence

from kvstore.arena.format import frames_for
from kvstore.catalog.slot_state import Slot
from kvstore.errors import InvalidRequestError, LimitExceededError
from kvstore.limits import (
    LONGEST_TICKET,
    PRESENT,
    REFUSED,
    RESERVED,
)
from kvstore.store.leases import NODE, Part, StoreLease
from kvstore.store.results import Published, Reserved
from kvstore.store.state import StoreState
from kvstore.store.write_back import WriteBack
from kvstore.tiers.lower_tiers import LowerTiers
from kvstore.tiers.tier import PageBytes

_AHEAD_SHARE = 16
"""One reservation ahead takes at most this part of its namespace's quota."""


class Stores:
    """The reservations of a store, from the first slot to what became of the last page. Safe for threads.

    Args:
        books: of the arena.
        below: asked what is there already.
        write_behind: told of new pages.
    """

    def __init__(self, state: StoreState, below: LowerTiers, write_back: WriteBack) -> None:
        self._state = state
        self._below = below
        self._write_behind = write_back

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
            direct: whether the writer has the slots' memory before it; see :class:`StoreLease`.
            parent: hash of the page before the first one in its chain; empty: it is the head, or nobody knows.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        known = self._state.known(fingerprint)
        keys = self._state.batch_keys(known, hashes)
        before = [*(self._state.keys(known, [parent]) if parent else [b""]), *keys]
        below = self._below.find_own(keys)
        frames = frames_for(known.layout.page_bytes)
        outcomes = bytearray()
        slots: list[Slot] = []
        with self._state.lock:
            self._state.check_open()
            room = self._state.room_of(owner, known)
            full = False
            resident = self._state.catalog.find_all(keys).tolist()
            here_now = [slot for slot in resident if slot >= 0]
            self._state.catalog.hold(here_now)  # until the end of this call: a batch must not push out its own pages
            try:
                for key, previous, here, under in zip(keys, before[:-1], resident, below, strict=True):
                    if here >= 0 or under:
                        outcomes.append(PRESENT)
                        continue
                    reserved = None
                    if not full and room >= frames:
                        reserved = self._state.residency.reserve(key, known, owner, previous)
                    if reserved is None:
                        full = True
                        outcomes.append(REFUSED)
                        continue
                    room -= frames
                    slots.append(reserved)
                    outcomes.append(RESERVED)
            except BaseException:
                self._free(slots)
                raise
            finally:
                self._state.catalog.release(here_now)
            self._state.catalog.touch(here_now)
            present, refused = outcomes.count(PRESENT), outcomes.count(REFUSED)
            self._count(known.number, known.layout.page_bytes, present=present, refused=refused)
            if not slots:
                return Reserved(0, bytes(outcomes), [])
            deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
            ticket = self._state.leases.open_store(owner, slots, keys, deadline, direct=direct)
        if not self._state.unread(slots):
            self._shorten(ticket, outcomes)
        return Reserved(ticket.number * bool(slots), bytes(outcomes), self._state.frames(slots))

    def reserve_ahead(self, owner: int, fingerprint: bytes, pages: int, ttl: float, *, evict: bool = False) -> Reserved:
        """Reserve slots for pages that ``complete_ahead`` names: all of them, or none where there is no room.

        They take at most half of what one owner may have in hand. A durable namespace has none: what may be at risk is
        scarce. Nor do those of which one reservation takes much of the quota.

        Args:
            owner: a client that has the slots' memory before it.
            fingerprint: the namespace.
            pages: at most ``batch_pages`` of it.
            ttl: seconds until the reservation lapses, at most ``LONGEST_TICKET``.
            evict: whether other pages may leave for them: not for pages that may never come.

        Returns:
            Slots in the order in which they lie in the arena: those side by side can be written by one copy.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: the owner does not share the arena.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        known = self._state.known(fingerprint)
        if owner == NODE:
            raise InvalidRequestError("slots are reserved ahead for clients that share the arena only")
        if pages > self._state.batch_pages(known):
            raise LimitExceededError(f"{pages} pages in one batch, the limit is {self._state.batch_pages(known)}")
        frames = frames_for(known.layout.page_bytes)
        slots: list[Slot] = []
        with self._state.lock:
            self._state.check_open()
            quota = self._state.catalog.quota_of(known.number)
            if known.durability or (quota is not None and pages * frames > quota // _AHEAD_SHARE):
                return Reserved(0, b"", [])
            room = (self._state.half_frames // 2 - self._state.frames_of(owner)) // frames
            if not pages or room < pages:
                return Reserved(0, b"", [])
            try:
                while len(slots) < pages:
                    slot = self._state.residency.reserve(b"", known, owner, evict=evict)
                    if slot is None:
                        break
                    slots.append(slot)
            except BaseException:
                self._free(slots)
                raise
            if len(slots) < pages:  # a store like the one that this is for would not fit
                self._free(slots)
                return Reserved(0, b"", [])
            slots.sort(key=self._state.slots.frame.__getitem__)
            deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
            ticket = self._state.leases.open_store(owner, slots, [], deadline, direct=True, ahead=True)
        if not self._state.unread(slots):
            self._shorten(ticket, bytearray(len(slots)))
        return Reserved(ticket.number * bool(slots), bytes(len(slots)), self._state.frames(slots))

    def take_over_writing(self, owner: int, ticket: int) -> list[PageBytes] | None:
        """Begin to write an indirect ticket's payloads from one of the node's own threads.

        From now on the ticket does not lapse, and the calling thread alone can complete it: it does so in any case.

        Returns:
            What to fill, in order; None when the ticket is not open any more.
        """
        with self._state.lock:
            found = self._state.leases.stores.get(ticket)
            if found is None or found.owner != owner or found.direct:
                return None
            found.direct = True
            found.writer = threading.get_ident()
            found.deadline = math.inf
            return list(map(self._state.residency.view, found.slots))

    def complete_store(
        self,
        owner: int,
        ticket: int,
        *,
        publish: bool,
        checksums: Sequence[int] | None = None,
        part: Part | None = None,
    ) -> Published:
        """End a reservation, or a part of it: make its pages findable, all at once, or give them up.

        Args:
            owner: whose ticket it is.
            ticket: the number that ``prepare_store`` gave.
            publish: whether every payload is complete.
            checksums: xxh3_64 of each reserved page, where the writer made them.
            part: of which slots, in the order of the reservation; the others stay reserved.

        Raises:
            InvalidRequestError: there is no such part.
        """
        with self._state.lock:
            found = self._state.leases.take_store(ticket, owner, part)
            if found is None:
                return Published(0, 0, 0)
            last = part is None or not part.slots
            publish = publish and not found.ahead
            return self._publish(found, publish=publish, checksums=checksums, clean=(), last=last)

    def complete_ahead(
        self,
        owner: int,
        ticket: int,
        fingerprint: bytes,
        hashes: Sequence[bytes],
        outcomes: bytes,
        parent: bytes = b"",
        part: Part | None = None,
    ) -> Published:
        """End a reservation of ``reserve_ahead``, or a part of it: name the pages that were written, and make them
        findable.

        Args:
            owner: whose ticket it is.
            ticket: the number that ``reserve_ahead`` gave.
            fingerprint: the namespace of the reservation.
            hashes: a batch, head of the prefix first.
            outcomes: one byte a page: ``RESERVED`` for those that were written, into the slots in their order;
                ``PRESENT`` for those that the writer found here.
            parent: as for ``prepare_store``.
            part: which slots were written, if others still are.

        Returns:
            What became of the written pages: all are refused where the reservation lapsed or the namespace was cleared.

        Raises:
            InvalidRequestError: hashes, outcomes, part or the namespace do not go with each other or with the ticket.
                What was written is free again, or stays reserved where nobody can tell which slots these are.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        count = outcomes.count(RESERVED)
        known = self._state.namespaces.get(fingerprint)
        if known is None:
            self.complete_store(owner, ticket, publish=False, part=part)
            return Published(0, 0, count)
        try:
            _check_outcomes(outcomes, len(hashes), part)
            keys = self._state.batch_keys(known, hashes)
            before = [*(self._state.keys(known, [parent]) if parent else [b""]), *keys]
        except InvalidRequestError:
            self.complete_store(owner, ticket, publish=False, part=part)
            raise
        written = [place for place, outcome in enumerate(outcomes) if outcome == RESERVED]
        named = [keys[place] for place in written]
        below = self._below.find_own(named)
        with self._state.lock:
            found = self._state.leases.take_store(ticket, owner, part)
            if found is None:
                return Published(0, 0, 0)
            namespace = self._state.slots.namespace[found.slots[0]]
            if not found.ahead or count > len(found.slots) or namespace != known.number:
                self._state.give_up(found)
                raise InvalidRequestError(
                    f"{count} pages of namespace {known.number} do not go into a reservation of"
                    f" {len(found.slots)} slots for namespace {namespace}"
                )
            for slot in found.slots[count:]:
                self._state.residency.free_written(slot)
            del found.slots[count:]
            found.batch += keys  # those of its earlier parts are there
            if not found.slots:
                return Published(0, 0, 0)
            self._state.catalog.name(found.slots, named, [before[place] for place in written])
            present = len(keys) - count
            clean = {slot for slot, under in zip(found.slots, below, strict=True) if under}
            last = part is None or not part.slots
            return self._publish(found, publish=True, checksums=None, clean=clean, last=last, present=present)

    def catch_up(self) -> None:
        """Work out in which order pages leave: what stores leave to be done behind their answers."""
        with self._state.lock:
            self._state.catalog.catch_up()

    def lapse(self, ticket: StoreLease) -> None:
        """A reservation is past its deadline: it can't be published any more. The caller holds the lock."""
        self._state.count("lapsed", len(ticket.slots))
        if not ticket.direct:
            self._state.leases.take_store(ticket.number, ticket.owner)
            self._state.give_up(ticket)
            return
        ticket.lapsed = True
        for slot in ticket.slots:
            self._state.catalog.lapse(slot)

    def _publish(
        self,
        ticket: StoreLease,
        *,
        publish: bool,
        checksums: Sequence[int] | None,
        clean: Container[Slot],
        last: bool,
        present: int = 0,
    ) -> Published:
        """End a ticket that was taken, or a part of one; the caller holds the lock. ``clean``: slots of pages that are
        below already. ``last``: no parts are left. ``present``: pages besides that the writer found here."""
        slots, pages = ticket.slots, len(ticket.slots)
        namespace, page_bytes = self._state.slots.namespace[slots[0]], self._state.slots.length[slots[0]]
        if ticket.lapsed or not publish or not self._state.namespaces.is_open(namespace):
            self._state.give_up(ticket)
            self._count(namespace, page_bytes, present=present, refused=pages if ticket.batch else 0)
            self._state.give_arena_up()
            return Published(0, 0, pages)
        own = bool(self._below.own)
        dirty = [own and slot not in clean for slot in slots]
        stored = self._state.residency.publish(slots, checksums or [None] * pages, dirty)
        if last:  # with what was here before: a prefix's old head must not count as older than its new tail
            self._state.catalog.touch_later(ticket.batch)
        self._count(namespace, page_bytes, stored=stored, present=present + pages - stored)
        self._write_behind.add(slots)
        self._state.give_arena_up()
        return Published(stored, pages - stored, 0)

    def _count(self, namespace: int, page_bytes: int, *, stored: int = 0, present: int = 0, refused: int = 0) -> None:
        """Count offered pages, of the node and of their namespace; the caller holds the lock."""
        self._state.count("stored", stored)
        self._state.count("present", present)
        self._state.count("refused", refused)
        if self._state.namespaces.is_open(namespace):
            self._state.usage.stored(namespace, page_bytes, stored=stored, present=present, refused=refused)

    def _free(self, slots: Sequence[Slot]) -> None:
        """Free reserved slots of no ticket; the caller holds the lock."""
        for slot in slots:
            self._state.residency.free_written(slot)

    def _shorten(self, ticket: StoreLease, outcomes: bytearray) -> None:
        """Refuse the reserved pages from the first one on whose slot is still being read: nobody knows of them yet."""
        with self._state.lock:
            slots, passed = ticket.slots, self._state.readers.passed
            kept = 0
            if ticket.number in self._state.leases.stores:  # else its client is dead, and they are in quarantine
                while kept < len(slots) and passed(self._state.retired_at(slots[kept])):
                    kept += 1
                namespace, page_bytes = self._state.slots.namespace[slots[0]], self._state.slots.length[slots[0]]
                for slot in slots[kept:]:
                    self._state.residency.free_written(slot)
                self._count(namespace, page_bytes, refused=len(slots) - kept if ticket.batch else 0)
                if not kept:
                    self._state.leases.take_store(ticket.number, ticket.owner)
            reserved = [place for place, outcome in enumerate(outcomes) if outcome == RESERVED]
            for place in reserved[kept:]:
                outcomes[place] = REFUSED
            del slots[kept:]


def _check_outcomes(outcomes: bytes, pages: int, part: Part | None) -> None:
    """Whether a client's outcomes are those of so many pages, and of this part's slots.

    Raises:
        InvalidRequestError: they are not.
    """
    if len(outcomes) != pages or not set(outcomes) <= {RESERVED, PRESENT}:
        raise InvalidRequestError(f"{len(outcomes)} outcomes for {pages} pages, each must be written or present")
    count = outcomes.count(RESERVED)
    if part is not None and part.slots not in (0, count):
        raise InvalidRequestError(f"{count} written pages for a part of {part.slots} slots")
