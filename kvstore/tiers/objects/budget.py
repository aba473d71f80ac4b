"""The write budget: most bytes that this process writes to the bucket a day (UTC)."""

from __future__ import annotations

import time
from collections.abc import Callable

_SECONDS_A_DAY = 86_400


class DayBudget:
    """One thread at a time. A restart begins a new budget: what was written before is not remembered."""

    def __init__(self, limit_bytes: int, now: Callable[[], float] = time.time) -> None:
        self.limit_bytes = limit_bytes
        self._now = now
        self._day = 0
        self._written = 0
        self._spent_at = (0, 0.0)

    def take(self, size: int) -> bool:
        """Whether so many bytes may be written today; when not, nothing is counted. A limit of 0 is none."""
        if not self.limit_bytes:
            return True
        self._turn()
        if self._written + size > self.limit_bytes:
            if self._spent_at[0] != self._day:
                self._spent_at = self._day, self._now()
            return False
        self._written += size
        return True

    def give_back(self, size: int) -> None:
        """So many bytes that were taken were not written."""
        self._written = max(0, self._written - size)

    @property
    def spent_since(self) -> float:
        """Since when pages are refused for it: seconds since 1970. 0: they are not."""
        today = int(self._now() // _SECONDS_A_DAY)
        return self._spent_at[1] if self.limit_bytes and self._spent_at[0] == today else 0.0

    def _turn(self) -> None:
        today = int(self._now() // _SECONDS_A_DAY)
        if today > self._day or today < self._day - 1:
            self._day, self._written = today, 0
