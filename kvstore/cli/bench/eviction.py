"""``kvstore bench eviction``: replays a request trace against each eviction policy and compares their hits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.catalog.policies import DEFAULT_POLICY, POLICIES, EvictionPolicy
from kvstore.cli.bench import eviction_workloads
from kvstore.cli.bench.flags import add_output_flags
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.bench.replay import hit_blocks, hit_blocks_offline
from kvstore.cli.bench.trace import read_trace, unique_blocks
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import ConfigError

SIZES = (1, 2, 5, 10, 20, 50)
"""Cache sizes, percent of the trace's unique blocks."""
OFFLINE = "offline"
_EPILOG = """\
The offline row knows the future: it keeps the blocks that are wanted again soonest. A request hits its longest
resident prefix; the ratio is hit blocks over all blocks.

--workloads needs no trace: chats, agents and questions on documents are made by seed, a switch from one of them to
another, and loops. For each size the table has the hits of the policy that a node uses over LRU's, of the seed with
which that is worst.

exit codes:
  0  done
  1  the plot could not be written
  2  a flag or the trace can't be used; the line on stderr names file, line and field
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """What one policy hit at one size."""

    policy: str
    size_percent: int
    hit_ratio: float
    """Hit blocks over all blocks, a request's hits being its longest resident prefix."""
    default: bool
    """Whether a node uses this policy."""


def add(group: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    parser = group.add_parser(
        "eviction",
        help="replay a request trace: prefix hits by eviction policy and cache size",
        description="Replay a request trace against each eviction policy, for caches of 1 to 50 percent of its"
        " different blocks, and print the ratio of blocks that they hit.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        nargs="?",
        help="a file with one JSON object a line: timestamp, input_length, … hash_ids",
    )
    parser.add_argument(
        "--workloads", action="store_true", help="instead of a trace: a node's policy against LRU on generated prompts"
    )
    add_output_flags(parser, "write a plot of it, as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replay, print, and return the exit code."""
    if options.workloads:
        if options.trace is not None or options.plot is not None:
            raise ConfigError("--workloads goes without TRACE and --plot")
        return eviction_workloads.run(SIZES, as_json=options.json)
    if options.trace is None:
        raise ConfigError("a TRACE is missing, or --workloads")
    requests = read_trace(Path(options.trace))
    prompts = [request.hash_ids for request in requests]
    unique = unique_blocks(requests)
    machine = this_machine()
    progress = Progress("kvstore bench eviction", len(prompts) * len(SIZES) * (len(POLICIES) + 1))
    figures = measure(prompts, unique, POLICIES, progress.advance)
    progress.end()
    if options.plot is not None:
        _write_plot(Path(options.plot), figures)
    if options.json:
        print(json.dumps({"machine": asdict(machine), "eviction": [asdict(figure) for figure in figures]}, indent=2))
        return 0
    blocks = sum(map(len, prompts))
    print(machine.line())
    print(f"{len(prompts):,} requests, {blocks:,} blocks, {unique:,} of them different")
    _print(figures)
    return 0


def measure(
    prompts: list[tuple[int, ...]],
    unique: int,
    policies: Mapping[str, Callable[[], EvictionPolicy]],
    progress: Callable[[int], None],
) -> list[Figure]:
    """Every policy, and the offline one last, at every size."""
    blocks = sum(map(len, prompts))
    figures = []
    for name in (*policies, OFFLINE):
        for size in SIZES:
            pages = max(1, unique * size // 100)
            if name == OFFLINE:
                hits = hit_blocks_offline(prompts, pages, progress)
            else:
                hits = hit_blocks(prompts, pages, policies[name](), progress)
            figures.append(Figure(name, size, hits / blocks, name == DEFAULT_POLICY))
    return figures


def _by_policy(figures: list[Figure]) -> dict[str, list[Figure]]:
    rows: dict[str, list[Figure]] = {}
    for figure in figures:
        rows.setdefault(figure.policy, []).append(figure)
    return rows


def _print(figures: list[Figure]) -> None:
    table = figures_table("policy", *(f"{size} %" for size in SIZES), left=("policy",))
    for policy, row in _by_policy(figures).items():
        name = f"{policy} (default)" if row[0].default else policy
        table.add_row(name, *(f"{figure.hit_ratio:.4f}" for figure in row))
    print_table(table)


def _write_plot(path: Path, figures: list[Figure]) -> None:
    lines = {
        policy: [(float(place), figure.hit_ratio) for place, figure in enumerate(row)]
        for policy, row in _by_policy(figures).items()
    }
    plot = line_plot(
        "Prefix hits by eviction policy",
        "cache size, percent of the different blocks",
        "hit blocks / all blocks",
        [f"{size} %" for size in SIZES],
        lines,
    )
    write_plot(path, plot)
