"""Sweeping: what is past its deadline ends."""

from __future__ import annotations

import time

from kvstore.store.leases import NODE
from kvstore.store.pins import Pins
from kvstore.store.state import StoreState
from kvstore.store.stores import Stores
from kvstore.store.write_back import WriteBack


class Sweeper:
    """The housekeeping of a store, for a thread of the node. Safe for threads.

    Args:
        books: of the arena.
        storing: whose reservations lapse.
        keeping: whose pins end.
        write_behind: tells the tiers below what is used above.
    """

    def __init__(self, state: StoreState, storing: Stores, keeping: Pins, write_back: WriteBack) -> None:
        self._state = state
        self._storing = storing
        self._pins = keeping
        self._write_behind = write_back

    def sweep(self) -> None:
        """End what is past its deadline, and what dead clients left open; tell the tiers below what is used above."""
        dead = self._state.clients.dead()
        left = {number for number in dead if self._state.clients.has_left(number)}
        now = time.monotonic()

        def gone(owner: int) -> bool:
            # A call may come through behind its client's end, and open a ticket for nobody.
            return owner in dead or (owner != NODE and owner not in self._state.clients)

        with self._state.lock:
            if self._state.closed:
                return
            stores, loads = self._state.leases.overdue(now)
            for load in loads:
                self._state.leases.take_load(load.number, load.owner)
                self._state.end_holds(load)
            for store in stores:
                self._storing.lapse(store)
            for store in [ticket for ticket in self._state.leases.stores.values() if gone(ticket.owner)]:
                self._state.leases.take_store(store.number, store.owner)
                if store.direct and store.owner in dead and store.owner not in left:
                    self._state.residency.quarantine(store.slots, now)
                else:
                    self._state.give_up(store)
            for load in [ticket for ticket in self._state.leases.loads.values() if gone(ticket.owner)]:
                self._state.leases.take_load(load.number, load.owner)
                self._state.end_holds(load)
        for number in dead:
            self._state.clients.forget(number)
        self._state.clients.remove_abandoned()
        with self._state.lock:
            if not self._state.closed:
                self._state.residency.release_quarantine(self._state.clients, left, now)
        if self._pins.end_overdue():
            self._pins.save()
        self._write_behind.tell_own()
