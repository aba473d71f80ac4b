"""Least recently used, by prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.catalog.policies.policy import Prospect


class LeastRecentlyUsed:
    """The page that was stored or used longest ago leaves first; within one use, the tail before the head."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot: int, key: bytes, parent: int | None = None) -> None:
        """A page was published in this slot."""
        self._order[slot] = None
        self._order.move_to_end(slot)

    def use(self, slots: Sequence[int]) -> None:
        """A prefix was read."""
        self.touch(slots)

    def touch(self, slots: Sequence[int]) -> None:
        """A prefix was stored, or is wanted."""
        for slot in reversed(slots):
            if slot in self._order:
                self._order.move_to_end(slot)

    def remove(self, slot: int, *, lost: bool = True) -> None:
        """The page left."""
        self._order.pop(slot, None)

    def remembers(self, key: bytes) -> bool:
        """It remembers nothing."""
        return False

    def prospect(self, slot: int) -> Prospect | None:
        """It makes no guess."""
        return None

    def victims(self) -> Iterator[int]:
        """The oldest use first."""
        return iter(self._order)
