"""``kvstore plan TRACE --fleet N``: simulates a fleet on a trace, and says which part saturates first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvstore.cli.bench.trace import TracedRequest
from kvstore.cli.plan.parts import Rates
from kvstore.cli.plan.report import SATURATED, Report, more, report
from kvstore.cli.plan.routers import ROUTERS
from kvstore.cli.plan.simulation import Fleet, Simulation
from kvstore.cli.plan.workload import FleetRequest, forking_agents, trace_copies
from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_table
from kvstore.errors import InvalidRequestError
from kvstore.units import format_size, parse_size

MOST_NODES, MOST_SHARDS = 1000, 64
_LEAST_BLOCKS = 4
"""Of an arena: fewer say nothing."""


def add_flags(plan: argparse.ArgumentParser) -> None:
    """Add the flags of a fleet."""
    fleet = plan.add_argument_group("a fleet")
    fleet.add_argument(
        "--fleet", metavar="N", type=int, help=f"simulate so many nodes, each with --arena (1 to {MOST_NODES})"
    )
    fleet.add_argument(
        "--shards", metavar="N", type=int, default=1,
        help=f"servers of Redis, with --redis together; 0: none (most: {MOST_SHARDS}; default: %(default)s)",
    )  # fmt: skip
    fleet.add_argument(
        "--router", choices=sorted(ROUTERS), default="random", help="who gets a request (default: %(default)s)"
    )
    fleet.add_argument("--objects", action="store_true", help="with object storage, as large as need be")
    fleet.add_argument(
        "--workload",
        choices=("copies", "trace", "agents"),
        default="copies",
        help="a copy of the trace for each node, the trace once for all, or agents that fork (default: %(default)s)",
    )
    fleet.add_argument(
        "--common",
        metavar="TOKENS",
        type=int,
        default=2000,
        help="a system prompt before all prompts (default: %(default)s)",
    )
    fleet.add_argument(
        "--requests",
        metavar="N",
        type=int,
        default=20_000,
        help="requests of all nodes together, at most (default: %(default)s)",
    )
    fleet.add_argument(
        "--engine-page", metavar="SIZE", default="2MiB", help="a page of the engines (default: %(default)s)"
    )
    fleet.add_argument(
        "--engines", metavar="N", type=int, default=Rates().engines, help="beside each node (default: %(default)s)"
    )
    fleet.add_argument(
        "--link", metavar="SIZE", default="12GB", help="a second, of each host's network (default: %(default)s)"
    )


def run(options: argparse.Namespace, trace: Sequence[TracedRequest], block_bytes: int) -> int:
    """Simulate, print, and return the exit code."""
    fleet = _fleet(options, block_bytes)
    changes = _changes(fleet)
    steps = options.requests * (1 + len(changes))
    progress = Progress("kvstore plan --fleet", steps)

    def simulate(one: Fleet) -> Report:
        return report(Simulation(one).run(_requests(options, trace), progress.advance))

    found = simulate(fleet)
    compared = more(found, [(what, simulate(each)) for what, each in changes])
    progress.end()
    if options.json:
        brings = [{"change": what, "saved_tokens": saved, "first_wanted": part} for what, saved, part in compared]
        print(json.dumps(found.as_json() | {"changes": brings}, indent=2))
        return 0
    _print(found, fleet, compared)
    return 0


def _fleet(options: argparse.Namespace, block_bytes: int) -> Fleet:
    limits = {
        "fleet": (1, MOST_NODES),
        "shards": (0, MOST_SHARDS),
        "common": (0, 1 << 20),
        "requests": (1, 10**7),
        "engines": (1, 64),
    }
    for flag, (least, most) in limits.items():
        if not least <= getattr(options, flag) <= most:
            raise InvalidRequestError(f"--{flag} is {getattr(options, flag)}, it must be from {least} to {most}")
    arena, redis, page, link = (
        parse_size(getattr(options, name)) for name in ("arena", "redis", "engine_page", "link")
    )
    if not page >= 1:
        raise InvalidRequestError(f"--engine-page is {options.engine_page}, it must be more than 0")
    if link < 1:
        raise InvalidRequestError(f"--link is {options.link}, it must be more than 0")
    if arena < _LEAST_BLOCKS * block_bytes:
        raise InvalidRequestError(
            f"--arena is {format_size(arena)}, the least for blocks of {format_size(block_bytes)} is"
            f" {format_size(_LEAST_BLOCKS * block_bytes)}"
        )
    shards = options.shards if redis else 0
    rates = replace(Rates(), engines=options.engines, prefill_tokens=options.prefill_rate, link_bytes=float(link))
    tokens = options.block_tokens
    return Fleet(
        options.fleet, shards, arena, redis, block_bytes, min(page, block_bytes), tokens, options.router,
        options.objects, rates,
    )  # fmt: skip


def _requests(options: argparse.Namespace, trace: Sequence[TracedRequest]) -> Iterator[FleetRequest]:
    common = {"common_tokens": options.common, "block_tokens": options.block_tokens}
    if options.workload == "agents":
        return forking_agents(8 * options.fleet, options.requests, 1, **common)
    copies = options.fleet if options.workload == "copies" else 1
    return trace_copies(trace, copies, max(1, options.requests // copies), **common)


def _changes(fleet: Fleet) -> list[tuple[str, Fleet]]:
    found = [("1 GiB more of each arena", replace(fleet, arena_bytes=fleet.arena_bytes + (1 << 30)))]
    if fleet.shards:
        each = fleet.redis_bytes // fleet.shards
        one = replace(fleet, shards=fleet.shards + 1, redis_bytes=fleet.redis_bytes + each)
        found.append((f"1 shard more, of {format_size(each)}", one))
    found += [(f"router: {router}", replace(fleet, router=router)) for router in ROUTERS if router != fleet.router]
    return found


def _print(found: Report, fleet: Fleet, compared: Sequence[tuple[str, float, float]]) -> None:
    print(
        f"{found.requests:,} requests to {fleet.nodes:,} nodes ({format_size(fleet.arena_bytes)} of arena each),"
        f" {fleet.shards} shards ({format_size(fleet.redis_bytes)} together), router: {fleet.router}"
    )
    print(
        f"hits: {found.arena_hits:.1%} arena, {found.redis_hits:.1%} Redis, {found.object_hits:.1%} objects;"
        f" {found.saved_tokens:.1%} of all tokens not computed; {found.computed_tokens:,.0f} tokens a second computed"
    )
    print(
        f"{found.stored_gigabytes:.2f} GB of new KV a second; {found.late:.1%} of all blocks looked up too late,"
        f" {found.unshared:.1%} of the new ones not shared"
    )
    print()
    table = figures_table(
        "part", "parts", "busiest", "wanted", "operations/s", "GB/s", "wait p50", "wait p99", "saturates at",
        left=("part",),
    )  # fmt: skip
    for part in found.parts:
        most = part.most_nodes(fleet.nodes)
        table.add_row(
            part.name, f"{part.parts:,}", f"{part.busy:.1%}", f"{part.wanted:.1%}", f"{part.operations:,.0f}",
            f"{part.gigabytes:.3f}", f"{part.wait_p50 * 1e3:.2f} ms", f"{part.wait_p99 * 1e3:.2f} ms",
            "–" if most is None else f"{most:,} nodes" if most else "under 1 node",
        )  # fmt: skip
    print_table(table)
    first = found.first
    print()
    print(
        f"first: {first.name}, of whose time {first.wanted:.1%} is wanted (it saturates at {SATURATED:.0%});"
        f" it was busy {first.busy:.1%} of it"
    )
    table = figures_table("with", "tokens not computed", f"wanted of a {first.name}", left=("with",))
    for what, saved, wanted in compared:
        table.add_row(what, f"{saved:+.2%}", f"{wanted:.1%}")
    print_table(table)
