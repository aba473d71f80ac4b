"""``kvstore bench eviction --workloads``: compares a node's policy with LRU on generated prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvstore.catalog.policies import DEFAULT_POLICY, POLICIES, LeastRecentlyUsed
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.bench.replay import hit_blocks
from kvstore.cli.bench.workloads import WORKLOADS
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table

REQUESTS = 1500
"""Of each workload and seed."""
SEEDS = range(101, 109)


@dataclass(frozen=True, slots=True)
class Worst:
    """Where a node's policy does worst beside LRU, over some seeds of a workload."""

    workload: str
    size_percent: int
    of_lru: float
    """Blocks that a node's policy hits over those that LRU hits; 1 where neither hits any."""
    seed: int
    hit_ratio: float
    """Of a node's policy with this seed: hit blocks over all blocks."""


def run(sizes: Sequence[int], *, as_json: bool) -> int:
    """Measure, print, and return the exit code."""
    machine = this_machine()
    progress = Progress("kvstore bench eviction", REQUESTS * len(SEEDS) * len(WORKLOADS) * len(sizes) * 2)
    found = measure(sizes, REQUESTS, SEEDS, progress.advance)
    progress.end()
    if as_json:
        print(json.dumps({"machine": asdict(machine), "workloads": [asdict(each) for each in found]}, indent=2))
        return 0
    print(machine.line())
    print(
        f"{REQUESTS:,} requests a workload; hits of {DEFAULT_POLICY} over LRU's, the worst of seeds {SEEDS[0]} to"
        f" {SEEDS[-1]}"
    )
    table = figures_table("workload", *(f"{size} %" for size in sizes), left=("workload",))
    for workload in WORKLOADS:
        table.add_row(workload, *(f"{each.of_lru:.3f}" for each in found if each.workload == workload))
    print_table(table)
    return 0


def measure(
    sizes: Sequence[int], requests: int, seeds: Sequence[int], progress: Callable[[int], None] = lambda steps: None
) -> list[Worst]:
    """The worst seed of each workload at each size.

    Args:
        sizes: of the cache, percent of a workload's different blocks.
        requests: of each workload and seed.
        seeds: the same ones for all workloads.
        progress: told how many requests more are done.
    """
    found = []
    for workload, make in WORKLOADS.items():
        rows: dict[int, list[Worst]] = {size: [] for size in sizes}
        for seed in seeds:
            prompts = make(requests, seed)
            blocks = [block for prompt in prompts for block in prompt]
            unique = len(set(blocks))
            for size in sizes:
                pages = max(1, unique * size // 100)
                plain = hit_blocks(prompts, pages, LeastRecentlyUsed(), progress)
                hits = hit_blocks(prompts, pages, POLICIES[DEFAULT_POLICY](), progress)
                of_lru = hits / plain if plain else 1.0 + hits
                rows[size].append(Worst(workload, size, of_lru, seed, hits / len(blocks)))
        found += [min(row, key=lambda each: each.of_lru) for row in rows.values()]
    return found
