"""What several may have of one thing at once, so that whoever comes finds some of it left. Decides; does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


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
