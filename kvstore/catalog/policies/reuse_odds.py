"""The odds that a page is wanted again, by how it was used, and how fast they fade.

A page's class says how often it was used, how often the last page before its request's new part was, and how long that
part is, in powers of two. The odds of a class are the part of its pages that were wanted again, here or after they
left; a class with little data is taken to be like all of them. Pages that wait here count for nothing yet: else what is
wanted after a long time would seem not to be wanted. The odds halve with every ``H`` references since the last use,
four times the geometric mean of the ages at which pages are wanted again: so what is kept for nothing leaves, and a
page that is likely to be wanted outlives many that are not.

Values are kept as logarithms and as of the start of the clock, that is with the half-lives that have passed added: so
the value of a page that nobody uses never changes, beside those of others.
"""

from __future__ import annotations

import math

_MOST_USES, _MOST_PREFIX_USES, _MOST_NEW = 5, 4, 8
CLASSES = _MOST_USES * (_MOST_PREFIX_USES + 1) * (_MOST_NEW + 1)
_PRIOR = 100.0
"""How many pages' worth of doubt there is about each class."""
_HALF_LIFE_AGES = 4.0
_FEW_AGES, _MOST_AGES = 50, 1000
"""The mean age is believed from so many on, and follows the latest ones."""
_REMEMBERED = 1 << 17
"""Pages whose fate is known, at least, until all of them count half; a larger cache forgets more slowly."""
STEPS = 64
"""A half-life has so many steps: values are told apart to 1 percent."""
_FRACTION_BITS = 32


class ReuseOdds:
    """What was seen of each class, and the clock of half-lives."""

    def __init__(self) -> None:
        self._seen = [0.0] * CLASSES
        self._again = [0.0] * CLASSES
        self._all_seen = self._all_again = 0.0
        self._now = 1 << 16 + _FRACTION_BITS
        """Steps, with ``_FRACTION_BITS`` behind the point: an integer loses nothing over years. At the start there are
        so many that no value is below 0."""
        self._mean_log_age, self._ages = 0.0, 0

    def were_wanted(self, page_class: int, age: int, pages: int, *, left: bool = False) -> None:
        """So many pages of this class were wanted again at this age, in references. ``left``: after they were lost."""
        self._again[page_class] += pages
        self._all_again += pages
        if not left:
            self._seen[page_class] += pages
            self._all_seen += pages
        self._ages = min(self._ages + pages, _MOST_AGES)
        self._mean_log_age += (math.log(age + 1) - self._mean_log_age) * min(1.0, pages / self._ages)

    def was_lost(self, page_class: int) -> None:
        """A page of this class left before it was wanted again."""
        self._seen[page_class] += 1
        self._all_seen += 1

    def pass_by(self, references: int, pages: int) -> None:
        """So many references were made, while so many pages were here."""
        enough = self._ages >= _FEW_AGES
        half_life = _HALF_LIFE_AGES * math.exp(self._mean_log_age) if enough else 2.0 * pages + 1.0
        self._now += int(references * (STEPS << _FRACTION_BITS) / half_life)
        if self._all_seen > max(_REMEMBERED, 16 * pages):
            self._seen = [seen / 2 for seen in self._seen]
            self._again = [again / 2 for again in self._again]
            self._all_seen /= 2
            self._all_again /= 2

    @property
    def now(self) -> int:
        """The clock of half-lives, in steps."""
        return self._now >> _FRACTION_BITS

    def odds(self, page_class: int) -> tuple[float, float]:
        """What part of this class' pages is wanted again, and what part of all pages."""
        prior = (self._all_again + 1) / (self._all_seen + 4)
        seen = self._seen[page_class]
        # Of the one that is counted beforehand, a class has its share: while nothing is wanted again, all are alike.
        again = self._again[page_class] + seen / (self._all_seen + 4)
        return (again + _PRIOR * prior) / (seen + _PRIOR), prior

    def value(self, page_class: int, used: int | None = None) -> int:
        """Of a page of this class that is used now, or was at this time, in steps.

        Beside the odds of all pages: those change while it waits, for it and for the others.
        """
        odds, prior = self.odds(page_class)
        return (self.now if used is None else used) + round(STEPS * math.log2(odds / prior))


def class_of(uses: int, prefix_uses: int, new: int) -> int:
    """The class of a page that was used so often, in a request with so many new pages behind a prefix whose last page
    was used so often (0: there is none)."""
    prefix_uses = min(prefix_uses, _MOST_PREFIX_USES)
    length = min((new + 1).bit_length() - 1, _MOST_NEW)
    return (prefix_uses * (_MOST_NEW + 1) + length) * _MOST_USES + min(uses, _MOST_USES) - 1


def uses_of(page_class: int) -> int:
    """How often pages of this class were used; the most that are counted: or more often."""
    return page_class % _MOST_USES + 1
