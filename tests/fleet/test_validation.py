"""The simulated fleet is held to account: the same requests to real nodes and real Redis servers, by their counters.

A short form is in the suite; FLEET=1 (``make test-fleet``) has 1, 4 and 16 nodes with 1, 3 and 6 servers, and prints a
table. TEST_TRACE=FILE has it use that trace instead of a made one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from fleet_comparison import COUNTED, Compared, chats, compare, paced

from kvstore.cli.bench.trace import read_trace

WHOLE = bool(os.environ.get("FLEET"))
TRACE = os.environ.get("TEST_TRACE")
POINTS, PER_CENT = 3.0, 10.0
"""Most points of a hit ratio, and per cent of a count, between real and simulated."""


def table(rows: Sequence[Compared]) -> str:
    """All that was compared, as Markdown."""
    names = ["nodes", "shards", "router", "arena hits", "Redis hits", *COUNTED]
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    for row in rows:
        off = row.off()
        hits = [
            f"{getattr(row.real, tier) / row.real.blocks:.1%} ({points:+.1f})" for tier, points in row.points.items()
        ]
        counts = [f"{getattr(row.real, name):,} ({off[name]:+.1f} %)" for name in COUNTED]
        lines.append(" | ".join([str(row.nodes), str(row.shards), row.router, *hits, *counts]))
    return "\n".join(f"| {line} |" for line in lines)


def hold(row: Compared, names: Sequence[str] = COUNTED) -> None:
    """Hit ratios and counts are the same, within what is allowed. Of under 200 of anything nothing is said."""
    shown = table([row])
    assert all(abs(points) <= POINTS for points in row.points.values()), shown
    off = row.off(200)
    assert not {name: off[name] for name in names if name in off and abs(off[name]) > PER_CENT}, shown
    assert row.real.late == 0


@pytest.mark.parametrize(("nodes", "shards"), [(1, 1), (2, 3)])
def test_a_small_fleet(short_folder: Path, shm_folder: Path, nodes: int, shards: int) -> None:
    """One request after the other, so that a busy machine changes nothing; arenas and Redis are far too small.

    How many uses are told at once does depend on it, so what that costs is left out.
    """
    requests = chats(nodes, 160 // nodes, 0.0)
    row = compare(
        short_folder, shm_folder, nodes, shards, requests, arena_bytes=4 << 20, redis_bytes=12 << 20, settle=True
    )
    assert row.real.blocks > 1500
    assert row.real.evicted > 200
    hold(row, ("blocks", "stored", "evicted", "shared", "written", "redis_evicted", "sent_bytes"))


@pytest.mark.skipif(not WHOLE, reason="takes ten minutes: make test-fleet")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("nodes", "shards", "router"),
    [*((nodes, shards, "random") for nodes in (1, 4, 16) for shards in (1, 3, 6)), (4, 3, "sticky"), (16, 6, "sticky")],
)
def test_a_fleet(
    short_folder: Path, shm_folder: Path, nodes: int, shards: int, router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests come at their time, and are served beside each other."""
    each = max(40, 240 // nodes)
    pause = 0.1 * nodes**1.25  # of each node: on one machine many keep up with the times of fewer requests together
    requests = paced(read_trace(Path(TRACE)), nodes, each, pause) if TRACE else chats(nodes, each, pause)
    arena, redis = (8, max(16, 8 * nodes)) if TRACE else (3, max(8, 2 * nodes))  # MiB: far too small, both of them
    row = compare(
        short_folder, shm_folder, nodes, shards, requests,
        arena_bytes=arena << 20, redis_bytes=redis << 20, router=router,
    )  # fmt: skip
    with capsys.disabled():
        print("\n" + table([row]))
    hold(row)
