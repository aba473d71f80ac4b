from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.gpu.preference import LONG_RUN, MANY_RUNS, SHORT_RUN, preference

KIB = 1 << 10


@given(run_bytes=st.integers(1, 64 << 20), runs=st.integers(1, 100_000))
def test_the_copy_engine_has_every_store_and_one_call_is_its_first_way(run_bytes: int, runs: int) -> None:
    order = preference("gather", run_bytes, runs)

    assert (order[0], order[-1]) == ("batch", "kernel")


@pytest.mark.parametrize(
    ("run_bytes", "runs", "first"),
    [
        (28 * KIB - 1, 16, "kernel"),
        (28 * KIB, 16, "batch"),
        (28 * KIB, 100_000, "batch"),
        (8 * KIB, 15, "batch"),
        (1, 100_000, "kernel"),
        (2048 * KIB, 8, "batch"),
    ],
)
def test_a_load_takes_a_kernel_for_many_short_runs_only(run_bytes: int, runs: int, first: str) -> None:
    assert (SHORT_RUN, MANY_RUNS) == (28 * KIB, 16)
    assert preference("scatter", run_bytes, runs)[0] == first


def test_where_no_kernel_is_many_short_runs_come_in_by_whole_pages() -> None:
    assert preference("scatter", SHORT_RUN - 1, MANY_RUNS)[1] == "staged"


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_where_one_call_is_not_to_be_had_long_runs_go_one_by_one_and_others_through_a_buffer(direction: str) -> None:
    assert preference(direction, LONG_RUN, 8)[1:] == ("run by run", "staged", "kernel")
    assert preference(direction, LONG_RUN - 1, 8)[1:] == ("staged", "run by run", "kernel")


@given(st.sampled_from(["gather", "scatter"]), st.integers(1, 64 << 20), st.integers(1, 100_000))
def test_every_strategy_has_its_place(direction: str, run_bytes: int, runs: int) -> None:
    assert sorted(preference(direction, run_bytes, runs)) == ["batch", "kernel", "run by run", "staged"]
