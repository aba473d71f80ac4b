"""Order migration: a namespace's pages move from the common order of eviction into one of their own, step by step.

A namespace may get its first quota while it has a million pages. To sort and to move these takes 10 to 50 µs each, so
it is done in steps, none of which keeps the store's lock for long. Meanwhile its pages are in two orders: those that
come, and those that were moved, in its own. A step that fails leaves no page halfway, so whoever begins again moves
what is left.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kvstore.catalog.eviction_orders import EvictionOrders
from kvstore.catalog.slot_state import Slot
from kvstore.catalog.slot_table import SlotTable

SLOTS_A_STEP = 1024
"""Slots looked at under one hold of the store's lock."""
PAGES_A_STEP = 64
"""Pages moved under one."""
_NO_PARENT = -1


class OrderMigration:
    """The move of one namespace, by its number; it has an order of its own already, for the pages that come.

    ``find_parent`` says in which slot the page before a slot's in its chain is resident.
    """

    def __init__(
        self, namespace: int, slots: SlotTable, orders: EvictionOrders, find_parent: Callable[[Slot], Slot | None]
    ) -> None:
        self.namespace = namespace
        self._slots = slots
        self._orders = orders
        self._find_parent = find_parent
        self._found = array("I")
        """Slots that are to move."""
        self._stamps, self._used = array("Q"), array("Q")
        self._parents = array("q")
        """Of each found slot, in the same place: the slot of the page before its own, or none."""

    def steps(self) -> Iterator[Callable[[], None]]:
        """What is to be done under the store's lock, in this order, and with the lock let go in between."""
        for first in range(0, len(self._slots), SLOTS_A_STEP):  # slots that are added later hold pages that come later
            yield partial(self._look, first)
        places = self._sorted()
        for first in range(0, len(places), PAGES_A_STEP):
            yield partial(self._move, places[first : first + PAGES_A_STEP])
        yield partial(self._orders.end_move, self.namespace)

    def _look(self, first: int) -> None:
        slots = self._slots
        here = np.array(slots.namespace[first : first + SLOTS_A_STEP]) == self.namespace
        for slot in (np.flatnonzero(here) + first).tolist():
            if self._may_move(slot):
                parent = self._find_parent(slot)
                self._found.append(slot)
                self._stamps.append(slots.stamp(slot))
                self._used.append(slots.used[slot])
                self._parents.append(parent if parent is not None else _NO_PARENT)

    def _sorted(self) -> Sequence[int]:
        """Places of the slots that were found: those used longest ago first, but each behind its parent."""
        places = np.full(len(self._slots) + 1, _NO_PARENT)  # the last one is found by those without a parent
        places[np.array(self._found, np.int64)] = np.arange(len(self._found))
        before = places[np.array(self._parents, np.int64)].tolist()
        waiting = bytearray(b"\1") * len(self._found)
        ordered = array("I")
        for start in np.argsort(np.array(self._used, np.uint64), kind="stable").tolist():
            chain = []
            at = start
            while at != _NO_PARENT and waiting[at]:
                waiting[at] = 0
                chain.append(at)
                at = before[at]
            ordered.extend(reversed(chain))
        return ordered

    def _move(self, places: Sequence[int]) -> None:
        for place in places:
            slot = self._slots.find_stamp(self._stamps[place])
            if slot is not None and self._may_move(slot):
                self._orders.move(slot, self._find_parent(slot))

    def _may_move(self, slot: Slot) -> bool:
        return self._slots.may_leave(slot) and not self._slots.apart[slot]
