"""Latencies in the console's history: the buckets of each histogram as columns, and quantiles between two samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from kvstore.service.call_times import CALL_BOUNDS
from kvstore.service.http.quantiles import quantile
from kvstore.tiers.latencies import BOUNDS, Latencies

CALLS: Mapping[str, tuple[str, ...]] = {
    "lookup": ("Cache/Lookup", "Local/Lookup"),
    "load": ("Cache/PrepareLoad", "Local/PrepareLoad", "Bulk/Load", "Pages/Load"),
    "store": ("Cache/PrepareStore", "Local/PrepareStore", "Bulk/Reserve", "Bulk/Put", "Pages/Store"),
}
"""What an engine waits for → the methods by which it is asked. What ends a load or a store is not among them: it says
that something is over, and would halve the median."""
_TIERS = tuple(
    f"{tier} {operation}" for tier in ("disk", "redis", "objects") for operation in ("read", "write", "lookup")
)
_BOUNDS: Mapping[str, Sequence[float]] = dict.fromkeys(CALLS, CALL_BOUNDS) | dict.fromkeys(_TIERS, BOUNDS)
BUCKETS = tuple(f"{name} {place}" for name, bounds in _BOUNDS.items() for place in range(len(bounds) + 1))
"""The columns: calls so far in each bucket."""
QUANTILES = {"p50": 0.5, "p99": 0.99}
COLUMNS = tuple(f"{name}_{which}" for name in CALLS for which in QUANTILES)
"""Of the calls between a sample and the one before, in seconds, for charts. Beyond the last bound: that."""


def buckets_of(calls: Mapping[str, Sequence[int]], tiers: Iterable[Latencies]) -> dict[str, float]:
    """The values of ``BUCKETS``, as far as there are any.

    Args:
        calls: by method, as :meth:`kvstore.service.call_times.CallTimes.counts` gives them.
        tiers: of the lower tiers' calls.
    """
    counts = {f"{each.tier} {each.operation}": each.counts for each in tiers}
    for name, methods in CALLS.items():
        counted = [calls[method] for method in methods if method in calls]
        counts[name] = tuple(map(sum, zip(*counted, strict=True))) if counted else (0,) * (len(CALL_BOUNDS) + 1)
    return {
        f"{name} {place}": float(count)
        for name in _BOUNDS
        for place, count in enumerate(counts.get(name, (0,) * (len(_BOUNDS[name]) + 1)))
    }


def latencies_between(before: Mapping[str, float], after: Mapping[str, float]) -> list[dict[str, object]]:
    """For each kind of call with calls between two samples: how many, and the quantiles in seconds; None: more than
    ``most``."""
    told = []
    for name, bounds in _BOUNDS.items():
        counts = _increase(name, before, after)
        if sum(counts) <= 0:
            continue
        row: dict[str, object] = {"name": name, "calls": round(sum(counts)), "most": bounds[-1]}
        for which, share in QUANTILES.items():
            seconds = quantile(bounds, counts, share)
            row[which] = seconds if math.isfinite(seconds) else None
        told.append(row)
    return told


def quantiles_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The values of ``COLUMNS``, as far as there were calls between two samples."""
    quantiles = {}
    for name in CALLS:
        counts = _increase(name, before, after)
        if sum(counts) > 0:
            for which, share in QUANTILES.items():
                quantiles[f"{name}_{which}"] = min(quantile(CALL_BOUNDS, counts, share), CALL_BOUNDS[-1])
    return quantiles


def _increase(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> list[float]:
    columns = [f"{name} {place}" for place in range(len(_BOUNDS[name]) + 1)]
    return [max(0.0, after[column] - before[column]) for column in columns]
