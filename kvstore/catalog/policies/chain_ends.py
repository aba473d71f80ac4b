"""Chain ends: the pages that may leave next, by value; each step takes the same time, however many there are.

Those of one value, in steps, are in a ring of their own, linked by tables as long as the largest slot; the values in
use are in a heap, which has as many entries as there are different values, not pages.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

_NOWHERE = -1


class ChainEnds:
    """Slots by value. One that is in already must leave before it comes again."""

    def __init__(self) -> None:
        self._next = array("i")
        self._previous = array("i")
        """By slot: its neighbours in its ring; ``_NOWHERE``: it is in none."""
        self._first: dict[int, int] = {}
        """Value → the slot that leaves first."""
        self._values: list[int] = []
        """A heap of all values in ``_first``, and of no more than as many that have been."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return self._next[slot] != _NOWHERE

    def grow(self, slots: int) -> None:
        """There are so many slots more."""
        more = array("i", [_NOWHERE]) * slots
        self._next.extend(more)
        self._previous.extend(more)

    def add(self, slot: int, value: int, *, first: bool = False) -> None:
        """Behind those of the same value, or before them."""
        following, previous = self._next, self._previous
        self._count += 1
        head = self._first.get(value)
        if head is None:
            following[slot] = previous[slot] = self._first[value] = slot
            heapq.heappush(self._values, value)
            self._compact()
            return
        tail = previous[head]
        following[tail] = previous[head] = slot
        following[slot] = head
        previous[slot] = tail
        if first:
            self._first[value] = slot

    def remove(self, slot: int, value: int) -> None:
        """It was added with this value."""
        following, previous = self._next, self._previous
        self._count -= 1
        after = following[slot]
        if after == slot:
            del self._first[value]
            self._compact()
        else:
            before = previous[slot]
            following[before] = after
            previous[after] = before
            if self._first[value] == slot:
                self._first[value] = after
        following[slot] = previous[slot] = _NOWHERE

    def _compact(self) -> None:
        """Throw out values that are no more once they are the most: for each of them one left or came since."""
        if len(self._values) > 2 * len(self._first):
            self._values[:] = sorted(self._first)

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Each value and slot, the least first. They must not change while this is read."""
        values, first = self._values, self._first
        while values and values[0] not in first:
            heapq.heappop(values)
        order = [(values[0], 0)] if values else []
        last = None
        while order:
            value, place = heapq.heappop(order)
            if value != last and value in first:
                yield from self._ring(value)
            last = value
            for following in range(2 * place + 1, min(2 * place + 3, len(values))):
                heapq.heappush(order, (values[following], following))

    def _ring(self, value: int) -> Iterator[tuple[int, int]]:
        first = slot = self._first[value]
        while True:
            yield value, slot
            slot = self._next[slot]
            if slot == first:
                return
