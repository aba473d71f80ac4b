"""Times copy strategies at start, in turns: one that is much slower on this machine than another one is not used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

ROUNDS = 5
"""Counted rounds of a measurement, behind one that only warms up."""


MUCH_SLOWER = 3.0
"""Times as long as the fastest one takes. Less than that may be the moment, or what else the machine does."""


def much_slower(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Those that take much longer than the fastest one, by the medians of their timings: times as long."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = min(medians.values(), default=0.0)
    return {name: median / fastest for name, median in medians.items() if median > MUCH_SLOWER * fastest}


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
