"""Fleets of 1 to 1,000 nodes, simulated as `kvstore plan --fleet` does, on a request trace.

    python benchmarks/fleet/fleets.py TRACE    # benchmarks/results/fleet.json, beside what is there already
    python benchmarks/fleet/shown.py           # from that, benchmarks/results/fleet-*.svg, and the tables of the docs

Each node is asked a copy of the trace with contents of its own, behind a system prompt of 2,000 tokens that all have,
where nothing else is said. A simulation of 1,000 nodes takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.cli.bench.trace import TracedRequest, read_trace
from kvstore.cli.plan.report import report
from kvstore.cli.plan.simulation import Fleet, Simulation
from kvstore.cli.plan.workload import FleetRequest, forking_agents, trace_copies

DATA = Path(__file__).resolve().parents[1] / "results" / "fleet.json"
BLOCK_TOKENS, TOKEN_BYTES, PAGE_BYTES = 512, 32 << 10, 2 << 20
COMMON = 2000
GIB = 1 << 30
NODES, SHARDS = (1, 10, 100, 1000), (1, 4, 16, 64)
ARENAS = (4, 16, 64)
ROUTERS = ("random", "sticky", "prefix")
BELOW = ((0, False), (8, False), (0, True), (8, True))
"""Below the arenas of ten nodes: shards of Redis, and whether there is object storage."""
WORKLOADS = ("the trace", "copies", "copies, a prompt in common", "agents")
MORE = {10: 300, 100: 60, 1000: 15}
"""Nodes, and requests of each, where it is asked what more would bring: they fill an arena of 4 GiB, if just so."""


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
    workload: str = "copies, a prompt in common"
    shard_gib: int = 64

    @property
    def name(self) -> str:
        objects = ", objects" if self.objects else ""
        fleet = f"{self.nodes} nodes of {self.arena_gib} GiB, {self.shards} shards{objects}, {self.router}"
        return f"{self.group}: {fleet}, {self.requests} requests each of {self.workload}"


def cases() -> Iterator[Case]:
    """All of them, the small ones first."""
    for nodes in NODES[:-1]:
        yield from (Case("size", nodes, shards, 30) for shards in SHARDS)
    for nodes in (1, 10, 100):
        yield from (Case("router", nodes, 16, 150, router) for router in ROUTERS)
    for workload in WORKLOADS:
        yield from (Case("workload", 10, 16, 150, router, workload=workload) for router in ROUTERS)
    for arena in ARENAS:
        yield from (Case("arena", 10, shards, 150, "random", arena, objects) for shards, objects in BELOW)
    for nodes, requests in MORE.items():
        if nodes == NODES[-1]:
            yield from (Case("size", nodes, shards, 30) for shards in reversed(SHARDS))
        for router in ROUTERS:
            yield Case("more", nodes, 16, requests, router, 4)
        yield Case("more", nodes, 16, requests, "random", 5)
        yield Case("more", nodes, 17, requests, "random", 4)


def requests_of(trace: Sequence[TracedRequest], case: Case) -> Iterator[FleetRequest]:
    """What a fleet is asked."""
    common = {"common_tokens": COMMON, "block_tokens": BLOCK_TOKENS}
    total = case.nodes * case.requests
    match case.workload:
        case "the trace":
            return trace_copies(trace, 1, total, common_tokens=0, block_tokens=BLOCK_TOKENS)
        case "copies":
            return trace_copies(trace, case.nodes, case.requests, common_tokens=0, block_tokens=BLOCK_TOKENS)
        case "agents":
            return forking_agents(8 * case.nodes, total, 1, **common)
    return trace_copies(trace, case.nodes, case.requests, **common)


def simulate(trace: str, case: Case) -> dict[str, Any]:
    """Its figures, and how long the simulation took."""
    block = BLOCK_TOKENS * TOKEN_BYTES
    redis = case.shards * case.shard_gib * GIB
    fleet = Fleet(
        case.nodes, case.shards, case.arena_gib * GIB, redis, block, PAGE_BYTES, BLOCK_TOKENS, case.router, case.objects
    )
    begun = time.process_time()
    found = report(Simulation(fleet).run(requests_of(read_trace(Path(trace)), case)))
    row = found.as_json() | asdict(case) | {"requests": found.requests}
    for part, load in zip(found.parts, row["parts"], strict=True):
        load["least_busy"] = min((busy for busy, _, _ in part.each), default=part.busy)
        load["all_gigabytes"] = sum(gigabytes for _, _, gigabytes in part.each)
        load["saturates_at_nodes"] = part.most_nodes(case.nodes)
        del load["each"]
    return row | {"simulated_in": round(time.process_time() - begun, 1)}


def main() -> None:
    """Simulate what is not there yet, and write it down as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--most-nodes", metavar="N", type=int, default=1000, help="leave larger fleets out")
    options = parser.parse_args()
    data = json.loads(DATA.read_text()) if DATA.exists() else {}
    left = [case for case in cases() if case.name not in data and case.nodes <= options.most_nodes]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        for case, found in zip(left, processes.map(simulate, [options.trace] * len(left), left), strict=True):
            data[case.name] = found
            DATA.write_text(json.dumps(data, indent=1) + "\n")
            print(f"{case.name}: {found['saved_tokens']:.1%} not computed, first: {found['first']}, in"
                  f" {found['simulated_in']} s of CPU", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
