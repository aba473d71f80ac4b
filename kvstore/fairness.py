"""Fairness: each owner gets at most half of what the others leave, and those who wait take turns. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Those who wait take turns, and so do the calls of each of them. Not safe for threads."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[deque[T]]] = {}
        """Whose turn it is next first: what each of his calls waits for, that call first whose turn it is next."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, who: Hashable, parts: Sequence[T]) -> None:
        """All that one call waits for."""
        if parts:
            self._waiting.setdefault(who, deque()).append(deque(parts))

    def take(self) -> T:
        """The next one; there is one."""
        who = next(iter(self._waiting))
        calls = self._waiting.pop(who)
        parts = calls.popleft()
        part = parts.popleft()
        if parts:
            calls.append(parts)
        if calls:
            self._waiting[who] = calls  # behind all others
        return part


class Shares:
    """Each gets at most half of what all others leave, and one in any case. Not safe for threads.

    Args:
        limit: what there is for all of them; passed only by those who have one.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        """By all of them."""
        self._of: Counter[Hashable] = Counter()

    def may_take(self, who: Hashable, amount: int = 1) -> bool:
        """Whether so much more is within somebody's share."""
        own = self._of[who]
        return not own or 2 * (own + amount) <= self.limit - (self.taken - own)

    def take(self, who: Hashable, amount: int = 1) -> None:
        """Somebody has it from now on."""
        self._of[who] += amount
        self.taken += amount

    def give_back(self, who: Hashable, amount: int = 1) -> None:
        """It is free again."""
        self._of[who] -= amount
        self.taken -= amount
        if not self._of[who]:
            del self._of[who]
