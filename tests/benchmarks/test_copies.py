"""The benchmarks of copies, on CPU tensors: strategies copy what they should, and what needs a device says so."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

Script = Callable[[str], ModuleType]
NEEDS_DEVICE = {"batch", "kernel of 24 programs", "kernel of 32 programs"}


def test_a_strategy_that_copies_other_blocks_is_not_right(script: Script) -> None:
    module, sections = script("copy_strategies"), script("device_strategies")
    work = module.Workload(module.Shape(2, 8, 64), torch.device("cpu"), 3 * 2 * 64)
    strategies, _ = module.product_strategies(work.layers, work.layout, pinned=False)
    out, into = sections.directions(work, strategies["run by run"])
    assert sections.is_right(work, out, into)

    def from_others() -> None:
        strategies["run by run"].gather(work.in_ids, work.leaving)

    def into_others() -> None:
        next(strategies["run by run"].scatter(work.coming, work.in_ids[::-1], [range(2)]))

    assert not sections.is_right(work, from_others, into)
    assert not sections.is_right(work, out, into_others)


def test_what_a_batch_costs_the_host_stands_beside_memcpy(printed_json: Callable[..., Any]) -> None:
    batches = printed_json("copy_cost", "--rounds", "1", "--run-bytes", "8")["batches"]

    assert [(batch["layers"], batch["layers_inside"], batch["pages"]) for batch in batches] == [
        (32, False, 8),
        (32, True, 8),
        (80, False, 3),
        (61, False, 16),
    ]
    for batch in batches:
        ways = {f"{name}, {way}" for name in ("staged", "run by run", "batch") for way in ("out", "in", "in by layer")}
        assert {"memcpy"} | ways <= {*batch["us"]}
        assert all(micros > 0 for micros in batch["us"].values())


def test_without_a_device_every_section_runs_or_says_why_not(printed_json: Callable[..., Any]) -> None:
    found = printed_json(
        *(
            "device",
            "--device",
            "cpu",
            "--only",
            "layouts,strategies,pin,decode,python",
            "--pages",
            "1",
            "--rounds",
            "1",
        )
    )

    assert found["device"] == "cpu"
    assert len(found["layouts"]) == 4
    for row in found["strategies"]:
        assert set(row["strategies"]) == {"staged", "run by run"}
        assert all(figures[way]["gbps"] > 0 for figures in row["strategies"].values() for way in ("out", "in", "both"))
        assert {*row["skipped"]} - {"kernel"} == NEEDS_DEVICE
    assert found["pin"] == found["decode"] == [{"skipped": "needs a CUDA device"}]
    beside = {row["strategy"]: row for row in found["python"]}
    assert {name for name, row in beside.items() if "beside_ms" in row} == {"staged", "run by run"}
    assert "first-token" not in found
