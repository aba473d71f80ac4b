"""Whether the learned order does better than least recently used would, judged by what happens.

Least recently used keeps a page up to some age: the one within which as many pages were used as there is room for. A
page that left and is wanted again before that age was lost by the learned order; one that is read beyond it was won.
When more is lost than won, pages leave by age alone for a while; then the order is tried again.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvstore.eviction.reuse import BINS, EDGES, bins_of

_DOUBT = 0.125
"""By how much losses may pass gains before the order is no longer trusted: in pages for each that there is room for.
Losses come first: what is won is wanted later than what is lost."""
_PAUSE = 4
"""How long that lasts, in references for each page that there is room for."""


class Trial:
    """Gains and losses since the trial began."""

    def __init__(self) -> None:
        self._ages = np.zeros(BINS)
        self._lru_age = math.inf
        self._balance = 0.0
        self._until = math.inf
        """When the next trial begins; 0: one is under way; infinite: nothing is known yet."""

    def trusted(self, clock: int, pages: int) -> bool:
        """Whether the learned order is to be used now, by a cache of so many pages."""
        if self._until:
            if clock < self._until:
                return False
            self._until = 0
            self._balance = 0.0
        elif self._balance < -_DOUBT * pages:
            self._until = clock + _PAUSE * pages
            return False
        return True

    def kept(self, pages: int, age: float) -> None:
        """So many pages were here when they were wanted again at ``age``."""
        if age > self._lru_age:
            self._balance += pages

    def lost(self, age: float) -> None:
        """A page was not here any more when it was wanted again at ``age``."""
        if age < self._lru_age:
            self._balance -= 1

    def saw(self, ages: npt.NDArray[np.float64]) -> None:
        """So long ago some pages, here or gone, were used."""
        self._ages += np.bincount(bins_of(ages), minlength=BINS)

    def saw_all(self, pages: int) -> None:
        """All pages were seen once since the last call; there is room for so many."""
        used = self._ages.cumsum()
        place = int(np.searchsorted(used, pages))
        if place < BINS:
            before = float(used[place - 1]) if place else 0.0
            part = (pages - before) / max(1.0, float(self._ages[place]))
            self._lru_age = float(EDGES[place] + part * (EDGES[place + 1] - EDGES[place]))
            if math.isinf(self._until):
                self._until = 1
        self._ages[:] = 0
