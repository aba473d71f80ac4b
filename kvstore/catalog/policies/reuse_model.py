"""How long pages wait until they are wanted again, by class; and from that, what keeping one is worth.

Ages are counted in references, one for each page that is stored or read, so that a busy and an idle hour look the same.
For each class and each bin of ages two sums are kept: how many pages were wanted again at that age, and how much time
all pages of the class spent in it, wanted again or not (of pages that wait still or were evicted unseen, the time so
far). Their quotient is the hazard of being wanted, as actuaries estimate it. Pages that left count like pages that
stayed, as long as somebody remembers them: so what eviction lost is seen.

A class that was seen little borrows: its hazard is drawn to the average of all classes at that age, times one factor of
its own (the proportional hazards of D. R. Cox, "Regression models and life-tables", 1972, with classes as the only
covariate and gamma priors worth a few pages).

What a page is worth is Gittins's index of its class at its age: over all times for which it could be kept from now on,
the best ratio of the chance that it is wanted by then to the references for which it would take its place (J. C.
Gittins, "Bandit processes and dynamic allocation indices", 1979). A page that will be wanted only after a pause is
worth the wait; with one class and a hazard that falls with age, this order is least recently used.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

BINS = 48
"""Bins of ages: half-octaves, the first from 0 to about 7 references, the last without an end."""
_FIRST = 16.0
_PRIOR = 200.0
"""How many pages' worth of doubt there is about each bin of each class."""
_FACTOR_PRIOR = 20.0
"""The same about the factor of each class."""

Floats = npt.NDArray[np.float64]

EDGES: Floats = _FIRST * (2.0 ** (np.arange(BINS + 1) / 2) - 1)
"""Where bins begin; float64 [BINS + 1]."""
_WIDTHS = np.diff(EDGES)
_UPPER = np.triu(np.ones((BINS, BINS), dtype=bool))


def bin_of(age: float) -> int:
    """The bin of an age."""
    place = int(2 * math.log2(age / _FIRST + 1))
    return place if place < BINS else BINS - 1


def bins_of(ages: Floats) -> npt.NDArray[np.int64]:
    """The bins of many ages."""
    return np.minimum((2 * np.log2(ages / _FIRST + 1)).astype(np.int64), BINS - 1)


class ReuseTimes:
    """What was seen of each class, and what its pages are worth at each age.

    Args:
        classes: how many.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._wanted = np.zeros((0, BINS))
        """Pages wanted again, by class and bin; no rows until something was seen, as there may be many orders."""
        self._reached = np.zeros((0, BINS))
        """Watched spells that ended in a bin, less those that began in it."""
        self._inside = np.zeros((0, BINS))
        """How far into their bin spells were when they ended, less the same for their beginnings; summed."""
        self._pooled: Floats = 1 / (EDGES[:-1] + _WIDTHS / 2)
        self._next = 0
        self._learnt = False
        self.worth: list[list[float]] = [self._pooled.tolist()] * classes
        """By class and bin. Until ``_PRIOR`` pages were wanted again, all are alike: least recently used."""

    def were_wanted(self, pages: int, page_class: int, age: float, seen: float) -> None:
        """So many pages were wanted again at ``age``; up to the age of ``seen`` they were counted before."""
        self._begin()
        place = bin_of(age)
        self._wanted[page_class, place] += pages
        self._reached[page_class, place] += pages
        self._inside[page_class, place] += pages * (age - EDGES[place])
        if seen > 0:
            place = bin_of(seen)
            self._reached[page_class, place] -= pages
            self._inside[page_class, place] -= pages * (seen - EDGES[place])

    def have_waited(self, classes: npt.NDArray[np.uint8], seen: Floats, ages: Floats) -> None:
        """So many pages were not wanted from an age of ``seen`` to one of ``ages``."""
        self._begin()
        size = self._classes * BINS
        offset = classes.astype(np.int64) * BINS
        for sign, each in ((1.0, ages), (-1.0, seen)):
            places = bins_of(each)
            inside = each - EDGES[places]
            places += offset
            self._reached += sign * np.bincount(places, minlength=size).reshape(-1, BINS)
            self._inside += sign * np.bincount(places, inside, minlength=size).reshape(-1, BINS)

    def forget(self, keep: float) -> None:
        """Let all that was seen so far count for less."""
        self._wanted *= keep
        self._reached *= keep
        self._inside *= keep

    def refresh(self) -> None:
        """Take what was seen into account for one class, each in its turn."""
        if not self._learnt:
            if self._wanted.sum() >= _PRIOR:
                self._pool()
                self.worth = [_gittins(self._pooled).tolist()] * self._classes
                self._learnt = True
            return
        page_class = self._next
        self._next = (page_class + 1) % self._classes
        if page_class == 0:
            self._pool()
        wanted, waited = self._wanted[page_class], self._waited(page_class)
        factor = (wanted.sum() + _FACTOR_PRIOR) / (float(waited @ self._pooled) + _FACTOR_PRIOR)
        hazard = (wanted + _PRIOR) / (waited + _PRIOR / (factor * self._pooled))
        self.worth[page_class] = _gittins(hazard).tolist()

    def _begin(self) -> None:
        if not len(self._wanted):
            self._wanted, self._reached, self._inside = (np.zeros((self._classes, BINS)) for _ in range(3))

    def _waited(self, page_class: int) -> Floats:
        reached = self._reached[page_class]
        beyond = reached[::-1].cumsum()[::-1] - reached
        waited: Floats = np.maximum(self._inside[page_class] + _WIDTHS * beyond, 0.0)
        return waited

    def _pool(self) -> None:
        wanted = self._wanted.sum(axis=0)
        reached = self._reached.sum(axis=0)
        waited = np.maximum(self._inside.sum(axis=0) + _WIDTHS * (reached[::-1].cumsum()[::-1] - reached), 0.0)
        before = float(wanted.sum() / max(waited.sum(), 1.0))
        for place in range(BINS):  # where little was seen, an age is like the one before
            before = float((wanted[place] + 1) / (waited[place] + 1 / before))
            self._pooled[place] = before


def _gittins(hazard: Floats) -> Floats:
    """The best ratio of the chance to be wanted to the time kept, by bin of age. Takes and returns float64 [BINS]."""
    summed = hazard * _WIDTHS
    after = summed.cumsum()
    middle = after - summed / 2
    left = np.exp(middle[:, None] - after[None, :], where=_UPPER, out=np.zeros((BINS, BINS)))
    before = np.empty_like(left)
    before[:, 1:] = left[:, :-1]
    np.fill_diagonal(before, 1.0)
    kept = (np.where(_UPPER, before - left, 0.0) / hazard).cumsum(axis=1)
    worth: Floats = np.divide(1 - left, kept, where=_UPPER, out=np.zeros((BINS, BINS))).max(axis=1)
    return worth
