"""The contract of eviction: what a policy is told, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol


class Prospect(NamedTuple):
    """What a policy expects of a page."""

    odds: float
    """What part of the pages that were used as it was is wanted again."""
    mean: float
    """What part of all pages is."""


class EvictionPolicy(Protocol):
    """An order over slots, each named by a number; tables as long as the largest one are fine.

    The store's lock is held around each call: microseconds a page.
    """

    def insert(self, slot: int, key: bytes, parent: int | None) -> None:
        """The page ``key`` was published in this slot. Pages of one store come head first, and are touched behind.

        ``parent`` is the slot of the page before it in its chain, where that is known and here.
        """
        ...

    def use(self, slots: Sequence[int]) -> None:
        """A load read these pages: a prefix, or a part of one, head first. Unknown slots are passed over."""
        ...

    def touch(self, slots: Sequence[int]) -> None:
        """These pages of a prefix were stored, or are wanted, head first. Unknown slots are passed over."""
        ...

    def remove(self, slot: int, *, lost: bool = True) -> None:
        """The page left. An unknown slot is passed over.

        Not ``lost``: it was taken out by wish (pinned, dropped), which says nothing about the policy's choice.
        """
        ...

    def remembers(self, key: bytes) -> bool:
        """Whether this page is known to have left, lost; no policy remembers all."""
        ...

    def prospect(self, slot: int) -> Prospect | None:
        """What is expected of the page in this slot; None: the policy makes no such guess, or knows no such page."""
        ...

    def victims(self) -> Iterator[int]:
        """Every slot once, in the order in which they should leave; within one use the tail before the head.

        The policy must not change while this is read.
        """
        ...
