"""``kvstore bench arena``: measures what a page in the arena costs the node, in memory and processor time."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvstore.cli.bench.flags import add_output_flags
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.progress import Progress
from kvstore.cli.tables import print_table
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.namespaces.registry import KnownNamespace
    from kvstore.store.store import Store

PROMPT_PAGES = 256
"""As many as one call may name."""
_ROUNDS = 200
_EPILOG = """\
A store in this process, nothing below its arena, is filled with prompts of 256 pages of 4 KiB, without their payloads
(the arena needs 4 GiB of shared memory for a million). Memory is what the process has grown by besides what it shares
(RssAnon): when the arena is full, and when every page in it was replaced since. Processor time is of one call with all
pages of a prompt: the median of many.

exit codes:
  0  done
  1  the arena could not be made, or the plot not written
  2  a flag can't be used
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """What pages cost."""

    pages: int
    full_bytes: float
    """Memory a page, when the arena is full."""
    replaced_bytes: float
    """The same, when every page in it was replaced since."""
    lookup_us: float
    """Processor time a page, in microseconds: of looking pages up that are here,"""
    miss_us: float
    """that are not,"""
    load_us: float
    """of holding them and ending the hold,"""
    store_us: float
    """of reserving and publishing them while slots are free,"""
    evict_us: float
    """while others have to leave,"""
    present_us: float
    """and of storing what is here."""


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    parser = group.add_parser(
        "arena",
        help="memory and processor time that a page in the arena costs the node",
        description="Measure what a page in the arena costs the node besides its bytes.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--pages", type=int, default=1 << 20, metavar="N", help="how many the arena has room for (default: %(default)s)"
    )
    add_output_flags(parser, "write a plot of the processor times, as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    if not 4 * PROMPT_PAGES <= options.pages <= 1 << 26:
        raise ConfigError(f"--pages is {options.pages}, it must be from {4 * PROMPT_PAGES} to {1 << 26}")
    machine = this_machine()
    progress = Progress("kvstore bench arena", 2 * options.pages)
    costs = measure(options.pages, progress.advance)
    progress.end()
    if options.plot is not None:
        _write_plot(Path(options.plot), costs)
    if options.json:
        print(json.dumps({"machine": asdict(machine), "arena": asdict(costs)}, indent=2))
        return 0
    print(machine.line())
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        (f"memory of one of {costs.pages:,} pages, bytes: arena full", f"{costs.full_bytes:.0f}"),
        ("  all replaced since", f"{costs.replaced_bytes:.0f}"),
        ("processor time of a page, microseconds: looked up, here", f"{costs.lookup_us:.2f}"),
        ("  looked up, not here", f"{costs.miss_us:.2f}"),
        ("  held and let go", f"{costs.load_us:.2f}"),
        ("  stored, with room", f"{costs.store_us:.2f}"),
        ("  stored, another one leaves", f"{costs.evict_us:.2f}"),
        ("  stored, is here already", f"{costs.present_us:.2f}"),
    ):
        table.add_row(name, value)
    print_table(table)
    return 0


def _write_plot(path: Path, costs: Costs) -> None:
    kinds = ("lookup", "miss", "load", "store", "evict", "present")
    points = [(float(place), getattr(costs, f"{kind}_us")) for place, kind in enumerate(kinds)]
    ticks = ("looked up", "not here", "held", "stored", "evicting", "is here")
    plot = line_plot("Processor time of a page", "what is done", "microseconds", ticks, {"a page": points})
    write_plot(path, plot)


def measure(pages: int, progress: Callable[[int], None]) -> Costs:
    """Fill an arena of so many pages, twice."""
    from kvstore.arena.arena import Arena
    from kvstore.cli.bench.prompts import PAGE_BYTES, prompt_hashes, prompt_layout
    from kvstore.cli.bench.timing import percentile
    from kvstore.store.leases import NODE
    from kvstore.store.store import Store

    prompts = pages // PROMPT_PAGES
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir="/dev/shm") as shm:
        arena = Arena(Path(shm) / "arena", prompts * PROMPT_PAGES * PAGE_BYTES)
        with Store(arena, [], [arena.directory]) as store:
            known = store.open_namespace(prompt_layout())

            def load(hashes: list[bytes]) -> None:
                store.complete_load(NODE, store.prepare_load(NODE, known.fingerprint, hashes, 60.0).lease)

            def times_of(call: Callable[[list[bytes]], object], first: int) -> float:
                """Processor microseconds a page of a call with prompts of the last ``_ROUNDS`` from ``first`` on."""
                times = []
                for prompt in range(first, first + min(_ROUNDS, prompts // 2)):
                    hashes = prompt_hashes(prompt)[:PROMPT_PAGES]
                    start = time.process_time_ns()
                    call(hashes)
                    times.append((time.process_time_ns() - start) / 1e3 / PROMPT_PAGES)
                return percentile(times, 50)

            before = _memory()
            stored: list[float] = []
            evicted: list[float] = []
            for prompt in range(2 * prompts):
                spent = _store(store, known, prompt_hashes(prompt)[:PROMPT_PAGES])
                (stored if prompt < prompts else evicted).append(spent / 1e3 / PROMPT_PAGES)
                progress(PROMPT_PAGES)
                if prompt == prompts - 1:
                    full = (_memory() - before) / pages
            replaced = (_memory() - before) / pages
            newest = 2 * prompts - prompts // 2
            return Costs(
                pages=pages,
                full_bytes=full,
                replaced_bytes=replaced,
                lookup_us=times_of(lambda hashes: store.lookup([(known.fingerprint, hashes)]), newest),
                miss_us=times_of(lambda hashes: store.lookup([(known.fingerprint, hashes)]), 2 * prompts),
                load_us=times_of(load, newest),
                store_us=percentile(stored, 50),
                evict_us=percentile(evicted, 50),
                present_us=times_of(
                    lambda hashes: store.prepare_store(NODE, known.fingerprint, hashes, 60.0, direct=True), newest
                ),
            )


def _store(store: Store, known: KnownNamespace, hashes: list[bytes]) -> int:
    """Store a prompt. Returns nanoseconds of processor time."""
    from kvstore.store.leases import NODE

    start = time.process_time_ns()
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 60.0, direct=True)
    published = store.complete_store(NODE, reserved.lease, publish=True)
    spent = time.process_time_ns() - start
    assert published.stored == len(hashes), "every page was new, and fits"
    return spent


def _memory() -> int:
    """Bytes of memory that this process has for itself."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
