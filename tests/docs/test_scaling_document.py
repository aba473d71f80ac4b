"""The table of counts in docs/scaling.md is what the model says, which is held against real servers elsewhere."""

from __future__ import annotations

from pathlib import Path

from kvstore.cli.plan import costs
from kvstore.cli.plan.call_shapes import typical_shape
from kvstore.cli.plan.costs import Cost

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
PAGES, BUCKETS = 16, 1024
SIZES = {"64 KiB": 64 << 10, "512 KiB": 512 << 10, "2 MiB": 2 << 20}


def row(size: str, kind: str, call: str, cost: Cost) -> str:
    """One line of the table."""
    counts = f"{cost.round_trips} | {cost.commands:,} | {cost.scripts:,}"
    return f"| {size} | {kind} | {call} | {counts} | {cost.sent_bytes:,} | {cost.received_bytes:,} |"


def rows() -> list[str]:
    """All of them."""
    found = []
    for size, length in SIZES.items():
        for kind in ("one server", "Cluster"):
            shape = typical_shape(PAGES, length, BUCKETS, cluster=kind == "Cluster")
            calls = {
                "lookup, misses": costs.lookup(shape, 0),
                "lookup, hits": costs.lookup(shape, PAGES),
                "store": costs.store(shape),
                "load": costs.load(shape),
                "use told": costs.touch(shape),
            }
            found += [row(size, kind, call, cost) for call, cost in calls.items()]
    return found


def test_the_table_of_counts_is_what_calls_cost() -> None:
    written = [
        line for line in DOCUMENT.read_text().splitlines() if " | one server | " in line or " | Cluster | " in line
    ]
    assert written == rows(), "\n".join(rows())
