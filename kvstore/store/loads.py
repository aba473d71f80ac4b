"""Load leases: pages are promoted into the arena and held there while the caller copies, then released."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Generator, Sequence

from kvstore.arena.format import frames_for
from kvstore.catalog.slot_state import Slot
from kvstore.hashing import checksum_of
from kvstore.limits import LONGEST_LEASE
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.promotion import Run
from kvstore.store.results import Held
from kvstore.store.state import StoreState
from kvstore.store.write_back import WriteBack
from kvstore.tiers.lower_tiers import LOOKS, left_meanwhile

FIRST_PART_BYTES = 1 << 20
"""What a load in parts reads first from lower tiers, unless it is one page."""


class Loads:
    """The holds of a store. Safe for threads."""

    def __init__(self, state: StoreState, write_back: WriteBack) -> None:
        self._state = state
        self._lock = state.lock
        self._catalog = state.catalog
        self._residency = state.residency
        self._leases = state.leases
        self._promotions = state.promotions
        self._lower_tiers = state.lower_tiers
        self._write_back = write_back

    def prepare_load(self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float) -> Held:
        """Promote the leading pages and hold them."""
        [(held, _)] = self._load(owner, fingerprint, hashes, ttl, math.inf)
        return held

    def load_parts(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float
    ) -> Generator[tuple[Held, bool]]:
        """The same in parts as pages arrive, under one lease."""
        return self._load(owner, fingerprint, hashes, ttl, FIRST_PART_BYTES)

    def _load(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float, first_bytes: float
    ) -> Generator[tuple[Held, bool]]:
        known = self._state.known(fingerprint)
        keys = self._state.batch_keys(known, hashes)
        deadline = time.monotonic() + min(ttl, LONGEST_LEASE)
        for look in range(1, LOOKS + 1):
            before = self._state.are_here(keys)
            (lower,) = self._lower_tiers.find([keys], self._state.are_here)
            with self._lock:
                self._state.check_open()
                now = (self._catalog.find_all(keys) >= 0).tolist()
                if look < LOOKS and left_meanwhile(before, now, lower):
                    continue
                allowance = max(0, self._state.allowance(owner, known))
                run = self._promotions.begin(
                    owner, known, keys[: allowance // frames_for(known.layout.page_bytes)], lower
                )
                break
        number = 0
        try:
            readable = set(self._places_unread(run))
            parts = first_bytes < math.inf and bool(run.own or run.awaited)
            size = max(1.0, first_bytes / known.layout.page_bytes)
            while parts or run.own:
                if parts:
                    with self._lock:
                        leading = self._promotions.leading(run, self._may_hand_out(run, owner, known))
                        part = self._hand_out(leading, run, owner, number, deadline)
                    number = part.lease
                    if part.frames:
                        yield part, False
                if not run.own:
                    break
                self._read(known, run, list(run.own)[: int(min(size, len(run.own)))], readable)
                size = max(size, run.ended)
            self._promotions.wait(run, deadline)
            with self._lock:
                last = self._promotions.end(run, self._may_hand_out(run, owner, known))
                self._state.count_loaded(known, keys, bytes(run.tiers[: run.told]), len(keys) - run.told)
                self._write_back.note_use([slot for slot in run.slots if slot is not None], read=True)
                part = self._hand_out(last, run, owner, number, deadline)
            yield part, True
        except BaseException:
            with self._lock:
                self._promotions.publish(run, list(run.own), {})
                self._promotions.give_up(run)
                found = self._leases.take_load(number, owner)
                if found is not None:
                    self._catalog.release(found.slots)
                self._state.give_arena_up()
            raise

    def _read(self, known: KnownNamespace, run: Run, places: Sequence[int], readable: Container[int]) -> None:
        """Read these places' pages and publish them; where that fails, their slots are free again."""
        sums: dict[int, int] = {}
        try:
            sums = self._promotions.read(run, [place for place in places if place in readable])
        finally:
            with self._lock:
                if not self._state.namespaces.is_open(known.number):  # cleared meanwhile
                    sums = {}
                self._promotions.publish(run, places, sums)
                self._state.give_arena_up()

    def _may_hand_out(self, run: Run, owner: int, known: KnownNamespace) -> int:
        """Most pages that a run may hand out now: what it read or waited for came beside its owner's other loads. The
        caller holds the store's lock."""
        if not run.counted:
            return len(run.slots)
        return max(0, self._state.allowance(owner, known) + run.held_frames) // run.page_frames

    def _hand_out(self, slots: list[Slot], run: Run, owner: int, number: int, deadline: float) -> Held:
        """Give the last of a run's leading pages into an owner's hold; the caller holds the store's lock."""
        lease = self._leases.loads.get(number)
        if lease is not None:
            lease.slots += slots
        elif not number and slots:
            lease = self._leases.open_load(owner, slots, deadline)
        else:  # none, or the hold is over
            self._catalog.release(slots)
            return Held(number, b"", [])
        return Held(lease.number, bytes(run.tiers[run.told - len(slots) : run.told]), self._state.frames(slots))

    def complete_load(self, owner: int, lease: int) -> bool:
        """End a hold. False: it had lapsed."""
        with self._lock:
            found = self._leases.take_load(lease, owner)
            if found is None:
                return False
            self._catalog.release(found.slots)
            return True

    def still_held(self, owner: int, lease: int) -> bool:
        """Whether a hold has not lapsed."""
        with self._lock:
            found = self._leases.loads.get(lease)
            return found is not None and found.owner == owner

    def checksums(self, owner: int, lease: int) -> list[int] | None:
        """Of the held pages, made now where no one has yet. None: the hold has lapsed."""
        with self._lock:
            found = self._leases.loads.get(lease)
            if found is None or found.owner != owner:
                return None
            slots = found.slots
            pages = [(self._residency.checksum(slot), self._residency.view(slot)) for slot in slots]
        sums = [checksum if checksum is not None else checksum_of(view) for checksum, view in pages]
        with self._lock:
            if lease not in self._leases.loads:
                return None
            self._residency.note_checksums(slots, sums)
        return sums

    def _places_unread(self, run: Run) -> list[int]:
        """The places of a run whose reserved slots nobody reads in any more; waits for the others, but not for long."""
        places = list(run.own)
        if self._state.unread([run.own[place].slot for place in places]):
            return places
        return [place for place in places if self._state.readers.passed(self._state.retired_at(run.own[place].slot))]
