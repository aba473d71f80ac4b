"""Quantiles of durations, estimated from how many fell into each bucket of a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float:
    """The duration that ``share`` of all durations do not exceed, interpolated within its bucket.

    Args:
        bounds: upper bounds of the buckets in seconds, ascending.
        counts: durations in each bucket; one more has those beyond the last bound.
        share: above 0 and below 1.

    Returns:
        Seconds. NaN without any duration, infinity where it lies beyond the last bound.
    """
    rank = share * sum(counts)
    if rank <= 0:
        return math.nan
    below, lower = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, bound
    return math.inf
