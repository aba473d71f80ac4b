"""``kvstore bench redis``: measures the Redis tier beside a bare client of the same server."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.bench.flags import add_output_flags, check_rounds
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import ConfigError
from kvstore.units import format_size, parse_size

if TYPE_CHECKING:
    from kvstore.cli.bench.redis_speed import Cpu, Speed

PAGE_BYTES = (64 << 10, 256 << 10, 1_124_352, 2 << 20, 8 << 20)
LEAST_SIZE = 8 << 20
_EPILOG = """\
The bare client does nothing but send SET with sendall and receive GET with recv_into: no entries, no checksums, no
books, no eviction. Each round moves the same bytes by each, 32 MiB a call, the bare client in values of a chunk's size
(2 MiB); a ratio is the bare client's time over the tier's, medians over rounds. "lookup" is for 512 pages.
The second table has the processor time of this process and of the server: on a busy machine, more than the clock tells.

Without --redis the benchmark starts a redis-server of its own, and measures both its Unix socket and TCP. A server that
is given must not have pages of kvstore in it; what the benchmark stores there is deleted again.

exit codes:
  0  done
  1  Redis is away, is missing, or does not take everything, or the plot could not be written
  2  a flag or the server can't be used
"""


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    parser = group.add_parser(
        "redis",
        help="store and load pages through the Redis tier, beside a bare client of the same server",
        description="Measure the Redis tier: stores, loads and lookups.",
        epilog=_EPILOG,
    )
    parser.add_argument("--redis", metavar="URL", help="a server to use: redis://, rediss:// or unix://")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds a page size (default: %(default)s)")
    parser.add_argument(
        "--size", default="256MiB", metavar="BYTES", help="bytes a round, kept in memory twice (default: %(default)s)"
    )
    add_output_flags(parser, "write a plot of the ratios, as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    from kvstore.cli.bench.redis_baseline import BareClient, own_server
    from kvstore.cli.bench.redis_speed import measure

    size = parse_size(options.size)
    if size < LEAST_SIZE:
        raise ConfigError(f"--size is {format_size(size)}, the least is {format_size(LEAST_SIZE)}")
    check_rounds(options.rounds)
    machine = this_machine()
    speeds = []
    with contextlib.ExitStack() as stack:
        urls = [options.redis] if options.redis is not None else stack.enter_context(own_server())
        if options.redis is not None:
            bare = BareClient(options.redis)
            stack.callback(bare.close)
            if bare.is_used():
                raise ConfigError("--redis: there are pages of kvstore in it; take an empty server or database")
        progress = Progress("kvstore bench redis", len(urls) * len(PAGE_BYTES) * (options.rounds + 1))
        for url in urls:
            speeds += [measure(url, each, size, options.rounds, progress.advance) for each in PAGE_BYTES]
        progress.end()
    if options.plot is not None:
        _write_plot(Path(options.plot), speeds)
    if options.json:
        print(json.dumps({"machine": asdict(machine), "speed": [asdict(speed) for speed in speeds]}, indent=2))
        return 0
    print(machine.line())
    _print(speeds)
    _print_cpu(speeds, size)
    return 0


def _print(speeds: list[Speed]) -> None:
    columns = ("store GB/s", "bare", "of bare", "load GB/s", "bare", "of bare", "lookup ms")
    table = figures_table("", "pages of", *columns, left=("", "pages of"))
    for speed in speeds:
        figures = (
            f"{speed.store_gbps:.2f}",
            f"{speed.bare_store_gbps:.2f}",
            f"{speed.store_of_bare:.2f}",
            f"{speed.load_gbps:.2f}",
            f"{speed.bare_load_gbps:.2f}",
            f"{speed.load_of_bare:.2f}",
            f"{speed.lookup_ms:.2f}",
        )
        table.add_row(speed.way, format_size(speed.page_bytes), *figures)
    print_table(table)


def _print_cpu(speeds: list[Speed], size: int) -> None:
    table = figures_table("", "pages of", "store", "bare store", "load", "bare load", left=("", "pages of"))
    for speed in speeds:
        cpus = (speed.store_cpu, speed.bare_store_cpu, speed.load_cpu, speed.bare_load_cpu)
        table.add_row(speed.way, format_size(speed.page_bytes), *map(_cpu, cpus))
    print(f"\nprocessor time for {format_size(size)}: ms of the client + of the server")
    print_table(table)


def _write_plot(path: Path, speeds: list[Speed]) -> None:
    sizes = sorted({speed.page_bytes for speed in speeds})
    lines: dict[str, list[tuple[float, float]]] = {}
    for speed in speeds:
        place = float(sizes.index(speed.page_bytes))
        lines.setdefault(f"{speed.way}, store", []).append((place, speed.store_of_bare))
        lines.setdefault(f"{speed.way}, load", []).append((place, speed.load_of_bare))
    ticks = [format_size(size) for size in sizes]
    write_plot(
        path, line_plot("Redis beside a bare client", "size of a page", "bare client's time / ours", ticks, lines)
    )


def _cpu(cpu: Cpu) -> str:
    return f"{cpu.client_ms:,.0f} + {cpu.server_ms:,.0f}"
