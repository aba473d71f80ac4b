"""Expected reuse: the page leaves whose place earns least, by what pages like it did before.

A page's class says how it was used last: how often so far, how far from the end of its prompt, with how many new pages
behind it; and, if it was new itself, behind which pages it came. The worth of a class at an age is learned
(:mod:`kvstore.catalog.policies.reuse_model`). Only pages with no other page behind them may leave, so that a prompt's
tail leaves before its head; of these, each class keeps its own in order of use, and the oldest ones of all classes are
compared. So a choice takes as many comparisons as there are classes, whatever the number of pages, and nothing is
fitted in a lump: each reference adds to a few sums, and now and then one class is worked out anew.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from kvstore.catalog.policies.ghosts import Ghost, Ghosts
from kvstore.catalog.policies.reuse_model import ReuseTimes, bin_of
from kvstore.catalog.policies.shadow_lru import ShadowLRU

_NEW_CLASSES = 30
_CLASSES = _NEW_CLASSES + 60
_LEAST_ROWS = 16
_NO_SLOT = array("i", [-1]).tobytes()
_CHUNK = 4096
"""Pages a look."""
_GHOSTS_A_PAGE = 32
_ENOUGH_GHOSTS = 1 << 18
"""So many pages that left are remembered for each that is here, up to this number; beyond it one or two for each."""
_REFRESH = 8
"""References from one class worked out anew to the next."""
_WATCH = 64
"""References from one look at pages that wait to the next."""
_HALF_LIFE = 1 << 17
"""References, at least, until what was seen counts half; a larger cache forgets more slowly."""
_ROW_BITS = 32
_ROW = (1 << _ROW_BITS) - 1
_SETTLED, _INSERTED, _READ = 0, 1, 2
"""A page that was stored or read by this request already: that the request touches it again is no second use."""


class ExpectedReuse:
    """Ranks pages by the worth of their class at their age."""

    def __init__(self) -> None:
        self._times = ReuseTimes(_CLASSES)
        self._clock = 0
        self._rows = array("i")
        """By slot: its row, -1 where it has none."""
        self._pages = 0
        self._free = array("i")
        # By row:
        self._slot = array("i")
        self._key = array("Q")
        self._used = array("q")
        self._parent = array("i")
        self._children = array("i")
        self._class = array("B")
        self._queued = array("B")
        """The class in whose queue the row is; ``_CLASSES``: in none."""
        self._uses = array("B")
        self._fresh = array("B")
        self._queues: list[list[int]] = [[] for _ in range(_CLASSES)]
        """By class: a heap of entries, each the time of last use, and in the lower ``_ROW_BITS`` the row. An entry may
        be late: what counts is said by the row."""
        self._valid = [0] * _CLASSES
        """How many entries of each queue count."""
        self._next_leaf = -1
        """The row that became a leaf when the last victim left, and leaves next while nothing else changes."""
        self._next_until = 0
        self._ghosts = Ghosts(0)
        self._left = 0
        """Pages that were lost so far."""
        self._watched: list[int] = []
        """When each chunk of rows was looked at last."""
        self._watched_ghosts: list[int] = []
        self._next_chunk = 0
        self._to_refresh, self._to_watch = _REFRESH, _WATCH
        self._trial = ShadowLRU()

    # -- the contract ------------------------------------------------------------------------------------------------

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        """A page was published in this slot."""
        if slot >= len(self._rows):
            self._rows.frombytes(_NO_SLOT * (slot + 1 - len(self._rows)))
        elif self._rows[slot] >= 0:
            self.remove(slot)
        number = xxhash.xxh3_64_intdigest(key)
        row = self._new_row()
        self._rows[slot] = row
        self._pages += 1
        self._slot[row] = slot
        self._key[row] = number
        self._fresh[row] = _INSERTED
        self._uses[row] = 1
        found = self._ghosts.take(number)
        if found is not None:
            place, ghost = found
            self._uses[row] = min(ghost.uses + 1, 255)
            seen = self._watched_ghosts[place // _CHUNK] - ghost.used
            self._times.were_wanted(1, ghost.page_class, self._clock - ghost.used, seen)
        self._tick(1)
        self._trial.came(number, self._clock, self._pages)
        self._used[row] = self._clock
        self._class[row] = 0
        self._adopt(row, -1 if parent is None else self._row_of(parent))
        self._enter(row)

    def use(self, slots: Sequence[int]) -> None:
        """A prefix was read."""
        self._wanted(slots, _INSERTED, _READ)

    def touch(self, slots: Sequence[int]) -> None:
        """A prefix was stored, or is wanted."""
        self._wanted(slots, _INSERTED | _READ, _SETTLED)

    def remove(self, slot: int, *, lost: bool = True) -> None:
        """The page left; not ``lost``: by wish, so that nothing can be learned from it."""
        row = self._row_of(slot)
        if row < 0:
            return
        self._rows[slot] = -1
        self._pages -= 1
        self._leave_queue(row)
        self._slot[row] = -1
        self._trial.left(self._key[row], lost)
        if lost:
            self._remember(row)
        self._next_leaf = -1
        parent = self._parent[row]
        if parent >= 0:
            self._parent[row] = -1
            self._children[parent] -= 1
            if not self._children[parent]:
                if self._slot[parent] < 0:
                    self._free.append(parent)
                else:
                    self._enter(parent)
                    if self._class[parent] == self._class[row] and self._used[parent] == self._used[row]:
                        self._next_leaf = parent
        if not self._children[row]:
            self._free.append(row)  # else, when the last page behind it has left

    def remembers(self, key: bytes) -> bool:
        """Whether this page left and did not come back."""
        return xxhash.xxh3_64_intdigest(key) in self._ghosts

    def victims(self) -> Iterator[int]:
        """The least worth first."""
        first = self._next_leaf if self._clock < self._next_until else -1
        if first >= 0:
            yield self._slot[first]
        else:
            self._next_until = self._clock + _REFRESH
        for row in self._leaving():
            if row != first:
                yield self._slot[row]

    def _leaving(self) -> Iterator[int]:
        clock, used, slots = self._clock, self._used, self._slot
        worth, free_before = self._times.worth, self._trial.free_before()
        order: list[tuple[float, int, int, int, int]] = []
        """(worth, when it was used, class, place in the queue or -1, row)"""

        def propose(row: int, page_class: int, place: int) -> None:
            last = used[row]
            keep = worth[page_class][bin_of(clock - last)] if last < free_before else math.inf
            heapq.heappush(order, (keep, last, page_class, place, row))

        for page_class, queue in enumerate(self._queues):
            if queue:
                self._settle(page_class)
                if queue:
                    propose(queue[0] & _ROW, page_class, 0)
        children: dict[int, int] = {}
        seen: set[int] = set()
        while order:
            _, _, page_class, place, row = heapq.heappop(order)
            if place >= 0:
                queue = self._queues[page_class]
                for following in range(2 * place + 1, min(2 * place + 3, len(queue))):
                    propose(queue[following] & _ROW, page_class, following)
                if self._queued[row] != page_class or self._children[row]:
                    continue
            if row in seen:
                continue
            seen.add(row)
            yield row
            parent = self._parent[row]
            if parent >= 0 and slots[parent] >= 0:
                children[parent] = children.get(parent, self._children[parent]) - 1
                if not children[parent]:
                    propose(parent, self._class[parent], -1)

    # -- how a page is used ------------------------------------------------------------------------------------------

    def _wanted(self, slots: Sequence[int], same: int, after: int) -> None:
        """A request used these pages, head first: once more, unless what it did before is one of ``same``."""
        rows = [row for row in dict.fromkeys(map(self._row_of, slots)) if row >= 0]
        fresh, uses, used, classes, watched = self._fresh, self._uses, self._used, self._class, self._watched
        spells: dict[tuple[int, int, int], int] = {}
        """(class, when used last, when watched last) → pages that are wanted again."""
        keys, again = self._key, []
        for row in rows:
            if not fresh[row] & same:
                again.append(keys[row])
                spell = (classes[row], used[row], watched[row // _CHUNK])
                spells[spell] = spells.get(spell, 0) + 1
                if uses[row] < 255:
                    uses[row] += 1
            fresh[row] = after
        self._trial.wanted(again)
        for (page_class, last, looked), pages in spells.items():
            self._times.were_wanted(pages, page_class, self._clock - last, looked - last)
        self._tick(len(again))
        self._trial.used([keys[row] for row in rows], self._clock)
        self._queue_up(rows)

    def _queue_up(self, rows: Sequence[int]) -> None:
        """Give the pages of one use, head first, their classes, and let those that can leave stand in line."""
        self._next_leaf = -1
        uses, classes, used, parents = self._uses, self._class, self._used, self._parent
        pages, clock = len(rows), self._clock
        known = 0
        while known < pages and uses[rows[known]] > 1:
            known += 1
        new = pages - known
        before = rows[known - 1] if known else parents[rows[0]] if rows else -1
        of_new = _class_of_new(uses[before] if before >= 0 else 0, new)
        of_known = _class_of_known(new)
        parent = -1
        behind = pages
        for row in rows:
            count = uses[row]
            if count == 1:
                classes[row] = of_new + (behind == 1)
            else:
                classes[row] = of_known + _OFTEN[count] + (behind if behind < 3 else 3)
            used[row] = clock
            if parent >= 0 and parents[row] != parent:
                self._adopt(row, parent)
            parent = row
            behind -= 1
        for row in rows:
            if not self._children[row]:
                self._enter(row)

    # -- leaves, by class --------------------------------------------------------------------------------------------

    def _adopt(self, row: int, parent: int) -> None:
        """``parent`` is the page before this one, unless it is known to have another."""
        known = self._parent[row]
        if parent < 0 or parent == row or (known >= 0 and self._slot[known] >= 0):
            return
        if self._children[row]:
            above = parent
            while above >= 0:
                if above == row:
                    return  # whoever says so contradicts himself: no page comes before itself
                above = self._parent[above]
        if known >= 0:
            self._children[known] -= 1
            if not self._children[known]:
                self._free.append(known)
        self._parent[row] = parent
        self._children[parent] += 1
        self._next_leaf = -1
        self._leave_queue(parent)

    def _enter(self, row: int) -> None:
        """A page with none behind it stands in line in its class's queue."""
        page_class = self._class[row]
        if self._queued[row] == page_class:
            return  # its entry is moved when it comes to the front
        self._leave_queue(row)
        self._queued[row] = page_class
        self._valid[page_class] += 1
        queue = self._queues[page_class]
        heapq.heappush(queue, self._used[row] << _ROW_BITS | row)
        if len(queue) > 2 * self._valid[page_class] + 64:
            rows = {entry & _ROW for entry in queue if self._queued[entry & _ROW] == page_class}
            queue[:] = sorted(self._used[each] << _ROW_BITS | each for each in rows)

    def _leave_queue(self, row: int) -> None:
        page_class = self._queued[row]
        if page_class != _CLASSES:
            self._queued[row] = _CLASSES
            self._valid[page_class] -= 1

    def _settle(self, page_class: int) -> None:
        """Let an entry that counts, and is not late, come to the front of a queue."""
        queue = self._queues[page_class]
        while queue:
            row = queue[0] & _ROW
            if self._queued[row] != page_class:
                heapq.heappop(queue)
            elif queue[0] >> _ROW_BITS != self._used[row]:
                heapq.heapreplace(queue, self._used[row] << _ROW_BITS | row)
            else:
                return

    # -- what is remembered and watched ------------------------------------------------------------------------------

    def _tick(self, references: int) -> None:
        self._clock += references
        self._to_refresh -= references
        if self._to_refresh < 0:
            self._to_refresh = _REFRESH
            self._times.refresh()
        self._to_watch -= references
        if self._to_watch < 0:
            self._to_watch = _WATCH
            self._watch()

    def _watch(self) -> None:
        """Look at one chunk of pages that wait, here or gone."""
        chunk = self._next_chunk
        chunks = len(self._watched)
        if chunk < chunks:
            low, seen = chunk * _CHUNK, self._watched[chunk]
            self._watched[chunk] = self._clock
            part = slice(low, low + _CHUNK)
            known = np.frombuffer(self._slot[part], np.int32) >= 0
            used, classes = self._used[part], self._class[part]
        else:
            place = chunk - chunks
            low, seen = place * _CHUNK, self._watched_ghosts[place]
            self._watched_ghosts[place] = self._clock
            part = slice(low, low + _CHUNK)
            known = np.frombuffer(self._ghosts.keys[part], np.uint64) > 0
            used, classes = self._ghosts.used[part], self._ghosts.classes[part]
        last = np.frombuffer(used, np.int64)[known].astype(np.float64)
        self._times.have_waited(
            np.frombuffer(classes, np.uint8)[known], np.maximum(seen - last, 0.0), self._clock - last
        )
        self._next_chunk = (chunk + 1) % (chunks + len(self._watched_ghosts))
        keep = 0.5 ** (_WATCH / max(_HALF_LIFE, 16 * self._pages))
        self._times.forget(keep)
        self._trial.forget(keep)

    def _remember(self, row: int) -> None:
        if not self._left:
            self._ghosts = Ghosts(_CHUNK)
            self._watched_ghosts = [self._clock]
        self._left += 1
        here, places = self._pages, len(self._ghosts)
        few = places < min(_GHOSTS_A_PAGE * here, _ENOUGH_GHOSTS) or places <= here
        if few and 2 * self._left > places:
            self._ghosts = self._ghosts.grown()
            self._watched_ghosts += self._watched_ghosts
        self._ghosts.add(self._key[row], Ghost(self._class[row], self._uses[row], self._used[row]))

    def _row_of(self, slot: int) -> int:
        return self._rows[slot] if slot < len(self._rows) else -1

    def _new_row(self) -> int:
        if not self._free:
            self._grow()
        row = self._free.pop()
        if row // _CHUNK >= len(self._watched):
            self._watched.append(self._clock)
        self._parent[row] = -1
        self._children[row] = 0
        self._queued[row] = _CLASSES
        return row

    def _grow(self) -> None:
        """Rows that nobody has used yet: as many as there are pages' sixteenths."""
        first = len(self._slot)
        more = max(_LEAST_ROWS, first // 16)
        self._slot.frombytes(_NO_SLOT * more)
        for each in (self._key, self._used, self._parent, self._children):
            each.frombytes(bytes(more * each.itemsize))
        for each in (self._class, self._queued, self._uses, self._fresh):
            each.frombytes(bytes(more))
        self._free.extend(range(first + more - 1, first - 1, -1))


def _class_of_new(parent_uses: int, new: int) -> int:
    """The class of pages that are new, by the uses of the page before the first of them and their number."""
    bucket = (
        0 if parent_uses == 0 else 1 if parent_uses <= 3 else 2 if parent_uses <= 5 else 3 if parent_uses <= 17 else 4
    )
    return bucket * 6 + (0 if new <= 8 else 2 if new <= 32 else 4)


def _class_of_known(new: int) -> int:
    """The class, but for two terms, of pages that were used before, by the number of new pages behind them."""
    return _NEW_CLASSES - 1 + 3 * (0 if new <= 1 else 1 if new <= 8 else 2 if new <= 32 else 3)


_OFTEN = bytes(
    12 * (0 if uses <= 2 else 1 if uses == 3 else 2 if uses <= 5 else 3 if uses <= 9 else 4) for uses in range(256)
)
"""What the number of uses adds to a class."""
