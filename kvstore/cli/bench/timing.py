"""Time as benchmarks take it: of one call, with the processor's caches swept before, and percentiles of many."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

SWEPT_BYTES = 128 << 20
"""More than a processor's caches hold."""


class ProcessorCaches:
    """The caches of this machine's processor, to be swept between calls."""

    def __init__(self) -> None:
        self._others = np.zeros(SWEPT_BYTES, np.uint8)

    def sweep(self) -> None:
        """Nothing that was moved before is in them any more."""
        self._others += 1


def seconds_of(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that this percentage of ``values`` is at most."""
    return float(np.percentile(values, percent))
