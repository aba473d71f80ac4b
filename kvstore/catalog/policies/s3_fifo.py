"""S3-FIFO: a small queue for what is new, a main queue for what was used again, and a memory of what left.

After J. Yang, Y. Zhang, Z. Qiu, Y. Yue and R. Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023,
with the paper's sizes: a tenth of the pages are to be in the small queue, and each page counts up to three uses. As
many keys are remembered as there are pages; in the paper it is a tenth less, as many as the main queue is to have.
Since a policy here proposes, and others decide, queues are put in order when a victim is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.catalog.policies.policy import Prospect

_SMALL_PARTS = 10
_MOST_USES = 3


class S3FIFO:
    """Pages that are used once leave soon; those used again leave in turns."""

    def __init__(self) -> None:
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._keys: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        """A page was published in this slot: behind what is new, or what was used again if it left lately."""
        self.remove(slot)
        self._keys[slot] = key
        self._uses[slot] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[slot] = None
        else:
            self._small[slot] = None

    def use(self, slots: Sequence[int]) -> None:
        """A prefix was read."""
        for slot in slots:
            if slot in self._uses:
                self._uses[slot] = min(self._uses[slot] + 1, _MOST_USES)

    def touch(self, slots: Sequence[int]) -> None:
        """A prefix was stored: of what came with it, the tail is put before the head."""
        for queue in (self._small, self._main):
            last = next(reversed(queue), None)
            if last is None or last not in slots:
                continue
            stored = set(slots)
            tail = []
            for slot in reversed(queue):
                if slot not in stored:
                    break
                tail.append(slot)
            place = {slot: number for number, slot in enumerate(slots)}
            for slot in sorted(tail, key=place.__getitem__, reverse=True):
                queue.move_to_end(slot)

    def remove(self, slot: int, *, lost: bool = True) -> None:
        """The page left."""
        key = self._keys.pop(slot, None)
        if key is None:
            return
        del self._uses[slot]
        if slot in self._small:
            del self._small[slot]
            if lost:
                self._ghosts[key] = None
            while len(self._ghosts) > len(self._uses):
                self._ghosts.popitem(last=False)
        else:
            del self._main[slot]

    def remembers(self, key: bytes) -> bool:
        """Whether this page left the small queue lately."""
        return key in self._ghosts

    def prospect(self, slot: int) -> Prospect | None:
        """It makes no guess."""
        return None

    def victims(self) -> Iterator[int]:
        """From the small queue while it is too large, else from the main one."""
        self._settle()
        if self._takes_small():
            yield from self._small
            yield from self._main
        else:
            yield from self._main
            yield from self._small

    def _takes_small(self) -> bool:
        return bool(self._small) and (not self._main or len(self._small) * _SMALL_PARTS >= len(self._uses))

    def _settle(self) -> None:
        """Let a page come to the front that is to leave."""
        while self._uses:
            if self._takes_small():
                slot = next(iter(self._small))
                if not self._uses[slot]:
                    return
                del self._small[slot]
                self._main[slot] = None
            else:
                slot = next(iter(self._main))
                if not self._uses[slot]:
                    return
                self._main.move_to_end(slot)
                self._uses[slot] -= 1
                continue
            self._uses[slot] = 0
