"""Loads and stores of the Redis tier, beside a bare client of the same server that moves the same values.

The bare client does nothing but send `SET` with ``sendall`` and receive `GET` with ``recv_into``: no entries, no
checksums, no books, no eviction. Both move the same bytes in turn, pipelined, the bare client in values of a chunk's
size. A ratio is the bare client's time over ours; the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from rich.console import Console
from rich.table import Table

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.chunk import CHUNK_BYTES
from kvstore.tiers.tier import PageWrite

Bytes = npt.NDArray[np.uint8]
SWEEP = np.zeros(64 << 20, np.uint8)


class BareClient:
    """The fastest that a Python client can be: one socket, requests and replies straight from and to memory."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def store(self, names: list[bytes], values: list[memoryview]) -> None:
        for name, value in zip(names, values, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
            self.socket.sendall(head)
            self.socket.sendall(value)
            self.socket.sendall(b"\r\n")
        left = 5 * len(names)
        while left:
            left -= len(self.socket.recv(left))

    def load(self, names: list[bytes], values: list[memoryview]) -> None:
        self.socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names))
        for value in values:
            self.receive(memoryview(bytearray(len(b"$%d\r\n" % len(value)))))
            self.receive(value)
            self.receive(memoryview(bytearray(2)))

    def receive(self, view: memoryview) -> None:
        while view:
            view = view[self.socket.recv_into(view) :]


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[Path, int]]:
    """A redis-server of our own, without persistence."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise SystemExit("redis-server is missing; on Debian or Ubuntu: sudo apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(folder / "s"), "--save", ""]
    with subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, cwd=folder) as process:
        try:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.01)
            yield folder / "s", port
        finally:
            process.terminate()


def timed(call: Callable[[], object]) -> float:
    SWEEP[:] += 1  # what was moved before must not still lie in the processor's caches
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def views(array: Bytes, size: int) -> list[Bytes]:
    return [array[at : at + size] for at in range(0, len(array) // size * size, size)]


def in_calls(call: Callable[..., object], items: int, *lists: Sequence[object]) -> None:
    """Give a function the same parts of some lists, so many items at a time."""
    for at in range(0, len(lists[0]), items):
        call(*(some[at : at + items] for some in lists))


def measure(url: str, connected: socket.socket, page_bytes: int, sizes: argparse.Namespace) -> dict[str, object]:
    """The medians for one page size."""
    total = (sizes.total << 20) // page_bytes * page_bytes
    pages = total // page_bytes
    data = np.random.default_rng(page_bytes).integers(0, 256, total, np.uint8)
    target = np.zeros_like(data)
    value_bytes = max(page_bytes, CHUNK_BYTES // page_bytes * page_bytes)
    names = [b"bare:%d" % n for n in range(total // value_bytes)]
    sums = [xxhash.xxh3_64_intdigest(page.data) for page in views(data, page_bytes)]
    bare = BareClient(connected)
    ours: dict[str, list[float]] = {"load": [], "store": []}
    theirs: dict[str, list[float]] = {"load": [], "store": []}
    step, each = (max(1, (sizes.call << 20) // size) for size in (value_bytes, page_bytes))
    values, places = ([view.data for view in views(array, value_bytes)] for array in (data, target))
    tier = RedisTier(url, 8 << 30, timeout=30)

    def store(writes: list[PageWrite]) -> None:
        assert all(tier.write(writes))

    def load(keys: list[bytes], into: list[Bytes]) -> None:
        assert None not in tier.read(keys, into)

    for number in range(sizes.rounds + 1):
        keys = [bytes(32) + (number * pages + n).to_bytes(32, "big") for n in range(pages)]
        writes = [PageWrite(*page) for page in zip(keys, sums, views(data, page_bytes), strict=True)]
        turns = [
            (
                theirs,
                partial(in_calls, bare.store, step, names, values),
                partial(in_calls, bare.load, step, names, places),
            ),
            (
                ours,
                partial(in_calls, store, each, writes),
                partial(in_calls, load, each, keys, views(target, page_bytes)),
            ),
        ]
        for into, storing, loading in turns if number % 2 else reversed(turns):  # neither always finds a fresh server
            connected.sendall(b"*1\r\n$8\r\nFLUSHALL\r\n")
            connected.recv(5)
            took = timed(storing), timed(loading)
            assert np.array_equal(target[: len(names) * value_bytes], data[: len(names) * value_bytes])
            target[:] = 0
            if number:  # the first round warms up
                into["store"].append(took[0])
                into["load"].append(took[1])
    tier.close()
    row: dict[str, object] = {"page_bytes": page_bytes}
    for name in ("store", "load"):
        row[f"{name}_gb_s"] = round(total / statistics.median(ours[name]) / 1e9, 2)
        row[f"bare_{name}_gb_s"] = round(total / statistics.median(theirs[name]) / 1e9, 2)
        ratios = [bare_seconds / seconds for bare_seconds, seconds in zip(theirs[name], ours[name], strict=True)]
        row[f"{name}_ratio"] = round(statistics.median(ratios), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--total", type=int, default=256, help="MiB a round")
    parser.add_argument("--call", type=int, default=32, help="MiB a call")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvb") as folder, server(Path(folder)) as (path, port):
        for way in ("unix", "tcp"):
            for page_bytes in (64 << 10, 256 << 10, 1_124_352, 2 << 20, 8 << 20):
                connected = socket.socket(socket.AF_UNIX if way == "unix" else socket.AF_INET)
                connected.connect(str(path) if way == "unix" else ("127.0.0.1", port))
                url = f"unix://{path}" if way == "unix" else f"redis://127.0.0.1:{port}"
                with connected:
                    row = measure(url, connected, page_bytes, arguments)
                rows.append({"way": way} | row)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="Redis tier beside a bare client (GB/s, ratio)")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
