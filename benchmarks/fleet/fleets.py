"""Fleets of 1 to 1,000 nodes on a request trace, simulated as `kvstore plan --fleet` does: figures, and three plots.

    python benchmarks/fleet/fleets.py simulate TRACE    # benchmarks/results/fleet.json, beside what is there already
    python benchmarks/fleet/fleets.py plot              # from that, benchmarks/results/fleet-*.svg

Each node is asked a copy of the trace with contents of its own, behind a system prompt of 2,000 tokens that all have.
A simulation of 1,000 nodes takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.cli.bench.plot import line_plot, write_plot
from kvstore.cli.bench.trace import read_trace
from kvstore.cli.plan.report import report
from kvstore.cli.plan.simulation import Fleet, Simulation
from kvstore.cli.plan.workload import trace_copies

RESULTS = Path(__file__).resolve().parents[1] / "results"
DATA = RESULTS / "fleet.json"
BLOCK_TOKENS, TOKEN_BYTES, PAGE_BYTES = 512, 32 << 10, 2 << 20
COMMON = 2000
GIB = 1 << 30
ROUTED = (1, 10, 100)
"""Nodes, where routers are compared: each is asked five times as much there, or nobody comes back to anything."""
NODES = (10, 100, 1000)
SHARDS = (4, 16, 64)
ARENAS = (4, 16, 64)
ROUTERS = ("random", "sticky", "prefix")
BELOW = {"nothing": (0, False), "Redis": (8, False), "object storage": (0, True), "both": (8, True)}
"""Below the arenas of ten nodes: shards of Redis, and whether there is object storage."""


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation."""

    group: str
    nodes: int
    shards: int
    requests: int
    """Of each node."""
    router: str = "random"
    arena_gib: int = 64
    objects: bool = False
    shard_gib: int = 64

    @property
    def name(self) -> str:
        objects = ", objects" if self.objects else ""
        fleet = f"{self.nodes} nodes of {self.arena_gib} GiB, {self.shards} shards{objects}, {self.router}"
        return f"{self.group}: {fleet}, {self.requests} requests each"


def cases(each: int) -> Iterator[Case]:
    """All of them, the small ones first."""
    few, many = ROUTED[:2], ROUTED[2:]
    for nodes in NODES[:2]:
        yield from (Case("shards", nodes, shards, each) for shards in SHARDS)
    for nodes in few:
        yield from (Case("router", nodes, 16, 5 * each, router) for router in ROUTERS)
    for arena in ARENAS:
        for shards, objects in BELOW.values():
            yield Case("arena", 10, shards, 5 * each, "random", arena, objects)
    for nodes in NODES[2:]:
        yield from (Case("shards", nodes, shards, each) for shards in reversed(SHARDS))
    for nodes in many:
        yield from (Case("router", nodes, 16, 5 * each, router) for router in ROUTERS)


def simulate(trace: str, case: Case) -> dict[str, Any]:
    """Its figures, and how long the simulation took."""
    block = BLOCK_TOKENS * TOKEN_BYTES
    redis = case.shards * case.shard_gib * GIB
    fleet = Fleet(
        case.nodes, case.shards, case.arena_gib * GIB, redis, block, PAGE_BYTES, BLOCK_TOKENS, case.router, case.objects
    )
    requests = trace_copies(
        read_trace(Path(trace)), case.nodes, case.requests, common_tokens=COMMON, block_tokens=BLOCK_TOKENS
    )
    begun = time.process_time()
    found = report(Simulation(fleet).run(requests)).as_json()
    return found | {"group": case.group, "arena_gib": case.arena_gib, "objects": case.objects,
                    "simulated_in": round(time.process_time() - begun, 1)}  # fmt: skip


def run(trace: str, each: int, most_nodes: int) -> None:
    """Simulate what is not there yet, and write it down as it comes."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    left = [case for case in cases(each) if case.name not in data and case.nodes <= most_nodes]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        for case, found in zip(left, processes.map(simulate, [trace] * len(left), left), strict=True):
            data[case.name] = found
            DATA.write_text(json.dumps(data, indent=1) + "\n")
            print(f"{case.name}: {found['saved_tokens']:.1%} not computed, first: {found['first']}, in"
                  f" {found['simulated_in']} s of CPU", flush=True)  # fmt: skip


def plots(data: dict[str, Any]) -> dict[str, str]:
    """SVG documents, by name of file."""
    rows = list(data.values())

    def lines(group: str, ticks: Sequence[int], of: str, pick: Any, y: Any) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["group"] == group and row[of] in ticks:
                found.setdefault(pick(row), []).append((float(ticks.index(row[of])), y(row)))
        return {name: sorted(points) for name, points in found.items()}

    def below(row: dict[str, Any]) -> str:
        return next(name for name, what in BELOW.items() if what == (row["shards"], row["objects"]))

    def saved(row: dict[str, Any]) -> float:
        return 100 * float(row["saved_tokens"])

    def shard(row: dict[str, Any]) -> float:
        return 100 * next(float(part["busy"]) for part in row["parts"] if part["name"] == "shard")

    by_router = lines("router", ROUTED, "nodes", lambda row: row["router"], saved)
    by_shards = lines("shards", SHARDS, "shards", lambda row: f"{row['nodes']:,} nodes", shard)
    by_arena = lines("arena", ARENAS, "arena_gib", below, saved)
    return {
        "fleet-routers": line_plot("What routers save", "nodes, with 16 shards", "% of tokens not computed",
                                   [f"{nodes:,}" for nodes in ROUTED], by_router),
        "fleet-shards": line_plot("The busiest shard", "shards", "% of its time", list(map(str, SHARDS)), by_shards),
        "fleet-arenas": line_plot("What is below the arenas of ten nodes", "GiB of each arena",
                                  "% of tokens not computed", list(map(str, ARENAS)), by_arena),
    }  # fmt: skip


def main() -> None:
    """Parse the arguments, and do that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    simulating = commands.add_parser("simulate")
    simulating.add_argument("trace", metavar="TRACE")
    simulating.add_argument(
        "--each",
        metavar="N",
        type=int,
        default=30,
        help="requests of each node (%(default)s), five times as many of fewer nodes",
    )
    simulating.add_argument("--most-nodes", metavar="N", type=int, default=1000, help="leave larger fleets out")
    commands.add_parser("plot")
    options = parser.parse_args()
    if options.command == "simulate":
        run(options.trace, options.each, options.most_nodes)
        return
    for name, plot in plots(json.loads(DATA.read_text())).items():
        write_plot(RESULTS / f"{name}.svg", plot)
        print(RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()
