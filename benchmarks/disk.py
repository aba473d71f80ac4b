"""How fast prefixes go to the disk tier and come back cold, beside plain O_DIRECT I/O in the same run.

Each round writes and reads the same bytes plainly, in pieces of 2 MiB from one thread, and through a fresh tier: by the
batch, as a node writes and loads, and as one call. A ratio is the plain I/O's time over the tier's. Medians over
rounds; the order changes from round to round. The tier's checksums are verified on reading. Then: how long it takes to
open a log of many pages, and how much memory its index takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from rich.console import Console
from rich.table import Table

from kvstore.segments import record
from kvstore.segments.aligned import aligned_empty
from kvstore.segments.record import BLOCK, SegmentHeader, Trailer
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import PageWrite

Bytes = npt.NDArray[np.uint8]
PIECE = 2 << 20
BATCH = 16 << 20
"""What a node loads at once; it writes half of it."""


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def plain_write(path: Path, data: Bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    for at in range(0, len(data), PIECE):
        os.pwrite(fd, data[at : at + PIECE].data, at)
    os.close(fd)


def plain_read(path: Path, into: Bytes) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for at in range(0, len(into), PIECE):
        os.preadv(fd, [into[at : at + PIECE].data], at)
    os.close(fd)


def measure(folder: Path, page_bytes: int, size: int, rounds: int) -> dict[str, object]:
    """One page size: medians of the ratios to plain I/O."""
    data = aligned_empty(size)
    data[:] = np.frombuffer(np.random.default_rng(0).bytes(size), np.uint8)
    into = aligned_empty(size)
    into[:] = 0
    views = [data[at : at + page_bytes] for at in range(0, size, page_bytes)]
    places = [into[at : at + page_bytes] for at in range(0, size, page_bytes)]
    sums = [xxhash.xxh3_64_intdigest(view.data) for view in views]
    keys = [os.urandom(64) for _ in views]
    pages = [PageWrite(*page) for page in zip(keys, sums, views, strict=True)]
    times: dict[str, list[float]] = {}

    def step(name: str, call: Callable[[], object]) -> None:
        times.setdefault(name, []).append(timed(call))

    def by(count: int, call: Callable[[slice], object]) -> Callable[[], None]:
        def batches() -> None:
            for at in range(0, len(pages), count):
                call(slice(at, at + count))

        return batches

    few, many = max(1, BATCH // 2 // page_bytes), max(1, BATCH // page_bytes)
    for turn in range(rounds):
        plain, tier_folder = folder / "plain", folder / f"tier-{turn}"
        tier = DiskTier(tier_folder, 4 * size)
        steps: list[Callable[[], None]] = [
            lambda plain=plain: step("plain write", lambda: plain_write(plain, data)),  # type: ignore[misc]
            lambda tier=tier: step("write", by(few, lambda part: tier.write(pages[part]))),  # type: ignore[misc]
        ]
        for each in steps[:: 1 if turn % 2 else -1]:
            each()
        reads: list[Callable[[], None]] = [
            lambda plain=plain: step("plain read", lambda: plain_read(plain, into)),  # type: ignore[misc]
            lambda tier=tier: step("read", by(many, lambda part: tier.read(keys[part], places[part]))),  # type: ignore[misc]
            lambda tier=tier: step("read at once", lambda: tier.read(keys, places)),  # type: ignore[misc]
        ]
        for each in reads[:: 1 if turn % 2 else -1]:
            into[:] = 0
            each()
            assert np.array_equal(into, data)
        counts = tier.statistics()
        assert counts.stored == len(pages)
        assert counts.hit == 2 * len(pages)
        tier.close()
        for path in [plain, *tier_folder.iterdir()]:
            path.unlink()
    rate = {name: size / statistics.median(values) / 1e9 for name, values in times.items()}

    def ratio(name: str, plain: str) -> float:
        return statistics.median(a / b for a, b in zip(times[plain], times[name], strict=True))

    return {
        "page_bytes": page_bytes,
        "bytes": size,
        "gbps": rate,
        "write_ratio": ratio("write", "plain write"),
        "read_ratio": ratio("read", "plain read"),
        "read_at_once_ratio": ratio("read at once", "plain read"),
    }


def make_log(folder: Path, pages: int, page_bytes: int) -> None:
    """A log of sealed segments whose payloads are holes: only what opening reads is really there."""
    folder.mkdir(mode=0o700)
    each = (256 << 20) // record.padded(page_bytes)
    for number in range(-(-pages // each)):
        count = min(each, pages - number * each)
        stamp = os.urandom(16)
        table = np.zeros(count, record.RECORDS)
        table["key"] = np.frombuffer(os.urandom(64 * count), "V64")
        table["offset"] = 2 * BLOCK + np.arange(count, dtype=np.uint64) * record.padded(page_bytes)
        table["length"] = page_bytes
        footer = 2 * BLOCK + count * record.padded(page_bytes)
        data = table.tobytes()
        trailer = Trailer(number + 1, stamp, footer, count, record.table_checksum(data))
        with (folder / f"{number + 1:016x}.segment").open("wb") as file:
            file.write(record.encode_segment_header(SegmentHeader(number + 1, stamp)))
            file.seek(footer)
            file.write(data.ljust(record.padded(len(data)), b"\0") + record.encode_trailer(trailer))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def measure_opening(folder: Path, pages: int, page_bytes: int) -> dict[str, object]:
    """Seconds to open a log of so many pages, and bytes of memory a page."""
    make_log(folder / "log", pages, page_bytes)
    limit = 2 * pages * record.padded(page_bytes)
    DiskTier(folder / "log", limit).close()
    gc.collect()
    before = resident()
    start = time.perf_counter()
    tier = DiskTier(folder / "log", limit)
    seconds = time.perf_counter() - start
    gc.collect()
    memory = resident() - before
    assert tier.statistics().pages == pages
    tier.close()
    return {
        "pages": pages,
        "page_bytes": page_bytes,
        "opening_seconds": seconds,
        "memory_bytes_a_page": memory / pages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds a row (default: 5)")
    parser.add_argument("--mib", type=int, default=1024, help="MiB a round: 512 pages of 2 MiB (default: 1024)")
    parser.add_argument("--directory", help="where to write (default: the system's folder for temporary files)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.directory) as name:
        folder = Path(name)
        rows = []
        for page_bytes in (2 << 20, 64 << 10):
            print(f"pages of {page_bytes >> 10} KiB", file=sys.stderr, flush=True)
            rows.append(measure(folder, page_bytes, options.mib << 20, options.rounds))
        openings = []
        for pages in (10 << 14, 1_000_000):
            print(f"opening {pages:,} pages", file=sys.stderr, flush=True)
            (folder / str(pages)).mkdir()
            openings.append(measure_opening(folder / str(pages), pages, 64 << 10))
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows, "opening": openings}, indent=2))
        return
    table = Table(box=None, header_style="bold")
    for column in ("pages", "write GB/s", "of plain", "read GB/s", "of plain", "at once GB/s", "of plain"):
        table.add_column(column, justify="right")
    for row in rows:
        rate: dict[str, float] = row["gbps"]  # type: ignore[assignment]
        ratios = (row["write_ratio"], row["read_ratio"], row["read_at_once_ratio"])
        figures = [
            f"{figure:.2f}"
            for pair in zip((rate["write"], rate["read"], rate["read at once"]), ratios, strict=True)
            for figure in pair
        ]
        table.add_row(f"{int(str(row['page_bytes'])) >> 10} KiB", *figures)
    Console().print(table)
    for opening in openings:
        print(
            f"opening {opening['pages']:,} pages of 64 KiB: {opening['opening_seconds']:.2f} s,"
            f" {opening['memory_bytes_a_page']:.0f} bytes of memory a page"
        )


if __name__ == "__main__":
    main()
