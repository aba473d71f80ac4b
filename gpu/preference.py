"""Which copy strategy goes first: a rule by direction, length of the runs and how many there are, and its reasons.

It is a rule and not a measurement, since a measurement at start sees neither a busy device nor the other sizes of
batches, and is another one each time. The figures are those of vLLM, tuned on an H100 on PCIe 5.0. What was measured
here at start (:mod:`kvstore.gpu.tuning`) is a veto.
"""

from __future__ import annotations

SHORT_RUN = 28 << 10
"""Bytes below which the copy engine is slow on the way in: 5 to 7 GB/s in long lists of shorter copies, and 40 to 50
from this length on."""

MANY_RUNS = 16
"""A kernel pays off from so many short runs on: to launch it takes as long as the copy engine takes for a few."""

LONG_RUN = 256 << 10
"""Bytes that a bus carries in about the 5 µs in which the host queues a single copy: longer runs keep it busy one by
one, shorter ones leave it waiting."""


def preference(direction: str, run_bytes: int, runs: int) -> tuple[str, ...]:
    """Names of all copy strategies, in the order in which they are to be used where a machine has them.

    - Out (``"gather"``), always the copy engine: nobody waits for a store, and a kernel would take multiprocessors from
      the engine's steps for as long as the bus needs. First by one call (``batch``), which costs the host least. Then
      ``staged``, whose kernels are short, as they only move what is on the device; long runs go one by one before that.
    - In (``"scatter"``), the same, since a load must not slow the steps of other requests, but for many short runs: the
      ``kernel`` first, then ``staged``, which crosses the bus in whole pages, and only then one call.

    Args:
        direction: ``"gather"`` or ``"scatter"``.
        run_bytes: bytes a run.
        runs: how many runs are queued at once.
    """
    if direction == "scatter" and run_bytes < SHORT_RUN and runs >= MANY_RUNS:
        return "kernel", "staged", "batch", "run by run"
    if run_bytes >= LONG_RUN:
        return "batch", "run by run", "staged", "kernel"
    return "batch", "staged", "run by run", "kernel"
