"""The index against a dictionary."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.segments import index
from kvstore.segments.index import PageIndex, Place
from kvstore.segments.record import BLOCK

KEYS = [os.urandom(64) for _ in range(60)]
# Keys that all want the same few slots of the table.
CLASHING = [key for key in (number.to_bytes(64, "big") for number in range(200_000)) if hash(key) & 1023 < 3][:60]
places = st.builds(
    Place,
    segment=st.integers(0, (1 << 64) - 1),
    offset=st.integers(1, 1 << 30).map(lambda block: block * BLOCK),
    length=st.integers(1, (1 << 32) - 1),
    checksum=st.integers(0, (1 << 64) - 1),
)
numbers = st.lists(st.integers(0, 59), unique=True, max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "remove", "find"]), numbers, places), max_size=40),
    few=st.sampled_from([0, 5, 128]),
    clashing=st.booleans(),
)
def test_it_is_a_dictionary(steps: list[tuple[str, list[int], Place]], few: int, clashing: bool) -> None:
    keys = CLASHING if clashing else KEYS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_FEW", few)
        pages, model = PageIndex(), {}
        for step, chosen, place in steps:
            named = [keys[number] for number in chosen]
            if step == "put":
                new = [place._replace(checksum=number) for number in chosen]
                pages.put(named, new, 1)
                model.update(zip(named, new, strict=True))
            elif step == "remove":
                rows = pages.find(named)
                pages.remove(rows[rows >= 0])
                for key in named:
                    model.pop(key, None)
            rows = pages.find(keys)
            assert [row >= 0 for row in rows.tolist()] == [key in model for key in keys]
            here = rows[rows >= 0]
            assert pages.places(here) == [model[key] for key in pages.keys(here)]
            assert len(pages) == len(model)
            assert sorted(pages.keys(pages.all_rows())) == sorted(model)
            assert set(pages.keys(pages.rows_in(place.segment))) == {
                key for key, where in model.items() if where.segment == place.segment
            }


def test_it_grows_and_takes_little_memory() -> None:
    pages = PageIndex()
    for segment in range(60):
        keys = [os.urandom(64) for _ in range(1000)]
        pages.put(keys, [Place(segment, (n + 1) * BLOCK, 65536, n) for n in range(1000)], segment)
    assert len(pages) == 60_000
    assert pages.memory_bytes < 150 * 60_000
    assert pages.places(pages.find(keys)) == [Place(59, (n + 1) * BLOCK, 65536, n) for n in range(1000)]
    live, used = pages.bytes_by_segment(range(60), since=30)
    assert live == [65536 * 1000] * 60
    assert used == [0] * 30 + [65536 * 1000] * 30


def test_what_was_read_lately_the_latest_first() -> None:
    pages = PageIndex()
    rows = pages.put(KEYS, [Place(1, BLOCK, 1, 1)] * 60, tick=5)
    assert len(pages.read_since(rows, 0)) == 0, "written is not read"
    pages.touch(rows[:3], 6)
    pages.touch(rows[3:5], 8)
    assert pages.keys(pages.read_since(rows, 7)) == KEYS[3:5]
    assert pages.keys(pages.read_since(rows, 6)) == [*KEYS[3:5], *KEYS[:3]]
    pages.put(KEYS[:4], [Place(2, BLOCK, 1, 1)] * 4, tick=9)
    assert pages.keys(pages.read_since(rows, 0)) == KEYS[4:5], "what was carried over must be read again"


def test_keys_of_another_length_are_not_here() -> None:
    pages = PageIndex()
    pages.put(KEYS, [Place(1, BLOCK, 1, 1)] * 60, 0)
    odd = [KEYS[0][:63], KEYS[1] + b"x", b""] * 60
    assert (pages.find(odd) < 0).all()
    assert pages.keys(pages.rows_with_prefix(KEYS[7][:20])) == [KEYS[7]]
    assert len(pages.rows_with_prefix(b"")) == 60
    assert len(pages.rows_with_prefix(KEYS[7] + b"x")) == 0
    assert np.array_equal(pages.find([]), np.array([]))
