"""What benchmarks/results/fleet.json says: its plots, and the tables that docs/scaling.md has.

python benchmarks/fleet/shown.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.cli.bench.plot import line_plot, write_plot

RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = dict[str, Any]
Lines = dict[str, list[tuple[float, float]]]
TIERS = {"arena_hits": "arenas", "redis_hits": "Redis", "object_hits": "object storage"}
BELOW = {(0, False): "nothing", (8, False): "Redis", (0, True): "object storage", (8, True): "both"}


def read() -> list[Row]:
    """All simulations."""
    return list(json.loads((RESULTS / "fleet.json").read_text()).values())


def ticks_of(rows: Sequence[Row], group: str, of: str) -> list[Any]:
    """The values that a field has in a group, in their order."""
    return list(dict.fromkeys(row[of] for row in rows if row["group"] == group))


def lines(
    rows: Sequence[Row], group: str, of: str, name: Callable[[Row], str], y: Callable[[Row], float | None]
) -> Lines:
    """By name the points of a group."""
    ticks = ticks_of(rows, group, of)
    found: Lines = {}
    for row in rows:
        if row["group"] == group and (value := y(row)) is not None:
            found.setdefault(name(row), []).append((float(ticks.index(row[of])), value))
    return {each: sorted(points) for each, points in found.items()}


def saved(row: Row) -> float:
    """Tokens not computed, in per cent."""
    return 100 * float(row["saved_tokens"])


def part(row: Row, name: str) -> Row:
    """The figures of the busiest of some parts."""
    return next(each for each in row["parts"] if each["name"] == name)


def shard(figure: str, scale: float = 1.0) -> Callable[[Row], float | None]:
    """A figure of the busiest shard."""

    def of(row: Row) -> float | None:
        value = part(row, "shard")[figure]
        return None if value is None else scale * float(value)

    return of


def nodes_of(row: Row) -> str:
    """As lines are named."""
    return f"{row['nodes']:,} node{'s' if row['nodes'] > 1 else ''}"


def changed(row: Row) -> str:
    """What a simulation has more than the one that it is compared with."""
    if row["arena_gib"] > 4:
        return "1 GiB more of each arena"
    if row["shards"] > 16:
        return "1 shard more"
    return "as it is" if row["router"] == "random" else str(row["router"])


CHANGES = ("as it is", "1 GiB more of each arena", "1 shard more", "sticky", "prefix")


def plots(rows: Sequence[Row]) -> dict[str, str]:
    """SVG documents, by name of file."""

    def by_shards(title: str, y_label: str, y: Callable[[Row], float | None], least: int = 1) -> str:
        some = [row for row in rows if row["nodes"] >= least]
        found = lines(some, "size", "shards", nodes_of, y)
        return line_plot(title, "shards", y_label, [str(each) for each in ticks_of(some, "size", "shards")], found)

    hits: Lines = {}
    for field, tier in TIERS.items():
        both = [row for row in rows if (row["shards"], row["objects"]) == (8, True)]
        hits |= lines(
            both, "arena", "arena_gib", lambda row, tier=tier: tier, lambda row, field=field: 100 * row[field]
        )
    arenas = [str(each) for each in ticks_of(rows, "arena", "arena_gib")]
    more = [row | {"changed": changed(row)} for row in rows if row["group"] == "more"]
    more.sort(key=lambda row: CHANGES.index(row["changed"]))
    not_computed = "% of tokens not computed"
    links: Lines = {}
    for whose in ("node", "shard"):
        links |= lines(
            [row for row in rows if row["nodes"] > 1], "size", "shards",
            lambda row, whose=whose: f"{nodes_of(row)}: a {whose}'s",
            lambda row, whose=whose: part(row, f"{whose}'s link")["gigabytes"],
        )  # fmt: skip
    return {
        "fleet-routers": line_plot("What routers save", "nodes, with 16 shards", not_computed,
                                   [f"{nodes:,}" for nodes in ticks_of(rows, "router", "nodes")],
                                   lines(rows, "router", "nodes", lambda row: row["router"], saved)),
        "fleet-workloads": line_plot("What they save, by what ten nodes are asked", "router", not_computed,
                                     ticks_of(rows, "workload", "router"),
                                     lines(rows, "workload", "router", lambda row: row["workload"], saved)),
        "fleet-shards": by_shards("The busiest shard", "% of its time", shard("busy", 100)),
        "fleet-saturation": by_shards("Shards are busy for 80 % of their time", "with so many nodes",
                                      shard("saturates_at_nodes"), 10),
        "fleet-operations": by_shards("What the busiest shard is asked", "commands a second", shard("operations")),
        "fleet-traffic": line_plot("What the busiest links carry", "shards", "GB/s",
                                   [str(each) for each in ticks_of(rows, "size", "shards")], links),
        "fleet-waits": by_shards("What waits for a shard", "99th percentile, ms", shard("wait_p99", 1e3)),
        "fleet-arenas": line_plot("What is below the arenas of ten nodes", "GiB of each arena", not_computed, arenas,
                                  lines(rows, "arena", "arena_gib",
                                        lambda row: BELOW[row["shards"], row["objects"]], saved)),
        "fleet-hits": line_plot("Where ten nodes find their blocks", "GiB of each arena", "% of all blocks", arenas,
                                hits),
        "fleet-more": line_plot("What more would bring", "arenas of 4 GiB, 16 shards, random", not_computed, CHANGES,
                                lines(more, "more", "changed", nodes_of, saved)),
    }  # fmt: skip


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of all tables of the docs, as Markdown."""
    yield (
        "| nodes | shards | new KV in arenas | to and from Redis | busiest shard | wanted of it | not done | p99 wait |"
        " first | saturates at |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: (row["nodes"], row["shards"])):
        if row["group"] == "size":
            of, most = part(row, "shard"), row["first_saturates_at_nodes"]
            wanted = "–" if of["wanted"] is None else f"{of['wanted']:,.0%}"
            undone = f"over {row['unshared']:.0%}" if of["wanted"] is None else f"{1 - of['busy'] / of['wanted']:.0%}"
            until = "–" if most is None else f"{most:,} nodes" if most else "under 1 node"
            yield (
                f"| {row['nodes']:,} | {row['shards']} | {row['stored_gigabytes']:,.1f} GB/s |"
                f" {of['all_gigabytes']:.1f} GB/s | {of['busy']:.0%} | {wanted} | {undone} |"
                f" {1e3 * of['wait_p99']:,.0f} ms | {row['first']} | {until} |"
            )
    yield ""
    yield "| nodes | as it is | 1 GiB more of each arena | 1 shard more | router: sticky | router: prefix |"
    yield "|---|---|---|---|---|---|"
    for nodes in ticks_of(rows, "more", "nodes"):
        found = {changed(row): saved(row) for row in rows if row["group"] == "more" and row["nodes"] == nodes}
        now = found["as it is"]
        yield f"| {nodes:,} | {now:.1f} % | " + " | ".join(f"{found[each] - now:+.2f}" for each in CHANGES[1:]) + " |"
    yield ""
    yield "| ten nodes are asked | random | sticky | prefix |"
    yield "|---|---|---|---|"
    for workload in ticks_of(rows, "workload", "workload"):
        found = {
            row["router"]: saved(row) for row in rows if row["group"] == "workload" and row["workload"] == workload
        }
        yield f"| {workload} | " + " | ".join(f"{each:.1f} %" for each in found.values()) + " |"


def main() -> None:
    """Write the plots, and print the tables."""
    rows = read()
    for name, plot in plots(rows).items():
        write_plot(RESULTS / f"{name}.svg", plot)
    print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()
