from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstore.segments import plan
from kvstore.segments.plan import oldest_to_drop, plan_chunks, plan_reads
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


def test_neighbours_are_read_together_and_others_apart() -> None:
    assert plan_reads([(4096, 4096), (8192, 100), (12288, 5000), (24576, 1)]) == [range(3), range(3, 4)]
    assert plan_reads([(0, 4096), (0, 4096)]) == [range(1), range(1, 2)], "the same page twice is no run"
    assert plan_reads([]) == []


def test_reads_are_bounded() -> None:
    extents = [(index * 2 * MIB, 2 * MIB) for index in range(10)]
    assert plan_reads(extents) == [range(4), range(4, 8), range(8, 10)]
    assert plan_reads([(0, 32 * MIB), (32 * MIB, 1)]) == [range(1), range(1, 2)]


def test_the_oldest_leave_and_no_more_than_needed() -> None:
    assert oldest_to_drop([10, 10, 10], 0) == 0
    assert oldest_to_drop([10, 10, 10], -5) == 0
    assert oldest_to_drop([10, 10, 10], 1) == 1
    assert oldest_to_drop([10, 10, 10], 10) == 1
    assert oldest_to_drop([10, 10, 10], 11) == 2
    assert oldest_to_drop([10], 11) == 1
    assert oldest_to_drop([], 11) == 0
