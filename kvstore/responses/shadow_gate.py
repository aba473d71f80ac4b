"""Whether similar prompts are answered at all: shut without a comparer, and when checks find too many wrong answers."""

from __future__ import annotations

import logging

from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.semantic.interval import lower_end

_log = logging.getLogger("kvstore.responses")


class ShadowGate:
    """Safe for one thread at a time.

    Args:
        metrics: where it says whether it is open.
        compares: whether anything compares answers; without, it is shut.
        bound: on the share of wrong answers among those told to similar prompts, from 0 to 1.
    """

    def __init__(self, metrics: ResponseMetrics, compares: bool, bound: float) -> None:
        self._metrics = metrics
        self._bound = bound
        self._checked = self._wrong = 0
        self.shut = not compares
        """Whether nothing is told."""
        metrics.similar_open.set(compares)
        if not compares:
            _log.warning("nothing compares answers: similar prompts are all computed, and nothing is learnt from them")

    def tells(self, wrong: float) -> bool:
        """Whether an answer is told that is wrong with this probability."""
        return not self.shut and wrong <= self._bound

    def count(self, right: bool) -> None:
        """An answer that was told was checked."""
        self._checked += 1
        self._wrong += not right
        at_least = lower_end(self._wrong, self._checked)
        if at_least > self._bound and not self.shut:
            self.shut = True
            self._metrics.similar_open.set(0)
            _log.error(
                "similar prompts are computed from now on: of %d answers that were told to them and checked, %d were"
                " wrong, which is at least %.1f %% (95 %%), and the bound is %.1f %%; a restart opens it again",
                self._checked,
                self._wrong,
                100 * at_least,
                100 * self._bound,
            )
