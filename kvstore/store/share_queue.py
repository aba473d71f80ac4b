"""The queue of new pages that are to be offered to the shared tier, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvstore.catalog.slot_state import Slot
from kvstore.catalog.slot_table import SlotTable


class ShareQueue:
    """The store's lock guards it. Beyond ``most_pages`` the oldest are passed over: the newest are the likeliest to be
    asked for by other nodes."""

    def __init__(self, slots: SlotTable, most_pages: int) -> None:
        self._slots = slots
        self._most_pages = most_pages
        self._queue: deque[int] = deque()
        """Stamps: a page may leave while it waits."""
        self._queued: set[int] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, slots: Iterable[Slot]) -> int:
        """Queue pages, in the order of their prefix; those that are queued or not resident (any more) are left out.

        Returns:
            How many older ones were passed over for them.
        """
        stamps = [self._slots.stamp(slot) for slot in slots if self._slots.is_resident(slot)]
        new = [stamp for stamp in stamps if stamp not in self._queued]
        self._queue.extend(new)
        self._queued.update(new)
        over = max(0, len(self._queue) - self._most_pages)
        for _ in range(over):
            self._queued.discard(self._queue.popleft())
        return over

    def take(self, most_pages: int, most_bytes: int) -> tuple[list[Slot], int]:
        """Take the oldest pages out that are still there: at least one, where there is one, and no more than fit.

        Returns:
            Their slots, and how many pages were gone.
        """
        taken: list[Slot] = []
        gone = 0
        while self._queue and len(taken) < most_pages:
            slot = self._slots.find_stamp(self._queue[0])
            if slot is not None and not self._slots.is_resident(slot):
                slot = None
            if slot is not None and taken and most_bytes < self._slots.length[slot]:
                break
            self._queued.discard(self._queue.popleft())
            if slot is not None:
                taken.append(slot)
                most_bytes -= self._slots.length[slot]
            else:
                gone += 1
        return taken, gone
