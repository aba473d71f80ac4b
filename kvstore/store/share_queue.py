"""The queue of new pages that are to be offered to a tier that nodes share, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvstore.catalog.slot_state import Slot
from kvstore.catalog.slot_table import SlotTable


class Taken(NamedTuple):
    """What was taken out of the queue."""

    slots: list[Slot]
    gone: int
    """Pages that had left the arena."""
    again: set[Slot]
    """Of the slots, those that were put back."""


class ShareQueue:
    """The store's lock guards it. Beyond ``most_pages`` the oldest are passed over: the newest are the likeliest to be
    asked for by other nodes."""

    def __init__(self, slots: SlotTable, most_pages: int) -> None:
        self._slots = slots
        self._most_pages = most_pages
        self._queue: deque[int] = deque()
        """Stamps: a page may leave while it waits."""
        self._queued: set[int] = set()
        """Also of what is set aside."""
        self._again: set[int] = set()

    def __len__(self) -> int:
        """How many wait, also aside."""
        return len(self._queued)

    def __bool__(self) -> bool:
        """Whether any can be taken now."""
        return bool(self._queue)

    def waiting(self) -> Collection[int]:
        """The stamps of what waits, also aside: a view."""
        return self._queued

    def add(self, slots: Iterable[Slot]) -> int:
        """Queue pages, in the order of their prefix; those that wait or are not resident (any more) are left out.

        Returns:
            How many older ones were passed over for them.
        """
        stamps = [self._slots.stamp(slot) for slot in slots if self._slots.is_resident(slot)]
        new = [stamp for stamp in stamps if stamp not in self._queued]
        self._queue.extend(new)
        self._queued.update(new)
        over = min(max(0, len(self._queued) - self._most_pages), len(self._queue))
        for _ in range(over):
            self._pop()
        return over

    def take(self, most_pages: int, most_bytes: int) -> Taken:
        """Take the oldest pages out that are still there: at least one, where there is one, and no more than fit."""
        taken = Taken([], 0, set())
        gone = 0
        while self._queue and len(taken.slots) < most_pages:
            slot = self._slots.find_stamp(self._queue[0])
            if slot is not None and not self._slots.is_resident(slot):
                slot = None
            if slot is not None and taken.slots and most_bytes < self._slots.length[slot]:
                break
            again = self._pop()
            if slot is not None:
                taken.slots.append(slot)
                most_bytes -= self._slots.length[slot]
                if again:
                    taken.again.add(slot)
            else:
                gone += 1
        return taken._replace(gone=gone)

    def set_aside(self, slots: Iterable[Slot]) -> list[int]:
        """Pages that were taken, and that nobody is to queue until they are put back.

        Returns:
            Their stamps.
        """
        stamps = [self._slots.stamp(slot) for slot in slots]
        self._queued.update(stamps)
        return stamps

    def put_back(self, stamps: Iterable[int]) -> None:
        """What was set aside is the first to be taken."""
        back = list(stamps)
        self._queue.extendleft(reversed(back))
        self._again.update(back)

    def _pop(self) -> bool:
        """The oldest is in the queue no more. Returns whether it had been put back."""
        stamp = self._queue.popleft()
        self._queued.discard(stamp)
        again = stamp in self._again
        self._again.discard(stamp)
        return again
