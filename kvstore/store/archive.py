"""The archive: which pages go to the object tier, and when.

Large objects cost as much to write as small ones, so pages wait until there are enough for a pack, or the oldest has
waited for :data:`LONGEST_WAIT`. They wait where they are, in the arena, held by nobody: one that leaves it meanwhile is
counted as ``unarchived``. A page that was read is worth its place there if eviction expects enough of it
(:func:`is_worth`); or all of them are (``everything``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvstore.catalog.policies import Prospect
from kvstore.catalog.slot_state import Slot
from kvstore.store.held_pages import writes_of
from kvstore.store.share_queue import ShareQueue
from kvstore.store.state import StoreState

LONGEST_WAIT = 10.0
"""Seconds that a page waits for others to fill a pack."""
BATCH_BYTES = 32 << 20
"""Most bytes that are held for one write, unless it is one page."""
_BATCH_PAGES = 1 << 13
_MOST_WAITING = 1 << 17
_MOST_USED = 1 << 16
_PAGES_A_STEP = 512
"""Pages that are judged at once, under the store's lock."""
_OFTEN = 0.25


def is_worth(prospect: Prospect | None) -> bool:
    """Whether a page that was read is worth its place in object storage: pages like it are wanted again every fourth
    time at least, or half as often as pages on the whole.

    Args:
        prospect: what eviction expects of it; None: nothing is known.
    """
    return prospect is None or prospect.odds >= min(_OFTEN, prospect.mean / 2)


class Archive:
    """Writes pages to the object tier. Safe for threads; does nothing where there is none.

    Args:
        state: of the store.
        everything: whether each page that is stored goes there, not only those that are worth it.
        clock: seconds that only grow.
    """

    def __init__(self, state: StoreState, *, everything: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._arena = state.arena
        self._residency = state.residency
        self._catalog = state.catalog
        self._slots = state.slots
        self._tier = state.lower_tiers.objects
        self._times = state.lower_tiers.times
        self._everything = everything
        self._clock = clock
        self._queue = ShareQueue(state.slots, _MOST_WAITING)
        self._waiting_bytes = 0
        self._waiting_since = 0.0
        self._used: dict[bytes, bool] = {}
        """Whether somebody read them, or only said that they are wanted."""
        self._lock = state.lock
        self._came = threading.Condition(state.lock)
        self._batch_bytes = min(BATCH_BYTES, state.arena.arena_bytes // 8)
        self.writing = threading.Lock()
        """Held over each write to the object tier, and taken before the store's lock."""

    def add(self, slots: Sequence[Slot]) -> None:
        """Pages were published. The caller holds the store's lock."""
        if self._tier is not None and self._everything:
            self._enqueue(slots)

    def note_use(self, slots: Sequence[Slot], *, read: bool) -> None:
        """Pages were used in the arena; ``read``: somebody read them. The caller holds the store's lock."""
        if self._tier is not None and len(self._used) < _MOST_USED:
            for slot in slots:
                key = self._slots.key(slot)
                self._used[key] = read or self._used.get(key, False)

    def tell(self) -> None:
        """Tell the object tier what was used since the last call, and offer it what it does not have. No I/O."""
        if self._tier is None:
            return
        with self.writing:  # or what is being written would not be there yet, and in the queue no more
            with self._lock:
                used, self._used = self._used, {}
            if not used:
                return
            there = self._tier.touch(list(used))
            wanted = zip(used.items(), there, strict=True)
            missing = [key for (key, read), here in wanted if not here and (read or self._everything)]
            for at in range(0, len(missing), _PAGES_A_STEP):
                with self._lock:
                    slots = self._catalog.find_here(missing[at : at + _PAGES_A_STEP])
                    self._enqueue(slots if self._everything else self._worth(slots))

    def is_due(self) -> bool:
        """Whether enough pages wait, or one waits for long enough."""
        with self._lock:
            return self._is_due()

    def wait(self, timeout: float) -> bool:
        """Wait until that is so. False: it is not within ``timeout`` seconds."""
        with self._came:
            if not self._is_due():
                self._came.wait(timeout)
            return self._is_due()

    def wake(self) -> None:
        """Let ``wait`` return."""
        with self._lock:
            self._came.notify_all()

    def write(self) -> int:
        """Write one batch of what waits, oldest first. Returns how many pages the object tier has of it now.

        A page that it does not take is counted as ``unarchived``, and not tried again until it is used again.
        """
        if self._tier is None:
            return 0
        with self.writing:
            with self._lock:
                batch, gone, _ = self._queue.take(_BATCH_PAGES, self._batch_bytes)
                self._waiting_bytes -= sum(self._slots.length[slot] for slot in batch)
                if not self._queue:
                    self._waiting_bytes = 0
                self._waiting_since = self._clock()
                self._arena.count("unarchived", gone)
                self._catalog.hold(batch)
            written = 0
            sums: list[int | None] = [None] * len(batch)
            try:
                pages, sums = writes_of(batch, self._residency, self._lock)
                if pages:
                    with self._times.measured(self._tier.name, "write"):
                        written = sum(self._tier.write(pages))
            finally:
                with self._lock:
                    self._residency.note_checksums(batch, sums)
                    self._catalog.release(batch)
                    self._arena.count("archived", written)
                    self._arena.count("unarchived", len(batch) - written)
        return written

    def write_all(self, deadline: float) -> None:
        """Write everything that waits now, until ``deadline`` (``time.monotonic``)."""
        if self._tier is None:
            return
        with self._lock:
            left = len(self._queue)
        while left > 0 and time.monotonic() < deadline:
            with self._lock:
                before = len(self._queue)
            self.write()
            with self._lock:
                left -= max(before - len(self._queue), 1)

    def _worth(self, slots: Sequence[Slot]) -> list[Slot]:
        prospects = zip(slots, self._catalog.prospects(slots), strict=True)
        return [slot for slot, prospect in prospects if is_worth(prospect)]

    def _is_due(self) -> bool:
        if not self._queue:
            return False
        return self._waiting_bytes >= self._batch_bytes or self._clock() - self._waiting_since >= LONGEST_WAIT

    def _enqueue(self, slots: Sequence[Slot]) -> None:
        if not slots:
            return
        if not self._queue:
            self._waiting_bytes, self._waiting_since = 0, self._clock()
        before = len(self._queue)
        over = self._queue.add(slots)
        self._arena.count("unarchived", over)
        if came := len(self._queue) - before + over:
            self._waiting_bytes += came * self._slots.length[slots[0]]
        if self._is_due():
            self._came.notify_all()
