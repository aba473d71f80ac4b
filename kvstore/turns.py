"""What waits for something that there is too little of, of several who take turns. Decides; does no I/O."""

from __future__ import annotations

from collections import deque
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
