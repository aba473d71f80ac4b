"""Sweeping: leases and pins past their deadline end, and so do those of clients that died."""

from __future__ import annotations

import time

from kvstore.store.leases import NODE
from kvstore.store.pins import Pins
from kvstore.store.state import StoreState
from kvstore.store.stores import Stores
from kvstore.store.write_back import WriteBack


class Sweeper:
    """Ends what is overdue, for a thread of the node. Safe for threads."""

    def __init__(self, state: StoreState, stores: Stores, pins: Pins, write_back: WriteBack) -> None:
        self._state = state
        self._lock = state.lock
        self._catalog = state.catalog
        self._residency = state.residency
        self._leases = state.leases
        self._clients = state.clients
        self._stores = stores
        self._pins = pins
        self._write_back = write_back

    def sweep(self) -> None:
        """End what is overdue or whose client is dead, and tell the node's own lower tiers what was used."""
        dead = self._clients.dead()
        left = {number for number in dead if self._clients.has_left(number)}
        now = time.monotonic()

        def gone(owner: int) -> bool:
            # A call may come through behind its client's end, and open a lease for nobody.
            return owner in dead or (owner != NODE and owner not in self._clients)

        with self._lock:
            if self._state.closed:
                return
            stores, loads = self._leases.overdue(now)
            for load in loads:
                self._leases.take_load(load.number, load.owner)
                self._catalog.release(load.slots)
            for store in stores:
                self._stores.lapse(store)
            for store in [each for each in self._leases.stores.values() if gone(each.owner)]:
                self._leases.take_store(store.number, store.owner)
                if store.direct and store.owner in dead and store.owner not in left:
                    self._residency.quarantine(store.slots, now)
                else:
                    self._state.give_up(store)
            for load in [each for each in self._leases.loads.values() if gone(each.owner)]:
                self._leases.take_load(load.number, load.owner)
                self._catalog.release(load.slots)
        for number in dead:
            self._clients.forget(number)
        self._clients.remove_abandoned()
        with self._lock:
            if not self._state.closed:
                self._residency.release_quarantine(self._clients, left, now)
        if self._pins.end_overdue():
            self._pins.save()
        self._write_back.tell_own()
