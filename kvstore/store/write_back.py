"""Write-back: lower tiers get the new pages of the arena, and are told which of its pages are used.

A new page goes to the node's own tiers until it is clean. To the shared one it is offered once, and again when it is
used and the shared tier has it no longer.

A batch is held under the store's lock, written outside of it, and let go under it again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import compress, groupby, islice

from kvstore.catalog.slot_state import Slot
from kvstore.errors import ResourceError
from kvstore.page_codes import PageTier
from kvstore.store.archive import Archive
from kvstore.store.claimed_pages import ClaimedPages, Claims
from kvstore.store.held_pages import writes_of
from kvstore.store.share_queue import ShareQueue
from kvstore.store.state import StoreState
from kvstore.tiers.tier import FINGERPRINT_BYTES, Claim, Offered

_WRITE_BYTES = 8 << 20
"""Most bytes that are held for one write to the node's own lower tiers, unless it is one page."""
_WRITE_PAGES = 512
SHARE_BYTES = 32 << 20
"""Most bytes that are held for one write to the shared tier, unless it is one page."""
SHARE_PAGES = 2048
_MOST_USED = 1 << 16
"""Most pages whose use a tier is told of at once; what is used beyond that until then is not told."""
_LOOK_SECONDS = 0.25
"""How long a flush that waits for other nodes' claims rests at the most."""
MOST_UNSHARED_PAGES = 1 << 16
"""Most pages that wait for the shared tier; the oldest are passed over first."""


class WriteBack:
    """Writes pages to lower tiers. Safe for threads."""

    def __init__(self, state: StoreState, archive: Archive) -> None:
        self._arena = state.arena
        self._residency = state.residency
        self._catalog = state.catalog
        self._slots = state.slots
        self._lower_tiers = state.lower_tiers
        self._archive = archive
        self._budget = min(_WRITE_BYTES, state.arena.arena_bytes // 8)
        """Most bytes that one write to the node's own tiers takes."""
        self._to_share = ShareQueue(state.slots, MOST_UNSHARED_PAGES)
        self._claims = Claims()
        self._used_for_own: dict[bytes, None] = {}
        self._used_for_shared: dict[bytes, None] = {}
        self._lock = state.lock
        self._dirtied = threading.Condition(state.lock)
        self._published = threading.Condition(state.lock)
        self.writing = threading.Lock()
        """Held over each write to the node's own tiers, and taken before the store's lock."""
        self.sharing = threading.Lock()
        """Held over each write to the shared tier, and taken before the store's lock."""

    def add(self, slots: Sequence[Slot]) -> None:
        """Pages were published. The caller holds the store's lock."""
        if self._catalog.dirty_pages:  # a thread woken for nothing would cost more than the store does
            self._dirtied.notify_all()
        if self._lower_tiers.shared is not None:
            self._arena.count("unshared", self._to_share.add(slots))
            self._published.notify_all()
        self._archive.add(slots)

    def note_use(self, slots: Sequence[Slot], *, read: bool = False) -> None:
        """Pages were used in the arena; ``read``: somebody read them. The caller holds the store's lock."""
        if self._lower_tiers.own and len(self._used_for_own) < _MOST_USED:
            self._used_for_own.update((self._slots.key(slot), None) for slot in slots)
        if self._lower_tiers.shared is not None and len(self._used_for_shared) < _MOST_USED:
            self._used_for_shared.update((self._slots.key(slot), None) for slot in slots)
        self._archive.note_use(slots, read=read)

    def tell_own(self) -> None:
        """Tell the node's own tiers what was used since the last call. No I/O."""
        with self._lock:
            used, self._used_for_own = list(self._used_for_own), {}
        for tier in self._lower_tiers.own if used else ():
            tier.touch(used)

    def tell_shared(self) -> None:
        """Tell the shared tier the same, and offer it again what it has no longer. May block until its deadline."""
        if self._lower_tiers.shared is None:
            return
        with self.sharing:  # or what is being written to it would not be there yet, and in the queue no more
            with self._lock:
                used, self._used_for_shared = list(self._used_for_shared), {}
            if not used:
                return
            there = self._lower_tiers.shared.touch(used)
            with self._lock:
                self.add(self._catalog.find_here([key for key, here in zip(used, there, strict=True) if not here]))

    def wait_for_dirty(self, timeout: float) -> bool:
        """Wait until some page is dirty. False: none within ``timeout`` seconds."""
        with self._dirtied:
            if not self._catalog.dirty_pages:
                self._dirtied.wait(timeout)
            return self._catalog.dirty_pages > 0

    @property
    def is_little(self) -> bool:
        """Whether less is dirty than one write takes."""
        with self._lock:
            return self._catalog.dirty_bytes < self._budget

    def wait_for_unshared(self, timeout: float) -> bool:
        """Wait until some page is to be offered to the shared tier, or :meth:`look_at_claims` is due. False: there is
        none to be offered, or none within ``timeout`` seconds."""
        with self._published:
            left = min(timeout, self._claims.due - time.monotonic())
            if not self._to_share and left > 0:
                self._published.wait(left)
            return bool(self._to_share)

    def wake(self) -> None:
        """Let ``wait_for_dirty`` and ``wait_for_unshared`` return."""
        with self._lock:
            self._dirtied.notify_all()
            self._published.notify_all()

    def share(self) -> int:
        """Offer one batch of new pages, oldest first, to the shared tier. Returns how many it has now, or soon.

        A page that has left the arena meanwhile is counted as unshared, and so is one that the tier does not take:
        there is no second try, since what comes behind is as good. One that another node is sending is offered again
        once that has ended (:meth:`look_at_claims`).
        """
        if self._lower_tiers.shared is None:
            return 0
        with self.sharing:
            with self._lock:
                batch, gone, again = self._to_share.take(SHARE_PAGES, min(SHARE_BYTES, self._arena.arena_bytes // 8))
                self._arena.count("unshared", gone)
                self._catalog.hold(batch)
                looked = {self._slots.key(slot) for slot in again}
            offered = Offered([], [])
            sums: list[int | None] = [None] * len(batch)
            try:
                pages, sums = writes_of(batch, self._residency, self._lock)
                if pages:
                    with self._lower_tiers.times.measured(self._lower_tiers.shared.name, "write"):
                        offered = self._lower_tiers.shared.offer(pages, looked)
            finally:
                shared = sum(offered.here)
                with self._lock:
                    self._residency.note_checksums(batch, sums)
                    awaited = self._set_aside(batch, offered.claims)
                    self._catalog.release(batch)
                    self._arena.count("shared", shared)
                    self._arena.count("unshared", len(batch) - shared - awaited)
        return shared + awaited

    def _set_aside(self, batch: Sequence[Slot], claims: Sequence[Claim]) -> int:
        """Wait for claims of pages in slots that are held. Returns how many pages. The caller holds the lock."""
        now = time.monotonic()
        slots = {self._slots.key(slot): slot for slot in batch} if claims else {}
        awaited = 0
        for claim in claims:
            stamps = self._to_share.set_aside(slots[key] for key in claim.keys)
            self._claims.wait(ClaimedPages(claim.name, stamps, now + claim.seconds), now)
            awaited += len(stamps)
        return awaited

    def look_at_claims(self) -> None:
        """Queue again what another node was to send, where that has ended, or its time is over. The shared tier is
        asked for what is due, and nothing is held meanwhile."""
        now = time.monotonic()
        with self._lock:
            due = self._claims.take(now)
        if not due or self._lower_tiers.shared is None:
            return
        ended = [claimed.ends_at <= now for claimed in due]
        try:
            told = self._lower_tiers.shared.ended([claimed.name for claimed in due])
            ended = [over or told for over, told in zip(ended, told, strict=True)]
        finally:
            with self._lock:
                for claimed, over in zip(due, ended, strict=True):
                    if over:
                        self._to_share.put_back(claimed.stamps)
                    else:
                        self._claims.wait(claimed, now)
                self._published.notify_all()

    def share_all(self, deadline: float, *, claimed: bool = True) -> None:
        """Offer everything that waits now to the shared tier, until ``deadline`` (``time.monotonic``).

        Args:
            deadline: when to stop.
            claimed: wait for what other nodes are sending, and offer what they did not send; else that is left.
        """
        if self._lower_tiers.shared is None:
            return
        left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self.sharing.acquire(timeout=left):  # or what another thread has taken would be passed over
            return
        try:
            with self._lock:
                waiting = set(self._to_share.waiting())
        finally:
            self.sharing.release()
        while waiting and time.monotonic() < deadline:
            with self._lock:
                ready = bool(self._to_share)
            if ready:
                self.share()
            elif not claimed:
                break
            else:
                self.wait_for_unshared(min(_LOOK_SECONDS, deadline - time.monotonic()))
                self.look_at_claims()
            with self._lock:
                waiting.intersection_update(self._to_share.waiting())

    def write_back(self) -> int:
        """Write one batch of dirty pages to the node's own lower tiers: those of the namespace whose turn it is, oldest
        first; of the next ones, too, while they fit. Where none of it is taken it is the next one's turn at once.

        Returns:
            How many pages are clean now; 0: no namespace's are taken.
        """
        with self._lock:
            left = self._catalog.dirty_namespaces
        while left > 0:
            with self.writing:
                with self._lock:
                    batch, _ = self._hold_batch(self._catalog.dirty(_WRITE_PAGES))
                    ended = self._catalog.end_turns(batch)
                written = self._write(batch)
            if written:
                return written
            left -= max(1, ended)
        return 0

    def flush(self, deadline: float) -> int:
        """Write everything that is dirty now, namespaces in turns, and return when it is durable: how many pages became
        so.

        Raises:
            ResourceError: some are not, since the lower tiers would not take them, or not before ``deadline``.
        """
        with self._lock:
            dirty = self._catalog.dirty_stamps()
        todo: list[tuple[int, bytes]] = []
        while stamps := list(islice(dirty, _WRITE_PAGES)):
            with self._lock:
                slots = [(stamp, self._slots.find_stamp(stamp)) for stamp in stamps]
                todo += [(stamp, self._slots.key(slot)) for stamp, slot in slots if slot is not None]
            time.sleep(0)  # whoever waits for the lock goes first
        turns: deque[tuple[int, int]] = deque()
        end = 0
        for _, pages in groupby(todo, lambda page: page[1][:FINGERPRINT_BYTES]):
            first, end = end, end + sum(1 for _ in pages)
            turns.append((first, end))
        while turns and time.monotonic() < deadline:
            first, end = turns.popleft()
            with self.writing:
                with self._lock:
                    batch, seen = self._hold_batch(self._still_dirty(todo[first : min(first + _WRITE_PAGES, end)]))
                self._write(batch)
            if first + seen < end:
                turns.append((first + seen, end))
        for tier in self._lower_tiers.own:
            tier.flush()
        left = 0
        for at in range(0, len(todo), _WRITE_PAGES):
            with self._lock:
                left += sum(slot is not None for slot in self._still_dirty(todo[at : at + _WRITE_PAGES]))
        if left:
            raise ResourceError(f"{left} of {len(todo)} pages are not on disk: no tier below would take them (in time)")
        return self._lower_tiers.find_own([key for _, key in todo]).count(PageTier.DISK)

    def _still_dirty(self, pages: Sequence[tuple[int, bytes]]) -> list[Slot | None]:
        """The slots of (stamp, key); None for a page that is clean, or gone."""
        found = [self._slots.find_stamp(stamp) for stamp, _ in pages]
        return [slot if slot is not None and self._slots.dirty[slot] else None for slot in found]

    def _hold_batch(self, slots: Sequence[Slot | None]) -> tuple[list[Slot], int]:
        """Hold dirty slots, as many as one write takes, and never more than an eighth of the arena.

        Returns:
            These, and how many of ``slots`` that deals with.
        """
        budget = self._budget
        batch: list[Slot] = []
        seen = 0
        for slot in slots:
            if slot is not None:
                if batch and budget < self._slots.length[slot]:
                    break
                batch.append(slot)
                budget -= self._slots.length[slot]
            seen += 1
        self._catalog.hold(batch)
        return batch, seen

    def _write(self, batch: Sequence[Slot]) -> int:
        """Write held pages to the node's own lower tiers, and end the holds. Returns how many are clean now."""
        written: list[bool] = [False] * len(batch)
        sums: list[int | None] = [None] * len(batch)
        try:
            pages, sums = writes_of(batch, self._residency, self._lock)
            for tier in self._lower_tiers.own:
                with self._lower_tiers.times.measured(tier.name, "write"):
                    taken = tier.write(pages)
                written = [a or b for a, b in zip(written, taken, strict=True)]
        finally:
            with self._lock:
                self._residency.note_checksums(batch, sums)
                self._catalog.mark_clean(compress(batch, written))
                if not all(written):
                    for slot, done in zip(batch, written, strict=True):
                        if not done:
                            self._catalog.defer(slot)
                self._catalog.release(batch)
        return sum(written)
