"""How long another Python thread stands still while 64 MiB are copied: by a bare `ctypes.memmove`, by loads, by stores.

The other thread does nothing but look at the clock; each time that two looks lie apart is a stall. Told are the longest
stall of a copy, as median and as the 99th percentile over copies, and the time that the copies took. The node is a
process of its own; the three take turns. `idle` is the same for a thread that merely waits as long: what the machine
itself does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

import kvstore
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.node_process import serving
from kvstore.cli.bench.timing import percentile

PAGE_BYTES = 2 << 20
PAGES = 32
SIZE = PAGES * PAGE_BYTES


class Watcher:
    """A thread that looks at the clock."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def during(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds of the longest stall during some work, and of the work."""
        time.sleep(0.001)  # the thread runs
        self._worst = 0.0
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        time.sleep(0.001)  # a stall that has not ended is seen
        return self._worst, took

    def end(self) -> None:
        """Stop it."""
        self._ended = True
        self._thread.join()

    def _look(self) -> None:
        last = time.perf_counter()
        while not self._ended:
            now = time.perf_counter()
            self._worst = max(self._worst, now - last)
            last = now


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """By what was done: p50 and p99 of the longest stall, and the median time, in milliseconds."""
    source = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    target = np.zeros_like(source)
    results: dict[str, list[tuple[float, float]]] = {}
    with serving(6 * SIZE) as url, kvstore.connect(url, timeout=30.0) as client:
        pages = client.namespace(kvstore.Layout(model="stall", block_size=16, page_bytes=PAGE_BYTES))
        watcher = Watcher()
        for number in range(-2, rounds):
            hashes = [number.to_bytes(8, "big", signed=True) + page.to_bytes(24, "big") for page in range(PAGES)]
            works: dict[str, Callable[[], object]] = {
                "memmove": lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, SIZE),
                "store": lambda hashes=hashes: pages.store(hashes, source),
                "load": lambda hashes=hashes: pages.load(hashes, target),
                "idle": lambda: time.sleep(0.01),
            }
            for name, work in works.items():
                found = watcher.during(work)
                if number >= 0:
                    results.setdefault(name, []).append(found)
        watcher.end()
        if not np.array_equal(source, target):
            raise SystemExit("what came back is not what was stored")
    return {
        name: {
            "stall_p50_ms": percentile([stall * 1e3 for stall, _ in found], 50),
            "stall_p99_ms": percentile([stall * 1e3 for stall, _ in found], 99),
            "time_ms": percentile([took * 1e3 for _, took in found], 50),
        }
        for name, found in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="copies of each kind (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be 1 at least")
    machine = this_machine()
    figures = measure(options.rounds)
    if options.json:
        print(json.dumps({"machine": asdict(machine), "stall": figures}, indent=2))
        return
    print(machine.line())
    print(f"{'':8}  longest stall, ms: p50      p99   took, ms")
    for name, row in figures.items():
        print(f"{name:8}  {row['stall_p50_ms']:22.2f} {row['stall_p99_ms']:8.2f} {row['time_ms']:10.1f}")


if __name__ == "__main__":
    main()
