"""Stores: slots are reserved, the caller writes the payloads, then the pages are published, all at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Container, Sequence

from kvstore.arena.format import frames_for
from kvstore.catalog.slot_state import Slot
from kvstore.errors import InvalidRequestError, LimitExceededError
from kvstore.limits import LONGEST_LEASE
from kvstore.page_codes import StoreOutcome
from kvstore.store.leases import NODE, Part, StoreLease
from kvstore.store.results import Published, Reserved
from kvstore.store.state import StoreState
from kvstore.store.write_back import WriteBack
from kvstore.tiers.tier import PageBytes

_AHEAD_SHARE = 16
"""One reservation ahead takes at most this part of its namespace's quota."""


class Stores:
    """The reservations of a store, from the first slot to what became of the last page. Safe for threads."""

    def __init__(self, state: StoreState, write_back: WriteBack) -> None:
        self._state = state
        self._arena = state.arena
        self._lock = state.lock
        self._catalog = state.catalog
        self._slots = state.slots
        self._residency = state.residency
        self._leases = state.leases
        self._namespaces = state.namespaces
        self._lower_tiers = state.lower_tiers
        self._write_back = write_back

    def prepare_store(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float, *, direct: bool, parent: bytes = b""
    ) -> Reserved:
        """Reserve a slot for each page that is not here."""
        known = self._state.known(fingerprint)
        keys = self._state.batch_keys(known, hashes)
        before = [*(self._state.keys(known, [parent]) if parent else [b""]), *keys]
        lower = self._lower_tiers.find_own(keys)
        frames = frames_for(known.layout.page_bytes)
        present, refused, reserved = StoreOutcome.PRESENT, StoreOutcome.REFUSED, StoreOutcome.RESERVED
        with self._lock:
            self._state.check_open()
            allowance = self._state.allowance(owner, known)
            resident = self._catalog.find_all(keys).tolist()
            here_now = [slot for slot in resident if slot >= 0]
            is_here = [here >= 0 or tier > 0 for here, tier in zip(resident, lower, strict=True)]
            wanted = [place for place, here in enumerate(is_here) if not here]
            outcomes = bytearray(present if here else refused for here in is_here)
            some = wanted[: max(0, allowance // frames)]
            self._catalog.hold(here_now)  # until the end of this call: a batch must not push out its own pages
            try:
                slots = self._residency.reserve_all(
                    [keys[place] for place in some], known, owner, [before[place] for place in some]
                )
            finally:
                self._catalog.release(here_now)
            for place in some[: len(slots)]:
                outcomes[place] = reserved
            self._catalog.touch(here_now)
            page_bytes = known.layout.page_bytes
            self._count(known.number, page_bytes, present=outcomes.count(present), refused=outcomes.count(refused))
            if not slots:
                return Reserved(0, bytes(outcomes), [])
            deadline = time.monotonic() + min(ttl, LONGEST_LEASE)
            lease = self._leases.open_store(owner, slots, keys, deadline, direct=direct)
        if not self._state.unread(slots):
            self._shorten(lease, outcomes)
        return Reserved(lease.number * bool(slots), bytes(outcomes), self._state.frames(slots))

    def reserve_ahead(self, owner: int, fingerprint: bytes, pages: int, ttl: float, *, evict: bool = False) -> Reserved:
        """Reserve slots for pages that ``complete_ahead`` names: all of them, or none."""
        known = self._state.known(fingerprint)
        if owner == NODE:
            raise InvalidRequestError("slots are reserved ahead for clients that share the arena only")
        if pages > self._state.batch_pages(known):
            raise LimitExceededError(f"{pages} pages in one batch, the limit is {self._state.batch_pages(known)}")
        frames = frames_for(known.layout.page_bytes)
        with self._lock:
            self._state.check_open()
            quota = self._catalog.quota_of(known.number)
            if known.durability or (quota is not None and pages * frames > quota // _AHEAD_SHARE):
                return Reserved(0, b"", [])
            most = (self._state.half_frames // 2 - self._state.frames_of(owner)) // frames
            if not pages or most < pages:
                return Reserved(0, b"", [])
            unnamed = [b""] * pages
            slots = self._residency.reserve_all(unnamed, known, owner, unnamed, evict=evict)
            if len(slots) < pages:  # a store like the one that this is for would not fit
                self._free(slots)
                return Reserved(0, b"", [])
            slots.sort(key=self._slots.frame.__getitem__)
            deadline = time.monotonic() + min(ttl, LONGEST_LEASE)
            lease = self._leases.open_store(owner, slots, [], deadline, direct=True, ahead=True)
        if not self._state.unread(slots):
            self._shorten(lease, bytearray(len(slots)))
        return Reserved(lease.number * bool(slots), bytes(len(slots)), self._state.frames(slots))

    def take_over_writing(self, owner: int, lease: int) -> list[PageBytes] | None:
        """Begin to write an indirect lease's payloads from this thread."""
        with self._lock:
            found = self._leases.stores.get(lease)
            if found is None or found.owner != owner or found.direct:
                return None
            found.direct = True
            found.writer = threading.get_ident()
            found.deadline = math.inf
            return list(map(self._residency.view, found.slots))

    def complete_store(
        self,
        owner: int,
        lease: int,
        *,
        publish: bool,
        checksums: Sequence[int] | None = None,
        part: Part | None = None,
    ) -> Published:
        """End a reservation, or a part of it: publish its pages, or give them up."""
        with self._lock:
            found = self._leases.take_store(lease, owner, part)
            if found is None:
                return Published(0, 0, 0)
            last = part is None or not part.slots
            publish = publish and not found.ahead
            return self._publish(found, publish=publish, checksums=checksums, clean=(), last=last)

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
        """End a reservation of ``reserve_ahead``, or a part of it: name the written pages, and publish them."""
        reserved = StoreOutcome.RESERVED
        count = outcomes.count(reserved)
        known = self._namespaces.get(fingerprint)
        if known is None:
            self.complete_store(owner, lease, publish=False, part=part)
            return Published(0, 0, count)
        try:
            _check_outcomes(outcomes, len(hashes), part)
            keys = self._state.batch_keys(known, hashes)
            before = [*(self._state.keys(known, [parent]) if parent else [b""]), *keys]
        except InvalidRequestError:
            self.complete_store(owner, lease, publish=False, part=part)
            raise
        written = [place for place, outcome in enumerate(outcomes) if outcome == reserved]
        named = [keys[place] for place in written]
        lower = self._lower_tiers.find_own(named)
        with self._lock:
            found = self._leases.take_store(lease, owner, part)
            if found is None:
                return Published(0, 0, 0)
            namespace = self._slots.namespace[found.slots[0]]
            if not found.ahead or count > len(found.slots) or namespace != known.number:
                self._state.give_up(found)
                raise InvalidRequestError(
                    f"{count} pages of namespace {known.number} do not go into a reservation of"
                    f" {len(found.slots)} slots for namespace {namespace}"
                )
            for slot in found.slots[count:]:
                self._residency.free_written(slot)
            del found.slots[count:]
            found.batch += keys  # those of its earlier parts are there
            if not found.slots:
                return Published(0, 0, 0)
            self._catalog.name(found.slots, named, [before[place] for place in written])
            present = len(keys) - count
            clean = {slot for slot, tier in zip(found.slots, lower, strict=True) if tier}
            last = part is None or not part.slots
            return self._publish(found, publish=True, checksums=None, clean=clean, last=last, present=present)

    def catch_up(self) -> None:
        """Work out in which order pages leave."""
        with self._lock:
            self._catalog.catch_up()

    def lapse(self, lease: StoreLease) -> None:
        """A reservation is past its deadline: it can't be published any more. The caller holds the lock."""
        self._arena.count("lapsed", len(lease.slots))
        if not lease.direct:
            self._leases.take_store(lease.number, lease.owner)
            self._state.give_up(lease)
            return
        lease.lapsed = True
        for slot in lease.slots:
            self._catalog.lapse(slot)

    def _publish(
        self,
        lease: StoreLease,
        *,
        publish: bool,
        checksums: Sequence[int] | None,
        clean: Container[Slot],
        last: bool,
        present: int = 0,
    ) -> Published:
        """End a lease that was taken, or a part of one; the caller holds the lock. ``clean``: slots of pages that are
        in a lower tier already. ``last``: no parts are left. ``present``: pages besides that the writer found here."""
        slots, pages = lease.slots, len(lease.slots)
        namespace, page_bytes = self._slots.namespace[slots[0]], self._slots.length[slots[0]]
        if lease.lapsed or not publish or not self._namespaces.is_open(namespace):
            self._state.give_up(lease)
            self._count(namespace, page_bytes, present=present, refused=pages if lease.batch else 0)
            self._state.give_arena_up()
            return Published(0, 0, pages)
        own = bool(self._lower_tiers.own)
        dirty = [own and slot not in clean for slot in slots]
        stored = self._residency.publish(slots, checksums or [None] * pages, dirty)
        if last:  # with what was here before: a prefix's old head must not count as older than its new tail
            self._catalog.touch_later(lease.batch)
        self._count(namespace, page_bytes, stored=stored, present=present + pages - stored)
        self._write_back.add(slots)
        self._state.give_arena_up()
        return Published(stored, pages - stored, 0)

    def _count(self, namespace: int, page_bytes: int, *, stored: int = 0, present: int = 0, refused: int = 0) -> None:
        """Count offered pages, of the node and of their namespace; the caller holds the lock."""
        self._arena.count("stored", stored)
        self._arena.count("present", present)
        self._arena.count("refused", refused)
        if self._namespaces.is_open(namespace):
            self._state.usage.stored(namespace, page_bytes, stored=stored, present=present, refused=refused)

    def _free(self, slots: Sequence[Slot]) -> None:
        """Free reserved slots of no lease; the caller holds the lock."""
        for slot in slots:
            self._residency.free_written(slot)

    def _shorten(self, lease: StoreLease, outcomes: bytearray) -> None:
        """Refuse the reserved pages from the first one on whose slot is still being read: nobody knows of them yet."""
        with self._lock:
            slots, passed = lease.slots, self._state.readers.passed
            kept = 0
            if lease.number in self._leases.stores:  # else its client is dead, and they are in quarantine
                while kept < len(slots) and passed(self._state.retired_at(slots[kept])):
                    kept += 1
                namespace, page_bytes = self._slots.namespace[slots[0]], self._slots.length[slots[0]]
                for slot in slots[kept:]:
                    self._residency.free_written(slot)
                self._count(namespace, page_bytes, refused=len(slots) - kept if lease.batch else 0)
                if not kept:
                    self._leases.take_store(lease.number, lease.owner)
            reserved, refused = StoreOutcome.RESERVED, StoreOutcome.REFUSED
            for place in [place for place, outcome in enumerate(outcomes) if outcome == reserved][kept:]:
                outcomes[place] = refused
            del slots[kept:]


def _check_outcomes(outcomes: bytes, pages: int, part: Part | None) -> None:
    """Whether a client's outcomes are those of so many pages, and of this part's slots.

    Raises:
        InvalidRequestError: they are not.
    """
    if len(outcomes) != pages or not set(outcomes) <= {StoreOutcome.RESERVED, StoreOutcome.PRESENT}:
        raise InvalidRequestError(f"{len(outcomes)} outcomes for {pages} pages, each must be written or present")
    count = outcomes.count(StoreOutcome.RESERVED)
    if part is not None and part.slots not in (0, count):
        raise InvalidRequestError(f"{count} written pages for a part of {part.slots} slots")
