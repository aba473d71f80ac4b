"""Sweeping: what is past its deadline ends."""

from __future__ import annotations

import time

from kvstore.store.leases import NODE
from kvstore.store.pins import Keeping
from kvstore.store.state import Books
from kvstore.store.stores import Storing
from kvstore.store.write_back import WriteBehind


class Sweeping:
    """The housekeeping of a store, for a thread of the node. Safe for threads.

    Args:
        books: of the arena.
        storing: whose reservations lapse.
        keeping: whose pins end.
        write_behind: tells the tiers below what is used above.
    """

    def __init__(self, books: Books, storing: Storing, keeping: Keeping, write_behind: WriteBehind) -> None:
        self._books = books
        self._storing = storing
        self._keeping = keeping
        self._write_behind = write_behind

    def sweep(self) -> None:
        """End what is past its deadline, and what dead clients left open; tell the tiers below what is used above."""
        dead = self._books.clients.dead()
        left = {number for number in dead if self._books.clients.has_left(number)}
        now = time.monotonic()

        def gone(owner: int) -> bool:
            # A call may come through behind its client's end, and open a ticket for nobody.
            return owner in dead or (owner != NODE and owner not in self._books.clients)

        with self._books.lock:
            if self._books.closed:
                return
            stores, loads = self._books.tickets.overdue(now)
            for load in loads:
                self._books.tickets.take_load(load.number, load.owner)
                self._books.end_holds(load)
            for store in stores:
                self._storing.lapse(store)
            for store in [ticket for ticket in self._books.tickets.stores.values() if gone(ticket.owner)]:
                self._books.tickets.take_store(store.number, store.owner)
                if store.direct and store.owner in dead and store.owner not in left:
                    self._books.residency.quarantine(store.slots, now)
                else:
                    self._books.give_up(store)
            for load in [ticket for ticket in self._books.tickets.loads.values() if gone(ticket.owner)]:
                self._books.tickets.take_load(load.number, load.owner)
                self._books.end_holds(load)
        for number in dead:
            self._books.clients.forget(number)
        self._books.clients.remove_abandoned()
        with self._books.lock:
            if not self._books.closed:
                self._books.residency.release_quarantine(self._books.clients, left, now)
        if self._keeping.end_overdue():
            self._keeping.save()
        self._write_behind.tell_own()
