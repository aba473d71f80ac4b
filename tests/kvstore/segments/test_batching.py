from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.segments import batching as plan
from kvstore.segments.batching import (
    leading_within,
    order_of_eviction,
    plan_chunks,
    plan_reads,
)
from kvstore.segments.record import padded

MIB = 1 << 20


@given(st.lists(st.integers(0, 20 * MIB), max_size=60), st.integers(MIB, 16 * MIB))
def test_chunks_hold_everything_in_order_within_bounds(lengths: list[int], most: int) -> None:
    chunks = plan_chunks(lengths, most)
    assert [index for chunk in chunks for index in chunk] == list(range(len(lengths)))
    for chunk in chunks:
        assert len(chunk) == 1 or sum(padded(lengths[index]) for index in chunk) <= most
    for before, after in pairwise(chunks):
        assert sum(padded(lengths[index]) for index in [*before, after[0]]) > most, "cut without need"


def test_a_chunk_fits_into_one_system_call() -> None:
    chunks = plan_chunks([1] * 1200)
    assert [len(chunk) for chunk in chunks] == [500, 500, 200]
    assert 2 * plan.CHUNK_RECORDS + 1 <= 1024


def test_a_chunk_may_be_full_to_the_last_byte() -> None:
    assert plan_chunks([4096, 4096, 4096], 2 * 4096) == [range(2), range(2, 3)]


def test_neighbours_are_read_together_and_others_apart() -> None:
    far = 24576 + 4096 + plan.READ_GAP_BYTES
    assert plan_reads([(4096, 4096), (8192, 100), (24576, 4096), (far, 1)]) == [range(4)]
    assert plan_reads([(4096, 4096), (8192, 100), (24576, 4096), (far + 4096, 1)]) == [range(3), range(3, 4)]
    assert plan_reads([(0, 4096), (0, 4096)]) == [range(1), range(1, 2)], "the same page twice is no run"
    assert plan_reads([]) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2 * MIB)), max_size=40))
def test_reads_are_bounded_and_cover_everything_once(steps: list[tuple[int, int]]) -> None:
    extents, at = [], 0
    for gap, length in steps:
        at += gap * 4096
        extents.append((at, length))
        at += padded(length)
    runs = plan_reads(extents)
    assert [index for run in runs for index in run] == list(range(len(extents)))
    for run in runs:
        first, last = extents[run[0]], extents[run[-1]]
        assert len(run) == 1 or last[0] + padded(last[1]) - first[0] <= plan.READ_BYTES
        for index in run[1:]:
            assert extents[index][0] - extents[index - 1][0] - padded(extents[index - 1][1]) <= plan.READ_GAP_BYTES


def test_what_is_wanted_least_leaves_first() -> None:
    assert order_of_eviction([100] * 4, [50] * 4, [40, 10, 30, 0]) == [3, 1, 2, 0]
    assert order_of_eviction([100] * 3, [90, 20, 90], [0, 0, 0]) == [1, 0, 2], "then what holds the least"
    assert order_of_eviction([100] * 3, [90, 89, 91], [3, 2, 0]) == [0, 1, 2], "a little more or less is no reason"
    assert order_of_eviction([], [], []) == []


def test_leading_payloads_within_a_budget() -> None:
    assert leading_within([4096, 1, 4097, 1], 4 * 4096) == 3
    assert leading_within([4096, 1], 4095) == 0
    assert leading_within([], 0) == 0
    assert leading_within([1, 1], 1 << 40) == 2
