"""Ranks copy strategies by how fast they are on this machine: timed at start, in turns, by their medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

ROUNDS = 5
"""Counted rounds of a measurement, behind one that only warms up."""


def ranking(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Names, the fastest first, by the median of their timings; equally fast ones in the order given.

    One without timings was not measured, and is left out.
    """
    medians = {name: statistics.median(times) for name, times in seconds.items() if times}
    return sorted(medians, key=lambda name: medians[name])


def measure(
    calls: Mapping[str, Callable[[], None]],
    *,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds that each call took, all in turn in each round, so that what disturbs the machine disturbs all of them.

    Args:
        calls: each returns when its work is done.
        rounds: counted; one more comes before them, for what is made at the first call.
        clock: seconds, monotonic.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-1, rounds):
        for name, call in calls.items():
            start = clock()
            call()
            if number >= 0:
                seconds[name].append(clock() - start)
    return seconds
