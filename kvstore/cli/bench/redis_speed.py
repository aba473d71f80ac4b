"""Measures how fast the Redis tier stores and loads pages, in turns with a bare client of the same server."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from kvstore.cli.bench.redis_baseline import BareClient
from kvstore.cli.bench.timing import ProcessorCaches, seconds_of
from kvstore.errors import UnavailableError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format.chunk import CHUNK_BYTES
from kvstore.tiers.tier import PageBytes, PageWrite

CALL_BYTES = 32 << 20
"""What one call moves."""
LOOKED_UP_PAGES = 512
_LOOKUPS = 20
_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor time of a round, all threads; medians over rounds."""

    client_ms: float
    server_ms: float


@dataclass(frozen=True, slots=True)
class _Took:
    """One part of one turn, in seconds."""

    wall: float
    client: float
    server: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over rounds; a ratio is the bare client's time over the tier's."""

    way: str
    page_bytes: int
    store_gbps: float
    bare_store_gbps: float
    store_of_bare: float
    load_gbps: float
    bare_load_gbps: float
    load_of_bare: float
    lookup_ms: float
    """For 512 pages, or all of them."""
    store_cpu: Cpu
    bare_store_cpu: Cpu
    load_cpu: Cpu
    bare_load_cpu: Cpu


def measure(
    url: str, page_bytes: int, size: int, rounds: int, progress: Callable[[int], None] = lambda steps: None
) -> Speed:
    """Store and load the same bytes through a tier and by a bare client, in turns; the first round is not counted.

    Args:
        url: of one server. What is written there is deleted again.
        page_bytes: size of a page.
        size: bytes a round; a multiple of a page's are used.
        rounds: how many.
        progress: told of each round.

    Raises:
        ConfigError: the URL can't be used.
        UnavailableError: the server does not take everything.
    """
    bare = BareClient(url)
    tier = RedisTier(url, max(8 << 30, 4 * size), timeout=_TIMEOUT, lookup_timeout=_TIMEOUT)
    try:
        return _Bench(tier, bare, page_bytes, size).run(url.partition(":")[0], rounds, progress)
    finally:
        tier.close()
        bare.clear()
        bare.close()


class _Bench:
    """What both sides move."""

    def __init__(self, tier: RedisTier, bare: BareClient, page_bytes: int, size: int) -> None:
        self.tier, self.bare = tier, bare
        self.page_bytes = page_bytes
        self.pages = max(1, size // page_bytes)
        self.size = self.pages * page_bytes
        self.value_bytes = max(page_bytes, CHUNK_BYTES // page_bytes * page_bytes)
        self.data: PageBytes = np.random.default_rng(page_bytes).integers(0, 256, self.size, np.uint8)
        self.target = np.zeros_like(self.data)
        self.sums = [xxhash.xxh3_64_intdigest(page.data) for page in _cut(self.data, page_bytes)]
        self.values = [value.data for value in _cut(self.data, self.value_bytes)]
        self.places = [value.data for value in _cut(self.target, self.value_bytes)]
        run = os.urandom(16)
        self.names = [b"kvstore-bench:%b:%d" % (run.hex().encode(), number) for number in range(len(self.values))]
        self.namespace = run * 2
        self.caches = ProcessorCaches()

    def run(self, way: str, rounds: int, progress: Callable[[int], None]) -> Speed:
        """All rounds."""
        ours: list[tuple[_Took, _Took]] = []
        theirs: list[tuple[_Took, _Took]] = []
        lookups: list[float] = []
        for number in range(rounds + 1):
            if number % 2:  # neither side always finds a fresh server
                bare_times = self.bare_turn()
                times, looked = self.tier_turn(number)
            else:
                times, looked = self.tier_turn(number)
                bare_times = self.bare_turn()
            if number:
                ours.append(times)
                theirs.append(bare_times)
                lookups.append(looked)
            progress(1)
        sides = [[[took[at] for took in side] for at in range(2)] for side in (ours, theirs)]
        speeds = [
            [self.size / statistics.median(took.wall for took in part) / 1e9 for part in parts] for parts in sides
        ]
        cpus = [[_cpu(part) for part in parts] for parts in sides]
        ratios = [
            statistics.median(bare[at].wall / own[at].wall for own, bare in zip(ours, theirs, strict=True))
            for at in range(2)
        ]
        return Speed(
            way,
            self.page_bytes,
            round(speeds[0][0], 3),
            round(speeds[1][0], 3),
            round(ratios[0], 3),
            round(speeds[0][1], 3),
            round(speeds[1][1], 3),
            round(ratios[1], 3),
            round(statistics.median(lookups) * 1e3, 3),
            cpus[0][0],
            cpus[1][0],
            cpus[0][1],
            cpus[1][1],
        )

    def bare_turn(self) -> tuple[_Took, _Took]:
        """What it took to store, and to load."""
        step = max(1, CALL_BYTES // self.value_bytes)
        try:
            stored = self.timed(partial(_in_calls, self.bare.store, step, self.names, self.values))
            loaded = self.timed(partial(_in_calls, self.bare.load, step, self.names, self.places))
            self.check(len(self.names) * self.value_bytes)
        finally:
            self.bare.remove(self.names)
        return stored, loaded

    def tier_turn(self, number: int) -> tuple[tuple[_Took, _Took], float]:
        """What it took to store and to load, and seconds to look up."""
        keys = [self.namespace + (number * self.pages + page).to_bytes(32, "big") for page in range(self.pages)]
        writes = [PageWrite(*page) for page in zip(keys, self.sums, _cut(self.data, self.page_bytes), strict=True)]
        step = max(1, CALL_BYTES // self.page_bytes)

        def store(some: list[PageWrite]) -> None:
            if not all(self.tier.write(some)):
                raise UnavailableError("Redis does not take what is stored; has it room for it?")

        def load(some: list[bytes], into: list[PageBytes]) -> None:
            if None in self.tier.read(some, into):
                raise UnavailableError("what was stored is not in Redis any more")

        try:
            stored = self.timed(partial(_in_calls, store, step, writes))
            loaded = self.timed(partial(_in_calls, load, step, keys, _cut(self.target, self.page_bytes)))
            self.check(self.size)
            asked = keys[:LOOKED_UP_PAGES]
            looked = [seconds_of(partial(self.tier.contains, asked)) for _ in range(_LOOKUPS)]
        finally:
            self.tier.remove(keys)
        return (stored, loaded), statistics.median(looked)

    def timed(self, call: Callable[[], object]) -> _Took:
        """What a call takes; what was moved before is not in the processor's caches any more."""
        self.caches.sweep()
        server, client = self.bare.server_cpu_seconds(), time.process_time()
        wall = seconds_of(call)
        return _Took(wall, time.process_time() - client, self.bare.server_cpu_seconds() - server)

    def check(self, size: int) -> None:
        """Compare what came, and wipe it."""
        if not np.array_equal(self.target[:size], self.data[:size]):
            raise UnavailableError("what came back is not what was stored")
        self.target[:] = 0


def _cpu(part: Sequence[_Took]) -> Cpu:
    return Cpu(
        round(statistics.median(took.client for took in part) * 1e3, 1),
        round(statistics.median(took.server for took in part) * 1e3, 1),
    )


def _cut(array: PageBytes, size: int) -> list[PageBytes]:
    return [array[at : at + size] for at in range(0, len(array) // size * size, size)]


def _in_calls(call: Callable[..., object], items: int, *lists: Sequence[object]) -> None:
    """Give a function the same parts of some lists, so many items at a time."""
    for at in range(0, len(lists[0]), items):
        call(*(some[at : at + items] for some in lists))
