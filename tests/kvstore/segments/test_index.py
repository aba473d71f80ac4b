"""The index against a dictionary."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.segments import index
from kvstore.segments.index import PageIndex, Place, Rows
from kvstore.segments.record import BLOCK, padded

dice = random.Random(1)
# Three namespaces, one of them with most of the pages.
KEYS = [bytes([max(1, number - 56)]) * 32 + dice.randbytes(32) for number in range(60)]
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


def put(pages: PageIndex, keys: Sequence[bytes], where: Sequence[Place], tick: int) -> Rows:
    segments, offsets, lengths, checksums = zip(*where, strict=True) if where else ((), (), (), ())
    columns = np.array(segments, np.uint64), np.array(offsets, np.uint64), np.array(lengths, np.uint32)
    return pages.put(keys, *columns, np.array(checksums, np.uint64), tick)


def memory_of(pages: PageIndex) -> int:
    return sum(column.nbytes for column in vars(pages).values() if isinstance(column, np.ndarray))


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
                put(pages, named, new, 1)
                model.update(zip(named, new, strict=True))
            elif step == "remove":
                rows = pages.find(named)
                pages.remove(rows[rows >= 0])
                for key in named:
                    model.pop(key, None)
            for namespace in range(1, 4):
                fingerprint = bytes([namespace]) * 32
                held = [place.length for key, place in model.items() if key.startswith(fingerprint)]
                assert pages.pages_of(fingerprint) == len(held)
                assert pages.bytes_of(fingerprint) == sum(padded(length) + 176 for length in held)
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
        keys = [dice.randbytes(64) for _ in range(1000)]
        put(pages, keys, [Place(segment, (n + 1) * BLOCK, 65536, n) for n in range(1000)], segment)
    assert len(pages) == 60_000
    assert memory_of(pages) < 130 * 60_000
    assert pages.places(pages.find(keys)) == [Place(59, (n + 1) * BLOCK, 65536, n) for n in range(1000)]
    live, used = pages.bytes_by_segment(range(60), since=30)
    assert live == [65536 * 1000] * 60
    assert used == [0] * 30 + [65536 * 1000] * 30


def test_what_was_read_lately_the_latest_first() -> None:
    pages = PageIndex()
    rows = put(pages, KEYS, [Place(1, BLOCK, 1, 1)] * 60, tick=5)
    assert len(pages.read_since(rows, 0)) == 0, "written is not read"
    pages.touch(rows[:3], 6)
    pages.touch(rows[3:5], 8)
    assert pages.keys(pages.read_since(rows, 7)) == KEYS[3:5]
    assert pages.keys(pages.read_since(rows, 6)) == [*KEYS[3:5], *KEYS[:3]]
    put(pages, KEYS[:4], [Place(2, BLOCK, 1, 1)] * 4, tick=9)
    assert pages.keys(pages.read_since(rows, 0)) == KEYS[4:5], "what was carried over must be read again"


def test_keys_of_another_length_are_not_here() -> None:
    pages = PageIndex()
    put(pages, KEYS, [Place(1, BLOCK, 1, 1)] * 60, 0)
    odd = [KEYS[0][:63], KEYS[1] + b"x", b""] * 60
    assert (pages.find(odd) < 0).all()
    assert pages.keys(pages.rows_with_prefix(KEYS[7][:40])) == [KEYS[7]]
    assert len(pages.rows_with_prefix(KEYS[7][:20])) == 58
    assert len(pages.rows_with_prefix(b"")) == 60
    assert len(pages.rows_with_prefix(KEYS[7] + b"x")) == 0
    assert np.array_equal(pages.find([]), np.array([]))


def test_the_least_used_leave_first_and_tails_before_heads() -> None:
    pages = PageIndex()
    first, second = KEYS[:8], KEYS[8:16]
    put(pages, first, [Place(1, (n + 1) * BLOCK, 1, 1) for n in range(8)], tick=5)
    put(pages, second, [Place(2, (n + 1) * BLOCK, 1, 1) for n in range(8)], tick=7)
    put(pages, [b"x" * 64], [Place(2, 90 * BLOCK, 1, 1)], tick=0)
    pages.touch(pages.find(first[2:4]), 9)
    fingerprint = KEYS[0][:32]
    order = [*reversed(first[4:]), *reversed(first[:2]), *reversed(second), *reversed(first[2:4])]
    assert pages.keys(pages.least_used(fingerprint, 100)) == order
    assert pages.keys(pages.least_used(fingerprint, 3)) == order[:6], "those of one tick are told together"
    rows = pages.least_used(fingerprint, 100)
    ticks = pages.last_uses(rows)
    pages.touch(pages.find(order[:1]), 10)
    pages.remove(pages.find(order[1:2]))
    assert pages.keys(pages.unused_since(rows, ticks, fingerprint)) == order[2:]


def test_of_pages_used_at_once_those_of_the_newest_segment_leave_first_whatever_its_number() -> None:
    pages = PageIndex()
    for number, key in zip([3, (1 << 63) + 1, (1 << 64) - 1, 1 << 62], KEYS[:4], strict=True):
        put(pages, [key], [Place(number, BLOCK, 1, 1)], tick=5)
    assert pages.keys(pages.least_used(KEYS[0][:32], 10)) == [KEYS[2], KEYS[1], KEYS[3], KEYS[0]]


def test_many_namespaces_that_come_and_go_take_no_memory() -> None:
    pages = PageIndex()
    for turn in range(200):
        keys = [bytes([turn, number]) * 32 for number in range(10)]
        rows = put(pages, keys, [Place(1, BLOCK, 1, 1)] * 10, 0)
        assert pages.keys(pages.rows_with_prefix(bytes([turn]))) == keys
        pages.remove(rows)
    assert len(pages) == 0
    assert memory_of(pages) < 64 << 10
