"""``kvstore bench path``: measures how fast pages move by each path, beside what bounds it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.bench.flags import add_output_flags
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import ConfigError
from kvstore.units import format_size, parse_size

if TYPE_CHECKING:
    from kvstore.cli.bench.path_speed import Speed

PAGE_BYTES = (64 << 10, 512 << 10, 2 << 20)
PAGES = (1, 8, 64)
"""A call."""
_EPILOG = """\
The node is a process of its own, and so is what a path is measured beside: for "bulk" one TCP stream of sendall and
recv_into, for "grpc" plain gRPC streams of the same messages; neither has an index, checksums or framing, and both
have their pages in shared memory, as a node has. "shm" is the same host, measured beside memcpy of the same pages to
and from the same mapping. Each side moves the same bytes in turn, 32 MiB or one call, with caches swept before; a ratio
is the limit's time over ours in the same round, medians over rounds. A store's clock stops when every page is published
and the result is here.
CPU-s/GB is the processor time of both processes, per 10^9 bytes.

exit codes:
  0  done
  1  the node did not start, or did not keep every page, or the plot could not be written
  2  a flag can't be used
"""


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    parser = group.add_parser(
        "path",
        help="store and load pages by each path, beside memcpy, raw TCP and plain gRPC",
        description="Measure the paths of pages: speed, latency and processor time.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--path", action="append", metavar="NAME", help="shm, bulk or grpc; may be repeated (default: all)"
    )
    parser.add_argument(
        "--page", action="append", metavar="SIZE", help="page size; may be repeated (default: 64KiB, 512KiB, 2MiB)"
    )
    parser.add_argument(
        "--pages", action="append", type=int, metavar="N", help="pages a call; may be repeated (default: 1, 8, 64)"
    )
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds a row (default: %(default)s)")
    add_output_flags(parser, "write a plot of the ratios, as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    from kvstore.cli.bench.path_baselines import PATHS, ends
    from kvstore.cli.bench.path_speed import TURN_BYTES, measure

    paths = options.path or list(PATHS)
    unknown = [path for path in paths if path not in PATHS]
    if unknown:
        raise ConfigError(f"--path is {unknown[0]!r}, known are {', '.join(PATHS)}")
    sizes = [parse_size(size) for size in options.page] if options.page else list(PAGE_BYTES)
    counts = options.pages or list(PAGES)
    if min(*sizes, *counts, options.rounds) < 1:
        raise ConfigError("--page, --pages and --rounds are 1 at least")
    memory = max(TURN_BYTES, max(sizes) * max(counts))
    speeds: list[Speed] = []
    machine = this_machine()
    progress = Progress("kvstore bench path", len(paths) * len(sizes) * len(counts) * (options.rounds + 2))
    with ends(4 * memory, memory) as both:
        for path in paths:
            for size in sizes:
                for count in counts:
                    speeds += measure(path, both, size, count, options.rounds, progress.advance)
    progress.end()
    if options.json:
        print(json.dumps({"machine": asdict(machine), "rows": [asdict(speed) for speed in speeds]}, indent=2))
    else:
        print(machine.line())
        _print(speeds)
    if options.plot is not None:
        _write_plot(Path(options.plot), speeds)
    return 0


def _print(speeds: list[Speed]) -> None:
    columns = ("GB/s", "limit", "ratio", "p50 ms", "p99 ms", "CPU-s/GB", "limit's")
    table = figures_table("path", "", "a call", *columns, left=("path", "", "a call"))
    for speed in speeds:
        table.add_row(
            speed.path,
            speed.work,
            f"{speed.pages} x {format_size(speed.page_bytes)}",
            f"{speed.gbps:.2f}",
            f"{speed.limit_gbps:.2f}",
            f"{speed.of_limit:.2f}",
            f"{speed.p50_ms:.2f}",
            f"{speed.p99_ms:.2f}",
            f"{speed.cpu_s_per_gb:.2f}",
            f"{speed.limit_cpu_s_per_gb:.2f}",
        )
    print_table(table)


def _write_plot(path: Path, speeds: list[Speed]) -> None:
    calls = list(dict.fromkeys((speed.page_bytes, speed.pages) for speed in speeds))
    lines: dict[str, list[tuple[float, float]]] = {}
    for speed in speeds:
        place = calls.index((speed.page_bytes, speed.pages))
        lines.setdefault(f"{speed.path}, {speed.work}", []).append((float(place), speed.of_limit))
    ticks = [f"{pages} x {format_size(size)}" for size, pages in calls]
    write_plot(path, line_plot("Paths beside their limits", "pages a call", "limit's time / ours", ticks, lines))
