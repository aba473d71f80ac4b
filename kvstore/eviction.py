"""Which page leaves first. Order and eviction are one object, so that they can't disagree.

A policy sees slots come, be used and go, and proposes victims in its order; it decides nothing about holds or dirty
pages: the catalog skips what may not leave now. A proposal changes nothing until ``remove`` is called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over slots, each named by a number."""

    def insert(self, slot: int) -> None:
        """A page was published in this slot."""
        ...

    def touch(self, slots: Iterable[int]) -> None:
        """A prefix was used. ``slots`` come head first; its tail is to leave before its head."""
        ...

    def remove(self, slot: int) -> None:
        """The page left, for whatever reason."""
        ...

    def victims(self) -> Iterator[int]:
        """Slots in the order in which they should leave. The policy must not change while this is read."""
        ...


class LeastRecentlyUsed:
    """The page that was stored or used longest ago leaves first; within one use, the tail before the head."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, slot: int) -> None:
        """A page was published in this slot."""
        self._order[slot] = None
        self._order.move_to_end(slot)

    def touch(self, slots: Iterable[int]) -> None:
        """A prefix was used; unknown slots are passed over."""
        for slot in reversed(list(slots)):
            if slot in self._order:
                self._order.move_to_end(slot)

    def remove(self, slot: int) -> None:
        """The page left."""
        self._order.pop(slot, None)

    def victims(self) -> Iterator[int]:
        """The oldest use first."""
        return iter(self._order)
