"""Exact intervals of a share that was counted, after Clopper and Pearson. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import lgamma

import numpy as np

_STEPS = 40


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


@lru_cache(8192)
def lower_end(wrong: int, of: int, confidence: float = 0.95) -> float:
    """The smallest share with which so many would still be seen in 1 - ``confidence`` of all cases (one side)."""
    if wrong <= 0 or of <= 0:
        return 0.0
    return _share(lambda share: 1 - _at_most(wrong - 1, of, share) < 1 - confidence)


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
