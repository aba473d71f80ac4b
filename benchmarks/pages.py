"""How fast pages move on one host, beside what bounds them in the same run.

Each row moves the same bytes, interleaved with a memcpy between the same kinds of memory. A ratio is its time over
ours. Caches are swept before each. Medians. Between hosts: `kvstore bench path`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import kvstore

Bytes = npt.NDArray[np.uint8]
ARENA = 512 << 20
SWEEP = np.zeros(128 << 20, np.uint8)


def timed(call: Callable[[], object]) -> float:
    SWEEP[:] += 1  # what was moved before must not still lie in the processor's caches
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def node(socket: Path, arena: Path) -> Iterator[None]:
    """A node in a process of its own, as it is deployed."""
    flags = ["--socket", str(socket), "--arena", str(ARENA), "--arena-dir", str(arena)]
    command = [sys.executable, "-m", "kvstore.cli", "serve", *flags, "--disk-limit", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvstore: ready")
        yield
        process.terminate()


def measure(url: str, page_bytes: int, pages: int, rounds: int) -> dict[str, object]:
    """One path with one page size: medians of store, load and their limits, in seconds."""
    layout = kvstore.Layout(model=f"benchmark-{page_bytes}", block_size=16, page_bytes=page_bytes)
    data = np.random.default_rng(0).integers(0, 256, pages * page_bytes, np.uint8)
    into = np.empty_like(data)
    copy = np.empty_like(data)
    times: dict[str, list[float]] = {"store": [], "load": [], "limit": []}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(kvstore.connect(url))
        namespace = client.namespace(layout)
        limit = partial(np.copyto, copy, data)
        for turn in range(-2, rounds):
            hashes = kvstore.hash_blocks(list(range(pages * 16)), 16, extra_keys=(f"{page_bytes}/{turn}",))
            taken = {
                "store": timed(lambda hashes=hashes: namespace.store(hashes, data)),
                "load": timed(lambda hashes=hashes: namespace.load(hashes, into)),
                "limit": timed(limit),
            }
            assert np.array_equal(into, data)
            namespace.evict(hashes)
            for name, seconds in taken.items():
                if turn >= 0:  # the first two rounds only warm up
                    times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "path": url.split(":")[0],
        "page_bytes": page_bytes,
        "pages": pages,
        "store_gbps": data.nbytes / median["store"] / 1e9,
        "load_gbps": data.nbytes / median["load"] / 1e9,
        "limit_gbps": data.nbytes / median["limit"] / 1e9,
        "store_ratio": median["limit"] / median["store"],
        "load_ratio": median["limit"] / median["load"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="counted rounds a row (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        arena = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir="/dev/shm")))
        stack.enter_context(node(folder / "s", arena / "node"))
        embedded = f"embedded://{folder}/embedded?arena={ARENA}&disk_limit=0&arena_dir={arena}/embedded"
        for url in (f"unix://{folder}/s", embedded):
            for page_bytes, pages in ((2 << 20, 1), (2 << 20, 32), (64 << 10, 64)):
                print(f"{url.split(':')[0]}: {pages} x {page_bytes >> 10} KiB", file=sys.stderr, flush=True)
                rows.append(measure(url, page_bytes, pages, options.rounds))
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2))
        return
    table = Table(box=None, header_style="bold")
    for column in ("path", "pages", "store GB/s", "of limit", "load GB/s", "of limit", "limit GB/s"):
        table.add_column(column, justify="left" if column == "path" else "right")
    for row in rows:
        table.add_row(
            str(row["path"]),
            f"{row['pages']} x {int(str(row['page_bytes'])) >> 10} KiB",
            *(f"{row[key]:.2f}" for key in ("store_gbps", "store_ratio", "load_gbps", "load_ratio", "limit_gbps")),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
