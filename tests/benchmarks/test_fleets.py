"""The simulated fleets of docs/scaling.md: its tables and plots are what the data says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvstore.cli.bench.trace import TracedRequest
from kvstore.cli.bench.workloads import chat

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_tables_are_what_was_simulated(script: Callable[[str], ModuleType]) -> None:
    shown = script("fleet.shown")
    lines = [line for line in shown.tables(shown.read()) if line]
    assert len(lines) > 20
    written = DOCUMENT.read_text().splitlines()
    assert [line for line in lines if line not in written] == [], "\n".join(lines)


def test_the_plots_are_what_was_simulated(script: Callable[[str], ModuleType]) -> None:
    """And each is shown."""
    shown = script("fleet.shown")
    for name, plot in shown.plots(shown.read()).items():
        assert (shown.RESULTS / f"{name}.svg").read_text() == plot, f"python benchmarks/fleet/shown.py: {name}"
        assert f"(../benchmarks/results/{name}.svg)" in DOCUMENT.read_text()


@pytest.mark.parametrize("place", range(12))
def test_what_ten_nodes_are_asked(script: Callable[[str], ModuleType], place: int, tmp_path: Path) -> None:
    """Each of the four workloads by each router: the trace once is as many requests as copies are."""
    fleets = script("fleet.fleets")
    cases = [case for case in fleets.cases() if case.group == "workload"]
    assert len(cases) == 12
    case = cases[place]
    trace = [
        TracedRequest(200.0 * number, 512 * len(prompt), 10, prompt) for number, prompt in enumerate(chat(1500, 7))
    ]
    requests = list(fleets.requests_of(trace, case))
    assert len(requests) == 1500
    common = [request.blocks[:4] == (-1, -2, -3, -4) for request in requests]
    assert all(common) if case.workload in ("copies, a prompt in common", "agents") else not any(common)
