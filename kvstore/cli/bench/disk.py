"""``kvstore bench disk``: measures the disk tier beside plain O_DIRECT I/O of the same bytes."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.bench.flags import add_output_flags, check_rounds
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import ConfigError, ResourceError
from kvstore.units import format_size, parse_size

if TYPE_CHECKING:
    from kvstore.cli.bench.disk_opening import Opening
    from kvstore.cli.bench.disk_speed import Speed

PAGE_BYTES = (2 << 20, 64 << 10)
OPENED_PAGE_BYTES = 64 << 10
INDEX_PAGES = 1_000_000
_SPARE = 4
"""One such part of the free space is not used."""
_EPILOG = """\
Each round writes and reads the same bytes plainly (pieces of 2 MiB, O_DIRECT, one thread) and through a fresh tier, in
turns; a ratio is the plain I/O's time over the tier's, medians over rounds. The tier verifies checksums at reading.
"write" goes by 8 MiB and "load" by 16 MiB a call, as a node does it; "prefix" is 512 pages a call. Reads are cold.
Then a log is written and opened again, after it was closed and as a killed process leaves it.

exit codes:
  0  done
  1  the disk refused, or the plot could not be written
  2  a flag or the directory can't be used
"""


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    parser = group.add_parser(
        "disk",
        help="write and read pages through the disk tier, beside plain I/O of the same bytes",
        description="Measure the disk tier in a directory: writes, cold reads, opening, memory of the index.",
        epilog=_EPILOG,
    )
    parser.add_argument("--directory", metavar="DIR", help="where (default: where temporary files go)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds a page size (default: %(default)s)")
    parser.add_argument(
        "--size", default="1GiB", metavar="BYTES", help="bytes a round, kept in memory twice (default: %(default)s)"
    )
    parser.add_argument(
        "--log-size",
        default="10GiB",
        metavar="BYTES",
        help="bytes of pages of 64 KiB in the log that is opened; what the disk has no room for is extrapolated"
        " (default: %(default)s)",
    )
    add_output_flags(parser, "write a plot of the ratios, as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    from kvstore.cli.bench.disk_opening import measure_index, measure_opening
    from kvstore.cli.bench.disk_speed import measure_speed

    size, log_size = (
        _multiple("--size", options.size, PAGE_BYTES[0]),
        _multiple("--log-size", options.log_size, 16 << 20),
    )
    check_rounds(options.rounds)
    try:
        root = Path(options.directory or tempfile.gettempdir())  # only now: a node's container may have no such place
    except OSError as error:
        raise ConfigError(f"--directory is needed: {error.strerror}") from error
    try:
        usable = shutil.disk_usage(root).free * (_SPARE - 1) // _SPARE
    except OSError as error:
        raise ConfigError(f"{root}: {error.strerror or error}") from error
    if 3 * size > usable:
        raise ConfigError(
            f"--size is {format_size(size)}: two copies and a reserve take three times that, and of what is free in"
            f" {root} only {format_size(usable)} are used"
        )
    machine = this_machine()
    progress = Progress("kvstore bench disk", len(PAGE_BYTES) * options.rounds + 2)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=root) as name:
            folder = Path(name)
            speeds = [measure_speed(folder, each, size, options.rounds, progress.advance) for each in PAGE_BYTES]
            opening = measure_opening(folder / "opened", log_size, min(log_size, usable * 4 // 5), OPENED_PAGE_BYTES)
            progress.advance(1)
            index = measure_index(folder / "index", INDEX_PAGES, OPENED_PAGE_BYTES)
            progress.advance(1)
    except OSError as error:
        if isinstance(error, ResourceError):
            raise
        raise ResourceError(f"{root}: {error.strerror or error}") from error
    progress.end()
    if options.plot is not None:
        _write_plot(Path(options.plot), speeds)
    if options.json:
        answer = {
            "machine": asdict(machine),
            "speed": [asdict(speed) for speed in speeds],
            "opening": asdict(opening),
            "index": asdict(index),
        }
        print(json.dumps(answer, indent=2))
        return 0
    print(machine.line())
    _print_speeds(speeds)
    _print_opening(opening)
    print(
        f"index of {index.pages:,} pages: {index.memory_bytes_a_page:.0f} bytes of memory a page,"
        f" opened in {index.seconds:.2f} s (payloads are holes)"
    )
    return 0


def _multiple(flag: str, text: str, of: int) -> int:
    size = parse_size(text)
    if size < of or size % of:
        raise ConfigError(f"{flag} is {format_size(size)}, it must be a multiple of {format_size(of)}")
    return size


def _print_speeds(speeds: list[Speed]) -> None:
    table = figures_table("pages of", "", "GB/s", "plain GB/s", "of plain", left=("pages of", ""))
    for speed in speeds:
        for name, gbps, plain, ratio in (
            ("write", speed.write_gbps, speed.plain_write_gbps, speed.write_of_plain),
            ("load", speed.load_gbps, speed.plain_read_gbps, speed.load_of_plain),
            ("prefix", speed.prefix_gbps, speed.plain_read_gbps, speed.prefix_of_plain),
        ):
            table.add_row(format_size(speed.page_bytes), name, f"{gbps:.2f}", f"{plain:.2f}", f"{ratio:.2f}")
    print_table(table)


def _write_plot(path: Path, speeds: list[Speed]) -> None:
    lines = {
        work: [(float(place), getattr(speed, f"{work}_of_plain")) for place, speed in enumerate(speeds)]
        for work in ("write", "load", "prefix")
    }
    ticks = [format_size(speed.page_bytes) for speed in speeds]
    write_plot(path, line_plot("The disk beside plain I/O", "size of a page", "plain I/O's time / ours", ticks, lines))


def _print_opening(opening: Opening) -> None:
    note = ""
    if opening.written_bytes < opening.bytes:
        note = f" (extrapolated from {format_size(opening.written_bytes)}: the disk has no more room)"
    print(
        f"a log of {format_size(opening.bytes)} in pages of {format_size(opening.page_bytes)} opens in"
        f" {opening.closed_seconds:.3f} s, after a kill in {opening.killed_seconds:.3f} s{note}"
    )
