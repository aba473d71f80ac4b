"""Loading: pages are brought up and held, the caller copies, then the hold ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.answers import LONGEST_TICKET, Held
from kvstore.arena.format import frames_for
from kvstore.below import Below
from kvstore.books import Books
from kvstore.bringup import Run
from kvstore.checksum import checksum_of
from kvstore.write_behind import WriteBehind


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
        known = self._books.known(fingerprint)
        keys = self._books.batch_keys(known, hashes)
        (below,) = self._below.find([keys], self._books.are_here)
        deadline = time.monotonic() + min(ttl, LONGEST_TICKET)
        with self._books.lock:
            self._books.check_open()
            room = max(0, self._books.room_of(owner, known))
            run = self._books.bringups.begin(known, keys[: room // frames_for(known.layout.page_bytes)], below)
        try:
            sums: dict[int, int] = {}
            try:
                sums = self._books.bringups.read(run, self._places_unread(run))
            finally:
                with self._books.lock:
                    if not self._books.namespaces.is_open(known.number):  # cleared meanwhile
                        sums = {}
                    self._books.bringups.publish(run, sums)
                    self._books.give_arena_up()
            self._books.bringups.wait(run, deadline)
        except BaseException:
            with self._books.lock:
                self._books.bringups.give_up(run)
            raise
        with self._books.lock:
            held = self._books.bringups.end(run)
            tiers = bytes(run.tiers[: len(held)])
            self._books.count_loaded(known, keys, tiers, len(keys) - len(held))
            self._write_behind.note_use(held)
            if not held:
                return Held(0, b"", [])
            ticket = self._books.tickets.open_load(owner, held, deadline)
            return Held(ticket.number, tiers, self._books.frames(held))

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
