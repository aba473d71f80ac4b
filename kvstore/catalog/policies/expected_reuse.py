"""Expected reuse: the page leaves that is least likely to be wanted again, by what became of pages like it.

What a page is worth follows from its class and its age (:mod:`kvstore.catalog.policies.reuse_odds`). Only pages with no
other page behind them may leave, so that a prompt's tail leaves before its head; of these the one of least value
(:mod:`kvstore.catalog.policies.chain_ends`). What left is remembered for a while with its class
(:mod:`kvstore.catalog.policies.ghosts`): else it would be learned only of pages that stayed, and a page that comes back
would count as a new one. Where all this hits less than LRU would, pages leave by LRU
(:mod:`kvstore.catalog.policies.shadow_lru`). Each step takes the same time, however many pages there are.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import xxhash

from kvstore.catalog.policies.chain_ends import ChainEnds
from kvstore.catalog.policies.ghosts import Ghosts
from kvstore.catalog.policies.policy import Prospect
from kvstore.catalog.policies.reuse_odds import ReuseOdds, class_of, uses_of
from kvstore.catalog.policies.shadow_lru import ShadowLRU

_ABSENT, _INSERTED, _READ, _SETTLED = range(4)
"""A page that was stored or read by this request already: that the request touches it again is no second use."""
_NO_PARENT = -1
_SLOT = (1 << 32) - 1
_BIRTHS = (1 << 31) - 1
_MOST_NEW = 256
"""Pages that came and were not used, at most, until they get their values."""
_LEAST_ROWS = 16
_USE_BITS = 4
_LOOKED_AT = 64
"""Pages of least value, of which those leave first that LRU would no longer have."""


class ExpectedReuse:
    """Ranks pages by the odds that they are wanted again."""

    def __init__(self) -> None:
        self._odds = ReuseOdds()
        self._ghosts = Ghosts()
        self._trial = ShadowLRU()
        self._by_value = ChainEnds()
        self._by_use = ChainEnds()
        """The same ones; a value is a time of last use, in units of 16 references."""
        self._clock = 0
        """References so far: one for each page that is stored or read."""
        self._pages = 0
        self._births = 0
        self._new: list[tuple[int, int]] = []
        """Slots of pages that came and were not used yet, or not when they came here, and when: by the odds' clock."""
        self._freed = _NO_PARENT
        """A slot whose last page behind it just left. Most often it leaves next, so it is among the ends only once
        anything else happens."""
        # By slot:
        self._state = bytearray()
        self._class = bytearray()
        self._number = array("Q")
        """Hashes of keys."""
        self._used = array("q")
        self._value = array("q")
        self._born = array("I")
        self._parent = array("q")
        """When the page before this one was born, and in the lower 32 bits its slot; it may have left since."""
        self._children = array("I")

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        """A page was published in this slot."""
        if slot >= len(self._state):
            self._grow(slot + 1)
        elif self._state[slot]:
            self.remove(slot)
        if self._freed >= 0:
            self._enter_freed()
        number = xxhash.xxh3_64_intdigest(key)
        self._clock += 1
        self._pages += 1
        self._odds.pass_by(1, self._pages)
        self._trial.came(number, self._pages)
        ghost = self._ghosts.take(number, self._clock)
        uses = 1
        if ghost is not None:
            self._odds.were_wanted(ghost.page_class, ghost.age, 1, left=True)
            uses += uses_of(ghost.page_class)
        self._births = (self._births + 1) & _BIRTHS
        self._born[slot] = self._births
        self._number[slot] = number
        self._state[slot] = _INSERTED
        self._class[slot] = class_of(uses, 0, 1)
        self._used[slot] = self._clock
        self._parent[slot] = _NO_PARENT
        self._children[slot] = 0
        self._value[slot] = -1
        if parent is not None and parent < len(self._state) and self._state[parent]:
            self._adopt(slot, parent)
        self._new.append((slot, self._odds.now))
        if len(self._new) > _MOST_NEW:
            self._settle()

    def use(self, slots: Sequence[int]) -> None:
        """A prefix was read."""
        self._wanted(slots, 0, _READ)

    def touch(self, slots: Sequence[int]) -> None:
        """A prefix was stored, or is wanted."""
        self._wanted(slots, _READ, _SETTLED)

    def remove(self, slot: int, *, lost: bool = True) -> None:
        """The page left; not ``lost``: by wish, so that nothing can be learned from it."""
        if slot >= len(self._state) or not self._state[slot]:
            return
        if self._new:
            self._settle()
        if slot == self._freed:
            self._freed = _NO_PARENT
        else:
            if self._freed >= 0:
                self._enter_freed()
            self._leave_ends(slot)
        self._state[slot] = _ABSENT
        self._pages -= 1
        self._trial.left(self._number[slot], lost=lost)
        if lost:
            self._odds.was_lost(self._class[slot])
            self._ghosts.add(self._number[slot], self._class[slot], self._used[slot], self._pages + 1)
        parent = self._parent_of(slot)
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._freed = parent

    def remembers(self, key: bytes) -> bool:
        """Whether this page left and did not come back."""
        return xxhash.xxh3_64_intdigest(key) in self._ghosts

    def prospect(self, slot: int) -> Prospect | None:
        """By the page's class."""
        if slot >= len(self._state) or not self._state[slot]:
            return None
        return Prospect(*self._odds.odds(self._class[slot]))

    def victims(self) -> Iterator[int]:
        """The least worth first; while LRU hits more, of few those that LRU would no longer have, then the oldest."""
        if self._new:
            self._settle()
        if self._freed >= 0:
            self._enter_freed()
        if not self._trial.hits_more:
            yield from self._leaving(self._by_value, self._value.__getitem__)
            return
        horizon, before = self._trial.horizon, []
        for _, slot in islice(self._by_value.in_order(), _LOOKED_AT):
            if self._used[slot] <= horizon:
                before.append(slot)
                yield slot
        for slot in self._leaving(self._by_use, lambda slot: self._used[slot] >> _USE_BITS):
            if slot not in before:
                yield slot

    def _leaving(self, ends: ChainEnds, value_of: Callable[[int], int]) -> Iterator[int]:
        """Ends in order, and each page in its place among them once all pages behind it have left."""
        freed: list[tuple[int, int]] = []
        children: dict[int, int] = {}

        def leave(slot: int) -> int:
            parent = self._parent_of(slot)
            if parent >= 0:
                children[parent] = children.get(parent, self._children[parent]) - 1
                if not children[parent]:
                    heapq.heappush(freed, (value_of(parent), parent))
            return slot

        for value, slot in ends.in_order():
            while freed and freed[0][0] <= value:
                yield leave(heapq.heappop(freed)[1])
            yield leave(slot)
        while freed:
            yield leave(heapq.heappop(freed)[1])

    def _wanted(self, slots: Sequence[int], same: int, after: int) -> None:
        """A request used these pages, head first: once more, unless it stored them or did ``same`` before."""
        states, classes, used = self._state, self._class, self._used
        known = len(states)
        pages = [slot for slot in dict.fromkeys(slots) if slot < known and states[slot]]
        if not pages:
            return
        if self._freed >= 0:
            self._enter_freed()
        again: dict[tuple[int, int], int] = {}
        wanted: list[int] = []
        uses = []
        for slot in pages:
            state = states[slot]
            page_class = classes[slot]
            count = uses_of(page_class)
            if state != _INSERTED and state != same:
                spell = (page_class, used[slot])
                again[spell] = again.get(spell, 0) + 1
                wanted.append(self._number[slot])
                count += 1
            uses.append(count)
            states[slot] = after
        if wanted:
            self._trial.wanted(wanted)
            self._clock += len(wanted)
            self._odds.pass_by(len(wanted), self._pages)
            for (page_class, last), number in again.items():
                self._odds.were_wanted(page_class, self._clock - last, number)
        self._trial.used([self._number[slot] for slot in pages], self._clock)
        prefix = 0
        while prefix < len(pages) and uses[prefix] > 1:
            prefix += 1
        if prefix:
            prefix_uses = uses[prefix - 1]
        else:
            parent = self._parent_of(pages[0])
            prefix_uses = uses_of(classes[parent]) if parent >= 0 else 0
        self._place(pages, uses, prefix_uses, len(pages) - prefix)

    def _place(
        self,
        pages: Sequence[int],
        uses: Sequence[int],
        prefix_uses: int,
        new: int,
        used: tuple[int, int] | None = None,
    ) -> None:
        """Give the pages of one use, head first, their classes and values, and those places that may leave.

        ``used``: when that was, by both clocks, if it is not now.
        """
        classes = [class_of(count, prefix_uses, new) for count in uses]
        clock, now = used or (self._clock, self._odds.now)
        value = {page_class: self._odds.value(page_class, now) for page_class in dict.fromkeys(classes)}
        before, link = _NO_PARENT, _NO_PARENT
        values, born, parents, children = self._value, self._born, self._parent, self._children
        for slot, page_class in zip(pages, classes, strict=True):
            if values[slot] >= 0:
                self._leave_ends(slot)
            self._class[slot] = page_class
            self._used[slot] = clock
            values[slot] = value[page_class]
            if before >= 0 and parents[slot] != link and self._parent_of(slot) < 0:
                self._adopt(slot, before)
            before, link = slot, born[slot] << 32 | slot
        for slot in pages:
            if not children[slot]:
                self._enter_ends(slot)

    def _settle(self) -> None:
        """Pages that came without a request, from a lower tier or an earlier node's arena, were used when they came."""
        new, self._new = self._new, []
        for slot, came in new:
            if self._state[slot] == _INSERTED and self._value[slot] < 0:
                parent = self._parent_of(slot)
                prefix_uses = uses_of(self._class[parent]) if parent >= 0 else 0
                self._trial.used([self._number[slot]], self._clock)
                self._place([slot], [uses_of(self._class[slot])], prefix_uses, 1, (self._used[slot], came))

    def _parent_of(self, slot: int) -> int:
        link = self._parent[slot]
        if link < 0:
            return -1
        parent = link & _SLOT
        return parent if self._state[parent] and self._born[parent] == link >> 32 else -1

    def _adopt(self, slot: int, parent: int) -> None:
        """``parent`` is the page before this one."""
        if self._children[slot]:
            above = parent
            while above >= 0:
                if above == slot:
                    return  # whoever says so contradicts himself: no page comes before itself
                above = self._parent_of(above)
        if parent == slot:
            return
        self._parent[slot] = self._born[parent] << 32 | parent
        self._leave_ends(parent)
        self._children[parent] += 1

    def _enter_freed(self) -> None:
        slot, self._freed = self._freed, _NO_PARENT
        self._enter_ends(slot, first=True)

    def _enter_ends(self, slot: int, *, first: bool = False) -> None:
        self._by_value.add(slot, self._value[slot], first=first)
        self._by_use.add(slot, self._used[slot] >> _USE_BITS, first=first)

    def _leave_ends(self, slot: int) -> None:
        if slot in self._by_value:
            self._by_value.remove(slot, self._value[slot])
            self._by_use.remove(slot, self._used[slot] >> _USE_BITS)

    def _grow(self, slots: int) -> None:
        more = max(slots - len(self._state), _LEAST_ROWS, len(self._state) // 16)
        for table in (self._state, self._class):
            table.extend(bytes(more))
        for each in (self._number, self._used, self._value, self._born, self._parent, self._children):
            each.frombytes(bytes(each.itemsize * more))
        self._by_value.grow(more)
        self._by_use.grow(more)
