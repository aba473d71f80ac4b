"""Exact intervals of a share that was counted, after Clopper and Pearson. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable

_STEPS = 60


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
    return math.fsum(
        math.exp(
            math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
            + k * math.log(share) + (of - k) * math.log1p(-share)
        )
        for k in range(wrong + 1)
    )  # fmt: skip
