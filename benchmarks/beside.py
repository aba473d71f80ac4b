"""Stores and loads from one thread beside another thread of the process that computes: what sharing the GIL costs.

An engine's connector stores and loads beside the engine's own Python. Each time that a call releases the GIL, to copy
or to wait, it gets it back when the other thread lets go: at its next call that releases it, or after the switch
interval (`--interval`). Companions: `python` computes in Python alone; `torch-small` and `torch-big` in products of
small and big matrices; `half` in Python for 2 ms, then sleeps for 2; `mixed-N` in Python for N microseconds before each
small product.

Told are medians of a call, alone and beside, and its hand-overs: how often the thread slept during the call (voluntary
context switches), whether for the GIL, for the node or for the kernel. What comes on top beside a companion is the
GIL's. The node is a process of its own, and its arena is full, so that stores evict.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt
import torch

import kvstore
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.node_process import serving
from kvstore.cli.bench.timing import percentile

Bytes = npt.NDArray[np.uint8]
SHAPES = ((8, 2 << 20), (64, 512 << 10))
"""Pages a call, and their bytes."""


class Companion:
    """A thread that computes until it is told to stop. ``work`` does a little of it, again and again."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()
        self._began.wait()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._work()
            self._began.set()


def compute_for(seconds: float) -> None:
    """Python alone."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def compute() -> None:
    total = 0
    for number in range(200):
        total += number


def product(size: int) -> Callable[[], object]:
    matrix = torch.randn(size, size)
    return lambda: torch.mm(matrix, matrix)


def half() -> None:
    compute_for(0.002)
    time.sleep(0.002)


def mixed(micros: int) -> Callable[[], object]:
    small = product(64)

    def work() -> None:
        compute_for(micros * 1e-6)
        small()

    return work


COMPANIONS: Mapping[str, Callable[[], Callable[[], object]]] = {
    "python": lambda: compute,
    "torch-small": lambda: product(64),
    "torch-big": lambda: product(512),
    "half": lambda: half,
    "mixed-20": lambda: mixed(20),
    "mixed-100": lambda: mixed(100),
    "mixed-1000": lambda: mixed(1000),
}


@dataclass(frozen=True)
class Calls:
    """What the calls of one kind took, and how often the thread slept in each."""

    seconds: list[float] = field(default_factory=list)
    handovers: list[float] = field(default_factory=list)

    def time(self, call: Callable[[], int], wanted: int) -> None:
        """Make one call that has to answer ``wanted``."""
        slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        start = time.perf_counter()
        found = call()
        self.seconds.append(time.perf_counter() - start)
        self.handovers.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - slept)
        if found != wanted:
            raise SystemExit(f"a call moved {found} of {wanted} pages")


class Pages:
    """Stores pages of one size under ever new hashes, and loads them."""

    def __init__(self, client: kvstore.Client, pages: int, page_bytes: int, *, as_list: bool) -> None:
        layout = kvstore.Layout(model=f"beside-{page_bytes}-{as_list}", block_size=16, page_bytes=page_bytes)
        self._namespace = client.namespace(layout)
        self._source, self._target = np.ones(pages * page_bytes, np.uint8), np.zeros(pages * page_bytes, np.uint8)
        self._pages, self._number = pages, 0
        self._from: Bytes | list[Bytes] = self._source
        self._to: Bytes | list[Bytes] = self._target
        if as_list:
            self._from, self._to = np.split(self._source, pages), np.split(self._target, pages)

    def fill(self, size: int) -> None:
        """Store so many bytes."""
        for _ in range(size // self._source.nbytes + 4):
            self._namespace.store(self._new_hashes(), self._from)

    def measure(self, seconds: float) -> dict[str, Calls]:
        """Store and load in turns for so long, at least once."""
        found = {"store": Calls(), "load": Calls()}
        end = time.perf_counter() + seconds
        while True:
            hashes = self._new_hashes()
            found["store"].time(lambda hashes=hashes: self._namespace.store(hashes, self._from).stored, self._pages)
            found["load"].time(lambda hashes=hashes: self._namespace.load(hashes, self._to), self._pages)
            if time.perf_counter() >= end:
                break
        if not np.array_equal(self._source, self._target):
            raise SystemExit("what came back is not what was stored")
        return found

    def _new_hashes(self) -> list[bytes]:
        self._number += 1
        return [self._number.to_bytes(8, "big") + page.to_bytes(24, "big") for page in range(self._pages)]


@dataclass(frozen=True)
class Row:
    """Medians of one kind of call."""

    companion: str
    call: str
    pages: int
    page_bytes: int
    as_list: bool
    """Pages are a list of arrays, and not one."""
    alone_ms: float
    beside_ms: float
    alone_handovers: float
    """A call, on average."""
    beside_handovers: float
    calls: int
    """Made beside the companion."""


@contextmanager
def switching(milliseconds: float) -> Iterator[None]:
    """The interpreter's switch interval is this one."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(milliseconds / 1e3)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def measure(
    companions: Sequence[str], shapes: Sequence[tuple[int, int]], interval: float, seconds: float, arena: int
) -> list[Row]:
    """Every companion with every shape, pages as one array and as a list of arrays."""
    rows = []
    for count, page_bytes in shapes:
        for as_list in (False, True):
            with serving(arena) as url, kvstore.connect(url, timeout=60.0) as client:
                pages = Pages(client, count, page_bytes, as_list=as_list)
                pages.fill(arena)
                for name in companions:
                    with switching(interval):
                        alone = pages.measure(seconds)
                        with Companion(COMPANIONS[name]()):
                            beside = pages.measure(seconds)
                    rows += [
                        Row(
                            name,
                            call,
                            count,
                            page_bytes,
                            as_list,
                            1e3 * percentile(alone[call].seconds, 50),
                            1e3 * percentile(beside[call].seconds, 50),
                            float(np.mean(alone[call].handovers)),
                            float(np.mean(beside[call].handovers)),
                            len(beside[call].seconds),
                        )
                        for call in alone
                    ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("companions", nargs="*", metavar="COMPANION", help=f"of {', '.join(COMPANIONS)} (default: all)")
    parser.add_argument("--interval", type=float, default=5.0, help="switch interval, ms (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement (default: %(default)s)")
    parser.add_argument("--pages", type=int, help="pages a call, with --page-bytes (default: 8 and 64)")
    parser.add_argument("--page-bytes", type=int, help="bytes a page (default: 2 MiB and 512 KiB)")
    parser.add_argument("--arena", type=int, default=400 << 20, help="bytes of the node's arena (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if unknown := [name for name in options.companions if name not in COMPANIONS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(COMPANIONS)}")
    if (options.pages is None) != (options.page_bytes is None):
        parser.error("--pages goes with --page-bytes")
    if options.interval <= 0:
        parser.error("--interval must be more than 0")
    shapes = SHAPES if options.pages is None else ((options.pages, options.page_bytes),)
    torch.set_num_threads(1)
    machine = this_machine()
    rows = measure(options.companions or list(COMPANIONS), shapes, options.interval, options.seconds, options.arena)
    if options.json:
        found = {"machine": asdict(machine), "interval_ms": options.interval, "rows": [asdict(row) for row in rows]}
        print(json.dumps(found, indent=2))
        return
    print(f"{machine.line()}, torch {torch.__version__}; switch interval {options.interval} ms")
    print(f"{'':46}ms alone   beside   hand-overs alone   beside")
    for row in rows:
        form = "list" if row.as_list else "array"
        what = f"{row.companion:12}{row.call:6}{row.pages:3} x {row.page_bytes >> 10:5} KiB, {form}"
        print(
            f"{what:44}{row.alone_ms:10.2f}{row.beside_ms:9.2f}{row.alone_handovers:19.1f}{row.beside_handovers:9.1f}"
        )


if __name__ == "__main__":
    main()
