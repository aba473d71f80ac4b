"""Dead records against a dictionary of sets."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.segments import dead_records as dead
from kvstore.segments.dead_records import DeadRecords

dice = random.Random(1)
KEYS = [dice.randbytes(64) for _ in range(12)]
adding = st.tuples(st.just("add"), st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=8))
dropping = st.tuples(st.just("drop"), st.lists(st.tuples(st.just(0), st.integers(1, 6)), min_size=1, max_size=1))


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(adding | dropping, max_size=30), unsorted=st.sampled_from([0, 3, 1024]))
def test_they_are_a_set_of_segments_for_each_key(steps: list[tuple[str, list[tuple[int, int]]]], unsorted: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dead, "_UNSORTED", unsorted)
        records = DeadRecords()
        model: dict[bytes, set[int]] = {key: set() for key in KEYS}
        for step, pairs in steps:
            if step == "add":
                records.add([KEYS[number] for number, _ in pairs], [segment for _, segment in pairs])
                for number, segment in pairs:
                    model[KEYS[number]].add(segment)
            else:
                records.drop(pairs[0][1])
                for segments in model.values():
                    segments.discard(pairs[0][1])
            assert records.anywhere(KEYS) == [bool(model[key]) for key in KEYS]
            for than in range(1, 8):
                assert records.older(KEYS, than) == [any(each < than for each in model[key]) for key in KEYS]
            assert bool(len(records)) == any(model.values())


def test_they_take_little_memory() -> None:
    records = DeadRecords()
    for segment in range(100):
        records.add([dice.randbytes(64) for _ in range(1000)], [segment] * 1000)
    records.drop(0)
    assert len(records) == 99_000
    assert sum(column.nbytes for column in vars(records).values() if isinstance(column, np.ndarray)) < 20 * 99_000
