"""``kvstore bench lookup``: measures lookups of a prompt's pages in what a node shows in shared memory, and those that
make a call beside a disk tier."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.cli.bench.flags import add_output_flags, check_rounds, parse_numbers
from kvstore.cli.bench.lookup_below import measure_below, print_below
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.node_process import serving
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table

INDEXED = (10_000, 100_000, 1_000_000)
ON_DISK = (100_000, 1_000_000)
PROMPT_PAGES = 512
_EPILOG = """\
A node in a process of its own holds pages of 4 KiB (the arena needs 4 GiB of shared memory for a million). Each lookup
names the 512 pages of a prompt drawn at random: all of them here, half of them, none. "cold": the processor's caches
were swept before. The mapping has been touched.

Then a node with a disk tier, as most have one: prompts that are new, known in part, or on disk alone, and how many
calls of the node a lookup makes. The pages on disk are made up: their rows in the tier's index, and no bytes. With
--redis the node shares that server besides, and what it lacks is asked for there; the 8,192 pages of its arena are
written to it. "Redis' own": the median of a bare client that asks for 512 names in turns with the lookups.

exit codes:
  0  done
  1  the node could not be started, or the plot not written
  2  a flag can't be used
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """Lookups of one kind with one number of pages indexed."""

    indexed: int
    pages: int
    here: str
    """Which of them are here: ``"all"``, ``"half"`` or ``"none"``."""
    cold: bool
    p50_us: float
    p99_us: float


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    parser = group.add_parser(
        "lookup",
        help="look prompts of 512 pages up on the same host, with up to a million pages indexed",
        description="Measure lookups through the mapped index, warm and cold.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--indexed",
        default=",".join(map(str, INDEXED)),
        metavar="N,N",
        help="how many pages are indexed (default: %(default)s)",
    )
    parser.add_argument(
        "--on-disk",
        default=",".join(map(str, ON_DISK)),
        metavar="N,N",
        help="how many pages are on disk, in the second table (default: %(default)s; 0: leave it out)",
    )
    parser.add_argument("--redis", default="", metavar="URL", help="of a server for a third one (default: none)")
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="lookups a row (default: %(default)s)")
    add_output_flags(parser, "write a plot of the medians, as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    sizes = parse_numbers("--indexed", options.indexed, PROMPT_PAGES, 10_000_000)
    on_disk = [] if options.on_disk == "0" else parse_numbers("--on-disk", options.on_disk, PROMPT_PAGES, 100_000_000)
    check_rounds(options.rounds)
    machine = this_machine()
    shares = ("", options.redis) if options.redis else ("",)
    progress = Progress("kvstore bench lookup", sum(sizes) + len(shares) * sum(on_disk))
    figures = [figure for size in sizes for figure in measure(size, options.rounds, progress.advance)]
    below = [
        figure
        for redis in shares
        for size in on_disk
        for figure in measure_below(size, redis, options.rounds, progress.advance)
    ]
    progress.end()
    if options.json:
        rows = {"lookup": [asdict(each) for each in figures], "beside_a_disk": [asdict(each) for each in below]}
        print(json.dumps({"machine": asdict(machine), **rows}, indent=2))
    else:
        print(machine.line())
        _print(figures)
        if below:
            print()
            print_below(below)
    if options.plot is not None:
        _write_plot(Path(options.plot), sizes, figures)
    return 0


def measure(indexed: int, rounds: int, progress: Callable[[int], None]) -> list[Figure]:
    """Fill a node with so many pages, and look prompts up."""
    import kvstore
    from kvstore.cli.bench.prompts import arena_for, prompt_hashes, prompt_layout, store_prompts
    from kvstore.cli.bench.timing import ProcessorCaches, percentile, seconds_of

    prompts = max(1, indexed // PROMPT_PAGES)
    chosen = random.Random(0)  # noqa: S311 - which prompt is looked up
    caches = ProcessorCaches()
    figures = []
    with serving(arena_for(indexed)) as url, kvstore.connect(url, timeout=60.0) as client:
        namespace = client.namespace(prompt_layout())
        store_prompts(namespace, prompts, progress)
        for here in ("all", "half", "none"):
            for cold in (False, True):
                times = []
                for _ in range(rounds):
                    hashes = prompt_hashes(chosen.randrange(prompts) + (prompts if here == "none" else 0))
                    if here == "half":
                        hashes[PROMPT_PAGES // 2 :] = prompt_hashes(prompts)[PROMPT_PAGES // 2 :]
                    if cold:
                        caches.sweep()
                    times.append(seconds_of(partial(namespace.lookup, hashes)) * 1e6)
                figures.append(Figure(indexed, PROMPT_PAGES, here, cold, percentile(times, 50), percentile(times, 99)))
    return figures


def _print(figures: Sequence[Figure]) -> None:
    table = figures_table("pages indexed", "here", "", "p50 µs", "p99 µs", left=("here", ""))
    for figure in figures:
        kind = "cold" if figure.cold else "warm"
        table.add_row(f"{figure.indexed:,}", figure.here, kind, f"{figure.p50_us:.0f}", f"{figure.p99_us:.0f}")
    print_table(table)


def _write_plot(path: Path, sizes: Sequence[int], figures: Sequence[Figure]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for figure in figures:
        points = lines.setdefault(f"{figure.here} here, {'cold' if figure.cold else 'warm'}", [])
        points.append((float(sizes.index(figure.indexed)), figure.p50_us))
    ticks = [f"{size:,}" for size in sizes]
    write_plot(path, line_plot("Lookups of 512 pages", "pages indexed", "median, microseconds", ticks, lines))
