"""Stores and first passes as users have them: a node as `kvstore serve` starts it, its arena full, a disk behind it.

A *burst* is 2 GiB of new pages into an arena of 512 MiB, so that each store makes others leave, and the disk is written
meanwhile. Beside each burst stand, in the same round: `memcpy`, copies of the same pages to shared memory that nothing
else uses; `best`, the same stores by a node with room and without a disk. `disk` is what the node wrote meanwhile, and
`plain` what the disk takes by plain O_DIRECT writes of 2 MiB; `overrun` are pages that left before the disk had them,
which is what a burst beyond the disk's speed costs: a store never waits for the disk.

*Paced* stores come as an engine's do, at 1 GB/s, one call after another at their times. *First pass* is a new process
that loads all that is in the arena, twice.

With `--mooncake-python` (`make mooncake`) the same bursts go into Mooncake's store, by a client that shares its memory.

Processor time is the node's, for each 10^9 bytes stored, until all is written that will be. Leave the machine to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.cli.bench.disk_speed import plain_write
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.path_baselines import Ends, KVStoreSide, ends
from kvstore.cli.bench.path_speed import cpu_seconds
from kvstore.cli.bench.timing import ProcessorCaches, percentile, seconds_of
from kvstore.cli.progress import Progress
from kvstore.hashing import HASH_BYTES
from kvstore.segments.aligned import aligned_empty

Bytes = npt.NDArray[np.uint8]
ARENA = 512 << 20
BURST = 2 << 30
SOURCE = 256 << 20
"""Where stores come from: more than the processor's caches hold."""
DISK_LIMIT = "8GiB"
SHAPES = ((1, 2 << 20), (8, 2 << 20), (64, 64 << 10))
"""Pages a call, and their bytes."""
PACE = 1e9
"""Bytes a second of paced stores."""
PACED_SECONDS = 2.0
PATIENCE = 60.0


@dataclass(frozen=True)
class Burst:
    """One shape of call; medians over rounds."""

    pages: int
    page_bytes: int
    gbps: float
    memcpy_gbps: float
    of_memcpy: float
    best_gbps: float
    p50_ms: float
    p99_ms: float
    node_cpu_s_per_gb: float
    disk_gbps: float
    plain_disk_gbps: float
    overrun: float
    """Of the pages stored, how many left before the disk had them."""


@dataclass(frozen=True)
class Paced:
    """Calls at their times."""

    pages: int
    page_bytes: int
    p50_ms: float
    p99_ms: float
    best_p50_ms: float
    ratio: float
    """Of the two medians."""


@dataclass(frozen=True)
class FirstPass:
    """Loads of 8 x 2 MiB of all that is in the arena, by a process that has just attached."""

    at_once_gbps: float
    """Begun with the attachment."""
    later_gbps: float
    """Begun half a second behind it."""
    second_gbps: float


@dataclass(frozen=True)
class Peer:
    """Mooncake's store with the same bursts; see `mooncake_peer.py`."""

    pages: int
    page_bytes: int
    gbps: float
    p50_ms: float
    refused: float
    """Of the pages, how many it did not take."""


def measure_peer(python: str, rounds: int) -> list[Peer]:
    """In an environment of its own."""
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    environment = os.environ | {"LD_LIBRARY_PATH": f"{packages.stdout.strip()}/nvidia/cuda_runtime/lib"}
    script = Path(__file__).parent / "mooncake_peer.py"
    flags = [f"--arena={ARENA}", f"--burst={BURST}", f"--rounds={rounds}"]
    command = [python, str(script), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script.name} failed: {(done.stderr.strip().splitlines() or ['it does not say why'])[-1]}")
    return [Peer(**row) for row in json.loads(done.stdout)]


def hashes_of(number: int, pages: int) -> list[bytes]:
    """Of the pages of one call. As block hashes are, any bits: counted up they would crowd a few buckets."""
    digest = hashlib.shake_128(number.to_bytes(8, "big")).digest(HASH_BYTES * pages)
    return [digest[at : at + HASH_BYTES] for at in range(0, len(digest), HASH_BYTES)]


class Node:
    """A node, and its pages of one shape."""

    def __init__(self, stack: ExitStack, node: Ends, pages: int, page_bytes: int, source: Bytes) -> None:
        self.pid = node.node
        self.client = stack.enter_context(kvstore.connect(f"unix://{node.socket}", timeout=PATIENCE))
        layout = kvstore.Layout(model=f"users-{pages}-{page_bytes}", block_size=16, page_bytes=page_bytes)
        self._side = KVStoreSide(self.client, layout, node.node)
        self._pages, self._size = pages, pages * page_bytes
        self._source = source
        self._number = 0

    def store(self) -> list[bytes]:
        """One call with new pages. Returns their hashes."""
        self._number += 1
        hashes = hashes_of(self._number, self._pages)
        at = self._number * self._size % self._source.size
        self._side.store(hashes, at, self._source[at : at + self._size])
        return hashes

    def store_all(self, size: int) -> list[float]:
        """So many bytes by one call behind another. Returns what each took, in seconds."""
        return [seconds_of(self.store) for _ in range(size // self._size)]

    def store_and_forget(self, size: int) -> list[float]:
        """The same into free slots: what was stored is evicted again, which is not timed."""
        return [self._timed(forget=True) for _ in range(size // self._size)]

    def paced(self, *, forget: bool) -> list[float]:
        """Calls at their times, for a while; a late one is made at once."""
        interval = self._size / PACE
        times = []
        begin = time.perf_counter()
        for number in range(int(PACED_SECONDS / interval)):
            time.sleep(max(0.0, begin + number * interval - time.perf_counter()))
            times.append(self._timed(forget=forget))
        return times

    def _timed(self, *, forget: bool) -> float:
        start = time.perf_counter()
        hashes = self.store()
        seconds = time.perf_counter() - start
        if forget:
            self._side.forget(hashes)
        return seconds

    def settle(self) -> None:
        """Wait until the disk has all that it will get."""
        self.client.flush()

    def counters(self) -> tuple[int, int]:
        """Pages that left before the disk had them, and bytes written there."""
        status = self.client.status()
        disk = [tier for tier in status.tiers if tier.name == "disk"]
        return status.tiers[0].counters["overrun"], disk[0].counters["written_bytes"] if disk else 0


@contextmanager
def deployed(folder: Path) -> Iterator[Ends]:
    """A node with the arena and a disk, as it is started by default."""
    with ends(ARENA, 1 << 20, ("--disk", str(folder / "disk"), "--disk-limit", DISK_LIMIT)) as node:
        yield node


def memcpy_target() -> Bytes:
    """Shared memory as large as the arena, touched."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(ARENA)
        target = np.frombuffer(mmap.mmap(file.fileno(), ARENA), np.uint8)
    target[:] = 1
    return target


def copy_all(target: Bytes, source: Bytes, page_bytes: int, size: int) -> float:
    """Copy so many bytes page by page. Returns seconds."""
    start = time.perf_counter()
    for at in range(0, size, page_bytes):
        to, of = at % target.size, at % source.size
        np.copyto(target[to : to + page_bytes], source[of : of + page_bytes])
    return time.perf_counter() - start


def measure_shape(
    folder: Path, pages: int, page_bytes: int, rounds: int, source: Bytes, progress: Progress
) -> tuple[Burst, Paced]:
    """One shape, each side in turn."""
    caches, target = ProcessorCaches(), memcpy_target()
    gigabytes = BURST / 1e9
    own: list[list[float]] = []
    best: list[list[float]] = []
    copies: list[float] = []
    cpu: list[float] = []
    disk: list[float] = []
    lost: list[int] = []
    with ExitStack() as stack:
        node = Node(stack, stack.enter_context(deployed(folder)), pages, page_bytes, source)
        roomy = Node(stack, stack.enter_context(ends(ARENA, 1 << 20)), pages, page_bytes, source)
        node.store_all(2 * ARENA)
        roomy.store_and_forget(ARENA)
        node.settle()
        for _ in range(rounds):
            caches.sweep()
            overrun, written = node.counters()
            before, start = cpu_seconds(node.pid, own=False), time.perf_counter()
            own.append(node.store_all(BURST))
            node.settle()
            seconds = time.perf_counter() - start
            cpu.append((cpu_seconds(node.pid, own=False) - before) / gigabytes)
            now_overrun, now_written = node.counters()
            lost.append(now_overrun - overrun)
            disk.append((now_written - written) / 1e9 / seconds)
            caches.sweep()
            copies.append(copy_all(target, source, page_bytes, BURST))
            caches.sweep()
            best.append(roomy.store_and_forget(BURST))
            progress.advance(1)
        paced = node.paced(forget=False)
        best_paced = roomy.paced(forget=True)
    calls = [1e3 * call for each in own for call in each]
    p50, best_p50 = 1e3 * percentile(paced, 50), 1e3 * percentile(best_paced, 50)
    return (
        Burst(
            pages,
            page_bytes,
            gigabytes / statistics.median(map(sum, own)),
            gigabytes / statistics.median(copies),
            statistics.median(copy / sum(each) for copy, each in zip(copies, own, strict=True)),
            gigabytes / statistics.median(map(sum, best)),
            percentile(calls, 50),
            percentile(calls, 99),
            statistics.median(cpu),
            statistics.median(disk),
            plain_disk(folder),
            statistics.median(lost) * page_bytes / BURST,
        ),
        Paced(pages, page_bytes, p50, 1e3 * percentile(paced, 99), best_p50, p50 / best_p50),
    )


def plain_disk(folder: Path) -> float:
    """GB/s of plain writes past the page cache."""
    data = aligned_empty(ARENA)
    data[:] = 1
    path = folder / "plain"
    seconds = seconds_of(lambda: plain_write(path, data))
    path.unlink()
    return data.nbytes / 1e9 / seconds


def measure_first_pass(folder: Path, rounds: int, source: Bytes) -> FirstPass:
    """New processes load what is there."""
    with ExitStack() as stack:
        ended = stack.enter_context(deployed(folder))
        Node(stack, ended, 8, 2 << 20, source).store_all(2 * ARENA)
        passes: dict[str, list[list[float]]] = {"0": [], "0.5": []}
        for _ in range(rounds):
            for wait, found in passes.items():
                command = [sys.executable, __file__, "--load-from", str(ended.socket), "--behind", wait]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(json.loads(done.stdout))
    return FirstPass(
        statistics.median(first for first, _ in passes["0"]),
        statistics.median(first for first, _ in passes["0.5"]),
        statistics.median(second for each in passes.values() for _, second in each),
    )


def load_twice(socket: str, behind: float) -> list[float]:
    """Load the pages that are in the arena, newest first; GB/s of each pass."""
    last = 2 * ARENA // (16 << 20)
    into = np.ones(16 << 20, np.uint8)
    with kvstore.connect(f"unix://{socket}", timeout=PATIENCE) as client:
        namespace = client.namespace(kvstore.Layout(model=f"users-8-{2 << 20}", block_size=16, page_bytes=2 << 20))
        namespace.lookup([bytes(32)])
        time.sleep(behind)
        speeds = []
        for _ in range(2):
            start = time.perf_counter()
            for number in range(last, last - 24, -1):
                if namespace.load(hashes_of(number, 8), into) != 8:
                    raise SystemExit("a page that must be in the arena is not there")
            speeds.append(24 * into.nbytes / 1e9 / (time.perf_counter() - start))
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="bursts a shape (default: %(default)s)")
    parser.add_argument("--folder", metavar="FOLDER", help="where the disk tier is (default: a temporary one)")
    parser.add_argument("--mooncake-python", metavar="PYTHON", help="one that has Mooncake: its store is measured, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--load-from", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--behind", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load_from:
        print(json.dumps(load_twice(options.load_from, options.behind)))
        return
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, the least is 1")
    machine = this_machine()
    source = np.random.default_rng(0).integers(0, 256, SOURCE, np.uint8)
    progress = Progress("users", len(SHAPES) * options.rounds)
    bursts, paced = [], []
    for pages, page_bytes in SHAPES:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as folder:
            burst, calls = measure_shape(Path(folder), pages, page_bytes, options.rounds, source, progress)
        bursts.append(burst)
        paced.append(calls)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.folder) as folder:
        first = measure_first_pass(Path(folder), options.rounds, source)
    progress.end()
    peers = measure_peer(options.mooncake_python, options.rounds) if options.mooncake_python else []
    if options.json:
        found = {"bursts": [asdict(row) for row in bursts], "paced": [asdict(row) for row in paced]}
        found |= {"mooncake": [asdict(row) for row in peers]}
        print(json.dumps({"machine": asdict(machine)} | found | {"first_pass": asdict(first)}, indent=2))
        return
    print(machine.line())
    _print(bursts, paced, first)
    for row in peers:
        what = f"Mooncake, {row.pages} x {row.page_bytes >> 10} KiB"
        print(f"{what:24}{row.gbps:6.2f} GB/s, p50 {row.p50_ms:.2f} ms, {row.refused:.0%} refused")


def _print(bursts: list[Burst], paced: list[Paced], first: FirstPass) -> None:
    print("\nbursts          GB/s  memcpy  ratio   best   p50 ms  p99 ms  node CPU-s/GB   disk  plain  overrun")
    for row in bursts:
        what = f"{row.pages:2} x {row.page_bytes >> 10:4} KiB"
        speeds = f"{row.gbps:6.2f}{row.memcpy_gbps:8.2f}{row.of_memcpy:7.2f}{row.best_gbps:7.2f}"
        times = f"{row.p50_ms:9.2f}{row.p99_ms:8.2f}{row.node_cpu_s_per_gb:15.2f}"
        print(f"{what:14}{speeds}{times}{row.disk_gbps:7.2f}{row.plain_disk_gbps:7.2f}{row.overrun:8.0%}")
    print("\npaced, 1 GB/s  p50 ms  p99 ms  best p50   ratio")
    for calls in paced:
        what = f"{calls.pages:2} x {calls.page_bytes >> 10:4} KiB"
        print(f"{what:14}{calls.p50_ms:7.2f}{calls.p99_ms:8.2f}{calls.best_p50_ms:10.2f}{calls.ratio:8.2f}")
    print("\na new process' loads, GB/s")
    passes = (first.at_once_gbps, first.later_gbps, first.second_gbps)
    print("first pass {:.2f}, half a second behind the attachment {:.2f}, second pass {:.2f}".format(*passes))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
