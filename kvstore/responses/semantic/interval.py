"""Intervals of a share that was counted: exact ones after Clopper and Pearson, for one look; and ones for a look after
each count. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import lgamma, log, log1p

import numpy as np

_STEPS = 40
_MIXED = (1.0, 19.0)
"""The beta distribution."""
_TINY = 1e-12


@lru_cache(8192)
def upper_end(wrong: int, of: int, confidence: float = 0.95) -> float:
    """The largest share with which so few would still be seen in 1 - ``confidence`` of all cases (one side).

    Args:
        wrong: how many were.
        of: how many were looked at; 0: nothing is known, and 1.0 comes back.
        confidence: of the statement.
    """
    if wrong >= of:
        return 1.0
    return _share(lambda share: _at_most(wrong, of, share) > 1 - confidence)


@lru_cache(1024)
def ends_at_all_times(wrong: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """The lower and the upper end of an interval that may be looked at after each count: with this confidence, the true
    share is never outside, at no time. An exact interval that is looked at again and again leaves it sooner or later.

    After Robbins (1970): a share is outside once what was counted is 1 / (1 - ``confidence``) times as likely under a
    mixture of shares (a beta distribution with its mean at 5 %) as it is under this share. By Ville's inequality that
    never happens to the true one, but for 1 - ``confidence`` of all cases.

    Args:
        wrong: how many were.
        of: how many were looked at.
        confidence: of the statement.
    """
    right = of - wrong
    mixture = _log_beta(_MIXED[0] + wrong, _MIXED[1] + right) - _log_beta(*_MIXED)
    least = mixture + log(1 - confidence)

    def is_outside(share: float) -> bool:
        likely = (wrong * log(share) if wrong else 0.0) + (right * log1p(-share) if right else 0.0)
        return likely < least

    middle = min(max(wrong / of if of else 0.5, _TINY), 1 - _TINY)
    lower = 0.0 if not wrong else _edge(is_outside, 0.0, middle)
    upper = 1.0 if not right else _edge(is_outside, 1.0, middle)
    return lower, upper


def _edge(is_outside: Callable[[float], bool], outside: float, inside: float) -> float:
    for _ in range(_STEPS):
        between = (outside + inside) / 2
        if is_outside(between):
            outside = between
        else:
            inside = between
    return outside


def _log_beta(one: float, other: float) -> float:
    return lgamma(one) + lgamma(other) - lgamma(one + other)


def _share(is_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _at_most(wrong: int, of: int, share: float) -> float:
    """The probability of that many or fewer."""
    if share <= 0:
        return 1.0
    if share >= 1:
        return 0.0
    counts = np.arange(wrong + 1)
    return float(np.exp(_ways(wrong, of) + counts * np.log(share) + (of - counts) * np.log1p(-share)).sum())


def _ways(wrong: int, of: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Logarithms of how many ways there are to choose 0, 1, ... ``wrong``. [wrong + 1]"""
    return np.array([lgamma(of + 1) - lgamma(k + 1) - lgamma(of - k + 1) for k in range(wrong + 1)])
