"""The benchmarks of copies, on CPU tensors: strategies copy what they should, and what needs a device says so."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

Script = Callable[[str], ModuleType]
NEEDS_DEVICE = {"batched", "batched, merged", "few programs (12)", "few programs (32)"}


@pytest.mark.parametrize(("layers_inside", "merged"), [(False, False), (True, False), (True, True)])
def test_one_batched_call_is_told_where_every_run_is(script: Script, layers_inside: bool, merged: bool) -> None:
    module = script("copy_strategies")
    work = module.Workload(module.Shape(3, 8, 64, layers_inside), torch.device("cpu"), 3 * 3 * 64)

    copies = module.Batched(work.layers, merged=merged).describe_copies(work.out_ids, work.leaving)
    for inside, outside, size in zip(copies.inside, copies.outside, copies.sizes, strict=True):
        ctypes.memmove(int(outside), int(inside), int(size))

    assert len(work.leaving) == 3
    assert len(copies.sizes) == (3 if merged else 9)
    assert [page.tobytes() for page in work.leaving] == [work.content(block) for block in work.out_ids]


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


def test_what_queueing_a_batch_costs_stands_beside_memcpy(printed_json: Callable[..., Any]) -> None:
    batches = printed_json("copy_cost", "--rounds", "1", "--run-bytes", "8")["batches"]

    assert [(batch["layers"], batch["pages"]) for batch in batches] == [(32, 8), (80, 3), (61, 16)]
    for batch in batches:
        assert {"memcpy", "staged, out", "staged, in", "run by run, out", "run by run, in", "descriptors"} <= {
            *batch["us"]
        }
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
