"""Loading: pages are brought up and held, the caller copies, then the hold ends."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Generator, Sequence

from kvstore.arena.format import frames_for
from kvstore.catalog.slot_state import Slot
from kvstore.hashing import checksum_of
from kvstore.limits import LONGEST_TICKET
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.promotion import Run
from kvstore.store.results import Held
from kvstore.store.state import StoreState
from kvstore.store.write_back import WriteBack
from kvstore.tiers.lower_tiers import LOOKS, LowerTiers, left_meanwhile

FIRST_PART_BYTES = 1 << 20
"""What a load in parts reads first from below, unless it is one page."""


class Loads:
    """The holds of a store. Safe for threads.

    Args:
        books: of the arena.
        below: asked for what the arena lacks.
        write_behind: told of what is used.
    """

    def __init__(self, state: StoreState, below: LowerTiers, write_back: WriteBack) -> None:
        self._state = state
        self._below = below
        self._write_behind = write_back

    def prepare_load(self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float) -> Held:
        """Bring the leading pages up into the arena and hold them there. Blocks on I/O of the tiers below.

        The answer is shorter than ``hashes`` from the first page that is nowhere, is damaged below, or finds no room,
        and where it would pass half of the arena in this owner's hands.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``batch_pages`` pages.
        """
        [(held, _)] = self._load(owner, fingerprint, hashes, ttl, math.inf)
        return held

    def load_parts(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float
    ) -> Generator[tuple[Held, bool]]:
        """:meth:`prepare_load`, told in parts as pages come up, under one ticket: first those that are in the arena,
        then the first one below, or ``FIRST_PART_BYTES`` of them, then as many again as were read, until all are.

        Yields:
            A part, and whether it is the last one, which may have no pages. Whoever closes the iterator before its end
            gives up all of them.

        Raises:
            Exception: as :meth:`prepare_load`, before the first part.
        """
        return self._load(owner, fingerprint, hashes, ttl, FIRST_PART_BYTES)

    def _load(
        self, owner: int, fingerprint: bytes, hashes: Sequence[bytes], ttl: float, first_bytes: float
    ) -> Generator[tuple[Held, bool]]:
        known = self._state.known(fingerprint)
        keys = self._state.batch_keys(known, hashes)
        deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
        promotions = self._state.promotions
        for look in range(1, LOOKS + 1):
            before = self._state.are_here(keys)
            (below,) = self._below.find([keys], self._state.are_here)
            with self._state.lock:
                self._state.check_open()
                now = (self._state.catalog.find_all(keys) >= 0).tolist()
                if look < LOOKS and left_meanwhile(before, now, below):
                    continue
                room = max(0, self._state.room_of(owner, known))
                run = promotions.begin(owner, known, keys[: room // frames_for(known.layout.page_bytes)], below)
                break
        number = 0
        try:
            readable = set(self._places_unread(run))
            parts = first_bytes < math.inf and bool(run.own or run.awaited)
            size = max(1.0, first_bytes / known.layout.page_bytes)
            while parts or run.own:
                if parts:
                    with self._state.lock:
                        part = self._hand_out(promotions.leading(run), run, owner, number, deadline)
                    number = part.ticket
                    if part.frames:
                        yield part, False
                if not run.own:
                    break
                self._read(known, run, list(run.own)[: int(min(size, len(run.own)))], readable)
                size = max(size, run.ended)
            promotions.wait(run, deadline)
            with self._state.lock:
                last = promotions.end(run)
                self._state.count_loaded(known, keys, bytes(run.tiers[: run.told]), len(keys) - run.told)
                self._write_behind.note_use([slot for slot in run.slots if slot is not None])
                part = self._hand_out(last, run, owner, number, deadline)
            yield part, True
        except BaseException:
            with self._state.lock:
                promotions.publish(run, list(run.own), {})
                promotions.give_up(run)
                found = self._state.leases.take_load(number, owner)
                if found is not None:
                    self._state.end_holds(found)
                self._state.give_arena_up()
            raise

    def _read(self, known: KnownNamespace, run: Run, places: Sequence[int], readable: Container[int]) -> None:
        """Read these places' pages and publish them; where that fails, their slots are free again."""
        sums: dict[int, int] = {}
        try:
            sums = self._state.promotions.read(run, [place for place in places if place in readable])
        finally:
            with self._state.lock:
                if not self._state.namespaces.is_open(known.number):  # cleared meanwhile
                    sums = {}
                self._state.promotions.publish(run, places, sums)
                self._state.give_arena_up()

    def _hand_out(self, slots: list[Slot], run: Run, owner: int, number: int, deadline: float) -> Held:
        """Give the last of a run's leading pages into an owner's hold; the caller holds the store's lock."""
        ticket = self._state.leases.loads.get(number)
        if ticket is not None:
            ticket.slots += slots
        elif not number and slots:
            ticket = self._state.leases.open_load(owner, slots, deadline)
        else:  # none, or the hold is over
            self._state.catalog.release(slots)
            return Held(number, b"", [])
        return Held(ticket.number, bytes(run.tiers[run.told - len(slots) : run.told]), self._state.frames(slots))

    def complete_load(self, owner: int, ticket: int) -> bool:
        """End a hold. False: it had lapsed, and the bytes may have changed while they were copied."""
        with self._state.lock:
            found = self._state.leases.take_load(ticket, owner)
            if found is None:
                return False
            self._state.end_holds(found)
            return True

    def still_held(self, owner: int, ticket: int) -> bool:
        """Whether everything copied so far under this hold is good."""
        with self._state.lock:
            found = self._state.leases.loads.get(ticket)
            return found is not None and found.owner == owner

    def checksums(self, owner: int, ticket: int) -> list[int] | None:
        """xxh3_64 of the pages that a ticket holds, made now where no one has yet. None: the hold has lapsed."""
        with self._state.lock:
            found = self._state.leases.loads.get(ticket)
            if found is None or found.owner != owner:
                return None
            slots = found.slots
            pages = [(self._state.residency.checksum(slot), self._state.residency.view(slot)) for slot in slots]
        sums = [checksum if checksum is not None else checksum_of(view) for checksum, view in pages]
        with self._state.lock:
            if ticket not in self._state.leases.loads:
                return None
            self._state.residency.note_checksums(slots, sums)
        return sums

    def _places_unread(self, run: Run) -> list[int]:
        """The places of a run whose reserved slots nobody reads in any more; waits for the others, but not for long."""
        places = list(run.own)
        if self._state.unread([run.own[place].slot for place in places]):
            return places
        return [place for place in places if self._state.readers.passed(self._state.retired_at(run.own[place].slot))]
