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
from kvstore.store.state import Books
from kvstore.store.write_back import WriteBehind
from kvstore.tiers.lower_tiers import LOOKS, Below, left_meanwhile

FIRST_PART_BYTES = 1 << 20
"""What a load in parts reads first from below, unless it is one page."""


class Loading:
    """The holds of a store. Safe for threads.

    Args:
        books: of the arena.
        below: asked for what the arena lacks.
        write_behind: told of what is used.
    """

    def __init__(self, books: Books, below: Below, write_behind: WriteBehind) -> None:
        self._books = books
        self._below = below
        self._write_behind = write_behind

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
        known = self._books.known(fingerprint)
        keys = self._books.batch_keys(known, hashes)
        deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
        bringups = self._books.bringups
        for look in range(1, LOOKS + 1):
            before = self._books.are_here(keys)
            (below,) = self._below.find([keys], self._books.are_here)
            with self._books.lock:
                self._books.check_open()
                now = (self._books.catalog.find_all(keys) >= 0).tolist()
                if look < LOOKS and left_meanwhile(before, now, below):
                    continue
                room = max(0, self._books.room_of(owner, known))
                run = bringups.begin(owner, known, keys[: room // frames_for(known.layout.page_bytes)], below)
                break
        number = 0
        try:
            readable = set(self._places_unread(run))
            parts = first_bytes < math.inf and bool(run.own or run.awaited)
            size = max(1.0, first_bytes / known.layout.page_bytes)
            while parts or run.own:
                if parts:
                    with self._books.lock:
                        part = self._hand_out(bringups.leading(run), run, owner, number, deadline)
                    number = part.ticket
                    if part.frames:
                        yield part, False
                if not run.own:
                    break
                self._read(known, run, list(run.own)[: int(min(size, len(run.own)))], readable)
                size = max(size, run.ended)
            bringups.wait(run, deadline)
            with self._books.lock:
                last = bringups.end(run)
                self._books.count_loaded(known, keys, bytes(run.tiers[: run.told]), len(keys) - run.told)
                self._write_behind.note_use([slot for slot in run.slots if slot is not None])
                part = self._hand_out(last, run, owner, number, deadline)
            yield part, True
        except BaseException:
            with self._books.lock:
                bringups.publish(run, list(run.own), {})
                bringups.give_up(run)
                found = self._books.tickets.take_load(number, owner)
                if found is not None:
                    self._books.end_holds(found)
                self._books.give_arena_up()
            raise

    def _read(self, known: KnownNamespace, run: Run, places: Sequence[int], readable: Container[int]) -> None:
        """Read these places' pages and publish them; where that fails, their slots are free again."""
        sums: dict[int, int] = {}
        try:
            sums = self._books.bringups.read(run, [place for place in places if place in readable])
        finally:
            with self._books.lock:
                if not self._books.namespaces.is_open(known.number):  # cleared meanwhile
                    sums = {}
                self._books.bringups.publish(run, places, sums)
                self._books.give_arena_up()

    def _hand_out(self, slots: list[Slot], run: Run, owner: int, number: int, deadline: float) -> Held:
        """Give the last of a run's leading pages into an owner's hold; the caller holds the store's lock."""
        ticket = self._books.tickets.loads.get(number)
        if ticket is not None:
            ticket.slots += slots
        elif not number and slots:
            ticket = self._books.tickets.open_load(owner, slots, deadline)
        else:  # none, or the hold is over
            self._books.catalog.release(slots)
            return Held(number, b"", [])
        return Held(ticket.number, bytes(run.tiers[run.told - len(slots) : run.told]), self._books.frames(slots))

    def complete_load(self, owner: int, ticket: int) -> bool:
        """End a hold. False: it had lapsed, and the bytes may have changed while they were copied."""
        with self._books.lock:
            found = self._books.tickets.take_load(ticket, owner)
            if found is None:
                return False
            self._books.end_holds(found)
            return True

    def still_held(self, owner: int, ticket: int) -> bool:
        """Whether everything copied so far under this hold is good."""
        with self._books.lock:
            found = self._books.tickets.loads.get(ticket)
            return found is not None and found.owner == owner

    def checksums(self, owner: int, ticket: int) -> list[int] | None:
        """xxh3_64 of the pages that a ticket holds, made now where no one has yet. None: the hold has lapsed."""
        with self._books.lock:
            found = self._books.tickets.loads.get(ticket)
            if found is None or found.owner != owner:
                return None
            slots = found.slots
            pages = [(self._books.residency.checksum(slot), self._books.residency.view(slot)) for slot in slots]
        sums = [checksum if checksum is not None else checksum_of(view) for checksum, view in pages]
        with self._books.lock:
            if ticket not in self._books.tickets.loads:
                return None
            self._books.residency.note_checksums(slots, sums)
        return sums

    def _places_unread(self, run: Run) -> list[int]:
        """The places of a run whose reserved slots nobody reads in any more; waits for the others, but not for long."""
        places = list(run.own)
        if self._books.unread([run.own[place].slot for place in places]):
            return places
        return [place for place in places if self._books.readers.passed(self._books.retired_at(run.own[place].slot))]
