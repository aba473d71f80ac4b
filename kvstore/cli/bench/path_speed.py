"""Measures how fast pages move by one path, in turns with what bounds it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.cli.bench.path_baselines import PATHS, Ends, Side
from kvstore.cli.bench.timing import ProcessorCaches, percentile, seconds_of
from kvstore.errors import ResourceError

Bytes = npt.NDArray[np.uint8]
TURN_BYTES = 32 << 20
"""What one side moves in its turn, by one call or more."""
MOST_CALLS = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over rounds; a ratio is the limit's time over ours, in the same round."""

    path: str
    work: str
    """``"store"`` or ``"load"``."""
    page_bytes: int
    pages: int
    """A call."""
    gbps: float
    limit: str
    limit_gbps: float
    of_limit: float
    p50_ms: float
    """Of a call."""
    p99_ms: float
    cpu_s_per_gb: float
    """Processor time of both processes."""
    limit_cpu_s_per_gb: float


@dataclass(slots=True)
class _Turn:
    """What one side did in its turn."""

    seconds: float
    calls: list[float]
    cpu: float


class _Bench:
    """One path with one page size, beside its limit."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self.pages = pages
        self.calls = max(1, min(MOST_CALLS, TURN_BYTES // (page_bytes * pages)))
        self.data = np.random.default_rng(page_bytes).integers(0, 256, (self.calls, pages * page_bytes), np.uint8)
        self.target = np.ones_like(self.data)
        self.caches = ProcessorCaches()

    def hashes(self, turn: int) -> list[list[bytes]]:
        """For each call of a turn the names of its pages, new ones each time."""
        run = os.urandom(8)
        numbers = range(self.calls * self.pages)
        every = [run + turn.to_bytes(8, "big", signed=True) + number.to_bytes(16, "big") for number in numbers]
        return [every[call * self.pages : (call + 1) * self.pages] for call in range(self.calls)]

    def turn(self, side: Side, work: Callable[[int], None]) -> _Turn:
        """Do one side's calls; what was moved before is not in the processor's caches any more."""
        self.caches.sweep()
        before = cpu_seconds(side.pid)
        calls = [seconds_of(partial(work, call)) for call in range(self.calls)]
        return _Turn(sum(calls), calls, cpu_seconds(side.pid) - before)

    def both(self, side: Side, number: int) -> tuple[_Turn, _Turn]:
        """Store and load by one side, and compare."""
        hashes = self.hashes(number)
        size = self.data.shape[1]

        def store(call: int) -> None:
            side.store(hashes[call], call * size, self.data[call])

        def load(call: int) -> None:
            side.load(hashes[call], call * size, self.target[call])

        stored, loaded = self.turn(side, store), self.turn(side, load)
        if not np.array_equal(self.target, self.data):
            raise ResourceError("what came back is not what was stored")
        self.target[:] = 0
        for each in hashes:
            side.forget(each)
        return stored, loaded


def measure(
    path: str,
    ends: Ends,
    page_bytes: int,
    pages: int,
    rounds: int,
    progress: Callable[[int], None] = lambda steps: None,
) -> list[Speed]:
    """Stores and loads of so many pages a call, each side in turn; the first two rounds only warm up.

    Raises:
        ResourceError: the node did not take, or give back, everything.
    """
    bench = _Bench(page_bytes, pages)
    limit_name, pair = PATHS[path]
    ours: list[tuple[_Turn, _Turn]] = []
    limits: list[tuple[_Turn, _Turn]] = []
    with ExitStack() as stack:
        layout = kvstore.Layout(model=f"bench-{path}-{page_bytes}", block_size=16, page_bytes=page_bytes)
        own, limit = pair(stack, ends, layout)
        for number in range(-2, rounds):
            turns = [partial(bench.both, own, number), partial(bench.both, limit, number)]
            order = 1 if number % 2 else -1  # neither side always comes behind the other
            done = [turn() for turn in turns[::order]][::order]
            if number >= 0:
                ours.append(done[0])
                limits.append(done[1])
            progress(1)
    size = bench.data.nbytes / 1e9
    return [
        _speed(path, work, page_bytes, pages, size, limit_name, [one[at] for one in ours], [one[at] for one in limits])
        for at, work in enumerate(("store", "load"))
    ]


def _speed(
    path: str,
    work: str,
    page_bytes: int,
    pages: int,
    gigabytes: float,
    limit_name: str,
    ours: list[_Turn],
    limits: list[_Turn],
) -> Speed:
    calls = [call * 1e3 for turn in ours for call in turn.calls]

    def median(turns: list[_Turn]) -> float:
        return statistics.median(turn.seconds for turn in turns)

    return Speed(
        path=path,
        work=work,
        page_bytes=page_bytes,
        pages=pages,
        gbps=round(gigabytes / median(ours), 3),
        limit=limit_name,
        limit_gbps=round(gigabytes / median(limits), 3),
        of_limit=round(
            statistics.median(limit.seconds / own.seconds for own, limit in zip(ours, limits, strict=True)), 3
        ),
        p50_ms=round(percentile(calls, 50), 3),
        p99_ms=round(percentile(calls, 99), 3),
        cpu_s_per_gb=round(statistics.median(turn.cpu for turn in ours) / gigabytes, 3),
        limit_cpu_s_per_gb=round(statistics.median(turn.cpu for turn in limits) / gigabytes, 3),
    )


def cpu_seconds(pid: int, *, own: bool = True) -> float:
    """Processor time of another process, and of this one unless ``own`` is False, all threads, to the nanosecond."""
    other = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            other += int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has just ended
            continue
    return (time.process_time() if own else 0.0) + other / 1e9
