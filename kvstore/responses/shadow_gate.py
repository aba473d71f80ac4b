"""Whether similar prompts are answered at all: shut without a comparer, and when checks find too many wrong answers.

It is looked at after each check, so an interval counts that holds at all of these looks. At a bound of 2 % one wrong
answer, or two, among the first checks don't shut it; three of the first three, or five of fifty, do. It does not open
by itself: while it is shut nothing is told, so that nothing shows whether what would be told now were right. It is for
an operator to open.
"""

from __future__ import annotations

import logging

from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.semantic.interval import ends_at_all_times

_log = logging.getLogger("kvstore.responses")


class ShadowGate:
    """Safe for one thread at a time.

    Args:
        metrics: where it says whether it is open, and what checks found.
        compares: whether anything compares answers; without, it is shut.
        bound: on the share of wrong answers among those told to similar prompts, from 0 to 1.
    """

    def __init__(self, metrics: ResponseMetrics, compares: bool, bound: float) -> None:
        self._metrics = metrics
        self._compares = compares
        self._bound = bound
        self.reopen()
        if not compares:
            _log.warning("nothing compares answers: similar prompts are all computed, and nothing is learnt from them")

    def reopen(self) -> None:
        """Forget the checks so far, and tell again; without a comparer it stays shut."""
        self._checked = self._wrong = 0
        self.shut = not self._compares
        """Whether nothing is told."""
        self._metrics.similar_open.set(not self.shut)
        self._metrics.similar_shut.set(0)
        self._show(0.0, 1.0)

    def tells(self, wrong: float) -> bool:
        """Whether an answer is told that is wrong with this probability."""
        return not self.shut and wrong <= self._bound

    def count(self, right: bool) -> None:
        """An answer that was told was checked."""
        self._checked += 1
        self._wrong += not right
        lower, upper = ends_at_all_times(self._wrong, self._checked)
        self._show(lower, upper)
        if lower > self._bound and not self.shut:
            self.shut = True
            self._metrics.similar_open.set(0)
            self._metrics.similar_shut.set(1)
            _log.error(
                "similar prompts are computed from now on: of %d answers that were told to them and checked, %d were"
                " wrong, which is at least %.1f %% (95 %%), and the bound is %.1f %%; SIGUSR1 opens it again, and"
                " so does a restart",
                self._checked,
                self._wrong,
                100 * lower,
                100 * self._bound,
            )

    def _show(self, lower: float, upper: float) -> None:
        share = self._wrong / self._checked if self._checked else 0.0
        for end, value in (("lower", lower), ("counted", share), ("upper", upper)):
            self._metrics.similar_disagreement.labels(end).set(value)
