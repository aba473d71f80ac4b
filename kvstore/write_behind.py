"""What the tiers below learn from the arena: its new pages, and which of its pages are used.

A new page goes to the node's own tiers until it is clean. To the shared one it is offered once, and again when it is
used and the shared tier has it no longer.

A batch is held under the store's lock, written outside of it, and let go under it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvstore.answers import DISK
from kvstore.arena.arena import Arena
from kvstore.arena.residency import Residency
from kvstore.below import Below
from kvstore.checksum import checksum_of
from kvstore.errors import ResourceError
from kvstore.sharing import Sharing
from kvstore.slot import Slot
from kvstore.tiers.tier import PageWrite

_WRITE_BYTES = 8 << 20
"""Most bytes that are held for one write to the tiers below, unless it is one page."""
_WRITE_PAGES = 512
_SHARE_BYTES = 32 << 20
"""Most bytes that are held for one write to the shared tier, unless it is one page."""
_SHARE_PAGES = 2048
_MOST_USED = 1 << 16
"""Most pages whose use a tier is told of at once; what is used beyond that until then is not told."""
MOST_UNSHARED_PAGES = 1 << 16
"""Most pages that wait for the shared tier; the oldest are passed over first."""


class WriteBehind:
    """Writes pages below. Safe for threads.

    Args:
        arena: where the pages are.
        residency: its pages; ``lock`` guards it.
        below: where they go.
        lock: the store's.
    """

    def __init__(self, arena: Arena, residency: Residency, below: Below, lock: threading.Lock) -> None:
        self._arena = arena
        self._residency = residency
        self._catalog = residency.catalog
        self._below = below
        self._to_share = Sharing(MOST_UNSHARED_PAGES)
        self._used_for_own: dict[bytes, None] = {}
        self._used_for_shared: dict[bytes, None] = {}
        self._lock = lock
        self._dirtied = threading.Condition(lock)
        self._published = threading.Condition(lock)
        self.writing = threading.Lock()
        """Held over each write to the node's own tiers, and taken before the store's lock."""
        self.sharing = threading.Lock()
        """Held over each write to the shared tier, and taken before the store's lock."""

    def add(self, slots: Sequence[Slot]) -> None:
        """Pages were published. The caller holds the store's lock."""
        self._dirtied.notify_all()
        if self._below.shared is not None:
            self._arena.count("unshared", self._to_share.add(slots))
            self._published.notify_all()

    def note_use(self, slots: Sequence[Slot]) -> None:
        """Pages were used in the arena. The caller holds the store's lock."""
        if self._below.own and len(self._used_for_own) < _MOST_USED:
            self._used_for_own.update((slot.key, None) for slot in slots)
        if self._below.shared is not None and len(self._used_for_shared) < _MOST_USED:
            self._used_for_shared.update((slot.key, None) for slot in slots)

    def tell_own(self) -> None:
        """Tell the node's own tiers what was used since the last call. No I/O."""
        with self._lock:
            used, self._used_for_own = list(self._used_for_own), {}
        for tier in self._below.own if used else ():
            tier.touch(used)

    def tell_shared(self) -> None:
        """Tell the shared tier the same, and offer it again what it has no longer. May block until its deadline."""
        if self._below.shared is None:
            return
        with self.sharing:  # or what is being written to it would not be there yet, and in the queue no more
            with self._lock:
                used, self._used_for_shared = list(self._used_for_shared), {}
            if not used:
                return
            there = self._below.shared.touch(used)
            with self._lock:
                slots = [self._catalog.find(key) for key, here in zip(used, there, strict=True) if not here]
                self.add([slot for slot in slots if slot is not None])

    def wait_for_dirty(self, timeout: float) -> bool:
        """Wait until some page must be written below. False: none within ``timeout`` seconds."""
        with self._dirtied:
            if not self._catalog.dirty_pages:
                self._dirtied.wait(timeout)
            return self._catalog.dirty_pages > 0

    def wait_for_unshared(self, timeout: float) -> bool:
        """Wait until some page is to be offered to the shared tier. False: none within ``timeout`` seconds."""
        with self._published:
            if not self._to_share:
                self._published.wait(timeout)
            return bool(self._to_share)

    def wake(self) -> None:
        """Let ``wait_for_dirty`` and ``wait_for_unshared`` return."""
        with self._lock:
            self._dirtied.notify_all()
            self._published.notify_all()

    def share(self) -> int:
        """Offer one batch of new pages, oldest first, to the shared tier. Returns how many it has now.

        A page that has left the arena meanwhile is counted as unshared, and so is one that the tier does not take:
        there is no second try, since what comes behind is as good.
        """
        if self._below.shared is None:
            return 0
        with self.sharing:
            with self._lock:
                batch, gone = self._to_share.take(_SHARE_PAGES, min(_SHARE_BYTES, self._arena.arena_bytes // 8))
                self._arena.count("unshared", gone)
                for slot in batch:
                    self._catalog.hold(slot)
            shared = 0
            sums: list[int | None] = [None] * len(batch)
            try:
                pages, sums = self._writes_of(batch)
                shared = sum(self._below.shared.write(pages)) if pages else 0
            finally:
                with self._lock:
                    self._residency.note_checksums(batch, sums)
                    for slot in batch:
                        self._catalog.release(slot)
                    self._arena.count("shared", shared)
                    self._arena.count("unshared", len(batch) - shared)
        return shared

    def share_all(self, deadline: float) -> None:
        """Offer everything that waits now to the shared tier, until ``deadline`` (``time.monotonic``)."""
        if self._below.shared is None:
            return
        with self._lock:
            left = len(self._to_share)
        while left > 0 and time.monotonic() < deadline:
            with self._lock:
                before = len(self._to_share)
            self.share()
            with self._lock:
                left -= max(before - len(self._to_share), 1)

    def write_back(self) -> int:
        """Write one batch of dirty pages, oldest first, to the tiers below. Returns how many are clean now."""
        with self.writing:
            with self._lock:
                batch, _ = self._hold_batch(self._catalog.dirty(_WRITE_PAGES))
            return self._write(batch)

    def flush(self, deadline: float) -> int:
        """Write everything that is dirty now, and return when it is durable: how many pages became so.

        Raises:
            ResourceError: some are not, since the tiers below would not take them, or not before ``deadline``.
        """
        with self._lock:
            todo = self._catalog.dirty(self._catalog.dirty_pages)
        done = 0
        while done < len(todo) and time.monotonic() < deadline:
            with self.writing:
                with self._lock:
                    batch, seen = self._hold_batch(todo[done : done + _WRITE_PAGES])
                self._write(batch)
            done += seen
        for tier in self._below.own:
            tier.flush()
        left = sum(slot.dirty for slot in todo)
        if left:
            raise ResourceError(f"{left} of {len(todo)} pages are not on disk: no tier below would take them (in time)")
        return self._below.find_own([slot.key for slot in todo]).count(DISK)

    def _hold_batch(self, slots: Sequence[Slot]) -> tuple[list[Slot], int]:
        """Hold the dirty ones of ``slots``, as many as one write takes, and never more than an eighth of the arena.

        Returns:
            These, and how many of ``slots`` that deals with.
        """
        budget = min(_WRITE_BYTES, self._arena.arena_bytes // 8)
        batch: list[Slot] = []
        for seen, slot in enumerate(slots):
            if not slot.dirty:
                continue
            if batch and budget < slot.length:
                return batch, seen
            self._catalog.hold(slot)
            batch.append(slot)
            budget -= slot.length
        return batch, len(slots)

    def _write(self, batch: Sequence[Slot]) -> int:
        """Write held pages to the tiers below, and end the holds. Returns how many are clean now."""
        written: list[bool] = [False] * len(batch)
        sums: list[int | None] = [None] * len(batch)
        try:
            pages, sums = self._writes_of(batch)
            for tier in self._below.own:
                written = [a or b for a, b in zip(written, tier.write(pages), strict=True)]
        finally:
            with self._lock:
                self._residency.note_checksums(batch, sums)
                for slot, done in zip(batch, written, strict=True):
                    if done:
                        self._catalog.mark_clean(slot)
                    else:
                        self._catalog.defer(slot)
                    self._catalog.release(slot)
        return sum(written)

    def _writes_of(self, held: Sequence[Slot]) -> tuple[list[PageWrite], list[int | None]]:
        """Held pages as tiers take them, with checksums made where there are none yet."""
        pages = []
        for slot in held:
            view = self._arena.view(slot.frame, slot.length)
            checksum = slot.checksum if slot.checksum is not None else checksum_of(view)
            pages.append(PageWrite(slot.key, checksum, view, slot.parent))
        return pages, [page.checksum for page in pages]
