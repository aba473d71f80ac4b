from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_calls_are_measured_alone_and_beside_a_companion(printed_json: Callable[..., Any]) -> None:
    found = printed_json(
        *("beside", "python", "mixed-20", "--interval", "1", "--seconds", "0.01"),
        *("--pages", "2", "--page-bytes", str(1 << 20), "--arena", str(16 << 20)),
    )

    assert found["interval_ms"] == 1
    assert [(row["companion"], row["call"], row["as_list"]) for row in found["rows"]] == [
        (companion, call, as_list)
        for as_list in (False, True)
        for companion in ("python", "mixed-20")
        for call in ("store", "load")
    ]
    assert all(row["calls"] >= 1 and row["alone_ms"] > 0 and row["beside_ms"] > 0 for row in found["rows"])
    assert any(row["beside_handovers"] for row in found["rows"])
