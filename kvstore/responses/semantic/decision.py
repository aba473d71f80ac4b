"""Whether a stored answer is told to a prompt that is only similar: decided by entry, from outcomes. No I/O.

After vCache (arXiv 2502.03771): each entry has a threshold of its own, a similarity from which on its answer is right.
Nobody knows it. What outcomes that were checked before say of entries like it is what is thought of it at first; each
outcome of its own changes that, by a logistic curve. A prompt is answered from the entry only where the probability
that this would be wrong is within the bound.

*Entries like it*: those of the same caller with the same embedder, in a pair of the same likeness
(:class:`kvstore.responses.semantic.guards.Likeness`) and at most this similar, the nearest ones; where these
are few, the next more similar ones besides. Of them counts the upper end of the 95 % interval of the share that was
wrong, each entry once, and never less than at a greater similarity. So no kind of pairs is hit before a few hundred
outcomes of it are there, from checks at this place, but for what :mod:`kvstore.responses.semantic.beginning` begins
with; and where they are few, one that is wrong ends it.

All this holds for prompts like those that were checked. Prompts of another kind may do worse until they are checked.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.responses.semantic.guards import Likeness
from kvstore.responses.semantic.interval import upper_end

_SLOPE = 40.0
"""Of the logistic curve: how sharply an entry's answers turn from wrong to right, by similarity."""
_DOUBT = 0.005
"""That a comparison above the threshold comes out wrong all the same."""
_LUCK = 0.7
"""That one below it comes out right: a few right answers prove little, since what is asked next may be the contrary."""
_GRID = 101
"""Thresholds from 0 to 1 that are considered, and one that no prompt reaches."""
_HOPEFUL = 0.8
"""A curve that rises above this may let an entry without outcomes hit: it is counted anew at each wrong one."""
_NEAREST = 500
"""Entries whose outcomes are counted."""
_FEWEST, _FILLED = 5, 250
"""So many entries that were at most as similar are needed before the next more similar ones count with them, up to this
number of entries: where few are, the share that is wrong is taken to change slowly."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An entry's answer was compared with the one that was computed."""

    entry: str
    likeness: Likeness
    similarity: float
    right: bool


class Experience:
    """What is known of a caller's prompts with an embedder.

    Args:
        outcomes: what it begins with.
    """

    def __init__(self, outcomes: Iterable[Outcome] = ()) -> None:
        self._of_entry: dict[str, list[Outcome]] = {}
        self._by_likeness: dict[Likeness, list[Outcome]] = {likeness: [] for likeness in Likeness}
        self._curves: dict[Likeness, npt.NDArray[np.float64]] = {}
        self._counted: dict[Likeness, int] = {}
        """Outcomes in each curve."""
        for each in outcomes:
            self.add(each)

    def __len__(self) -> int:
        return sum(map(len, self._by_likeness.values()))

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self._of_entry.setdefault(outcome.entry, []).append(outcome)
        self._by_likeness[outcome.likeness].append(outcome)
        curve = self._curves.get(outcome.likeness)
        if not outcome.right and curve is not None and curve[-1] > _HOPEFUL:
            del self._curves[outcome.likeness]  # at once; others may wait until they are some

    def of(self, entry: str) -> tuple[int, int]:
        """How many of an entry's outcomes were right, and how many wrong."""
        right = [outcome.right for outcome in self._of_entry.get(entry, ())]
        return right.count(True), right.count(False)

    def wrong(self, entry: str, likeness: Likeness, similarity: float) -> float:
        """The probability, from 0 to 1, that this entry's answer would be wrong.

        Args:
            entry: its name.
            likeness: of its prompt and the one that is asked.
            similarity: of both, from -1 to 1.
        """
        outcomes = self._by_likeness[likeness]
        if likeness not in self._curves or len(outcomes) > 1.05 * self._counted[likeness] + 5:
            self._curves[likeness] = prior(outcomes)
            self._counted[likeness] = len(outcomes)
        own = [outcome for outcome in self._of_entry.get(entry, ()) if outcome.likeness is likeness]
        return wrong_by_entry(self._curves[likeness], own, similarity)


def prior(outcomes: Sequence[Outcome]) -> npt.NDArray[np.float64]:
    """What is thought of the threshold of an entry before it has outcomes: how likely it is at most each value of the
    grid. [101], rising.

    Args:
        outcomes: of entries like it.
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.similarity)
    reached = np.zeros(_GRID)
    right, begun = 0.0, 0
    for place in range(_GRID):
        end = bisect_right(ordered, place / (_GRID - 1), key=lambda outcome: outcome.similarity)
        if end > begun:  # else there is nothing new at this similarity
            seen: dict[str, bool] = {}
            for outcome in (ordered[each] for each in range(end - 1, -1, -1)):
                if outcome.entry not in seen and len(seen) == _NEAREST:
                    break
                seen[outcome.entry] = seen.get(outcome.entry, True) and outcome.right
            if len(seen) >= _FEWEST:
                for outcome in itertools.islice(ordered, end, None):
                    if outcome.entry not in seen and len(seen) >= _FILLED:
                        break
                    seen[outcome.entry] = seen.get(outcome.entry, True) and outcome.right
            wrong = list(seen.values()).count(False)
            right = 1 - upper_end(wrong, len(seen)) if 2 * wrong <= len(seen) else 0.0  # else nothing is told here
            begun = end
        reached[place] = right
    return np.minimum.accumulate(reached[::-1])[::-1]  # what is wrong of more similar ones counts here, too


def wrong_by_entry(reached: npt.NDArray[np.float64], own: Iterable[Outcome], similarity: float) -> float:
    """The probability that an entry's threshold is above a similarity, given its own outcomes.

    Args:
        reached: as :func:`prior` gives it.
        own: its outcomes.
        similarity: of the prompt that is asked.
    """
    thresholds = np.append(np.linspace(0, 1, _GRID), math.inf)
    weights = np.diff(reached, prepend=0.0, append=1.0)
    for outcome in own:
        right = _right(outcome.similarity - thresholds)
        weights = weights * (right if outcome.right else 1 - right)
    total = weights.sum()
    if total <= 0:
        return 1.0
    return float(weights[thresholds > similarity + 1e-9].sum() / total)


def _right(above: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    curve = 1 / (1 + np.exp(-np.clip(_SLOPE * above, -500, 500)))
    return np.asarray(_LUCK + (1 - _DOUBT - _LUCK) * curve)
