"""The summary: a multiset over shared memory whose "no" is certain, that others may read while it changes."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.arena import summary as summary_module
from kvstore.arena.summary import (
    DATA_OFFSET,
    FEW_KEYS,
    FULL,
    PLACES,
    SummaryHeader,
    SummaryReader,
    SummaryWriter,
    _places,
    place,
    seed_of,
    summary_bytes,
)
from kvstore.core import choice

BUCKETS = 128


def key_of(number: int, namespace: int = 0, twin: int = 0) -> bytes:
    """A page's key. Twins have one tag and one pair of buckets: of a fingerprint only the first bytes count there."""
    fingerprint = namespace.to_bytes(8, "big") + twin.to_bytes(24, "big")
    return fingerprint + hashlib.sha256(number.to_bytes(8, "big")).digest()


class Memory:
    """A file in this process's memory, with both ends."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self.data = bytearray(summary_bytes(buckets))
        self.words = np.frombuffer(self.data, np.uint32, offset=DATA_OFFSET)
        self.writer = SummaryWriter(memoryview(self.data), buckets)
        self.reader = SummaryReader(memoryview(self.data).toreadonly(), buckets)

    def may_have(self, keys: list[bytes]) -> list[bool]:
        """By the loop and by NumPy: the two must agree."""
        by_seed: dict[int, list[bytes]] = {}
        for key in keys:
            by_seed.setdefault(seed_of(key), []).append(key[32:])
        answers: dict[tuple[int, bytes], bool] = {}
        for seed, hashes in by_seed.items():
            one_by_one = [self.reader.may_have_one(seed, each) for each in hashes]
            padding = [hashlib.sha256(b"none" + bytes([at])).digest() for at in range(FEW_KEYS + 1)]
            together = self.reader.may_have(seed, b"".join(hashes + padding)).tolist()[: len(hashes)]
            assert one_by_one == together == self.reader.may_have(seed, b"".join(hashes)).tolist()
            answers |= {(seed, each): answer for each, answer in zip(hashes, one_by_one, strict=True)}
        return [answers[seed_of(key), key[32:]] for key in keys]


@given(
    st.binary(min_size=8, max_size=8), st.lists(st.binary(min_size=32, max_size=32), max_size=40), st.integers(1, 2**31)
)
def test_numpy_places_pages_as_the_loop_does(fingerprint: bytes, hashes: list[bytes], buckets: int) -> None:
    keys = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 4)
    together = _places(np.uint64(seed_of(fingerprint)), keys, buckets)
    expected = [place(seed_of(fingerprint), each, buckets) for each in hashes]
    assert list(zip(*[each.tolist() for each in together], strict=True)) == expected
    for home, partner, tag in expected:
        assert 0 <= home < buckets
        assert 0 <= partner < buckets
        assert 0 < tag < FULL


@given(st.binary(min_size=40, max_size=40), st.integers(1, 2**31))
def test_the_buckets_of_a_tag_follow_from_each_other(drawn: bytes, buckets: int) -> None:
    """So two pages of one tag that share a bucket share both."""
    home, partner, tag = place(seed_of(drawn), drawn[8:], buckets)
    spread = (tag * summary_module._TAG_FACTOR & 0xFFFFFFFF) * buckets >> 32
    assert (spread - home) % buckets == partner
    assert (spread - partner) % buckets == home


def test_a_page_is_maybe_until_it_leaves() -> None:
    memory = Memory()
    here, absent = key_of(1), key_of(2)
    assert memory.may_have([here, absent]) == [False, False]
    memory.writer.insert([here])
    assert memory.may_have([here, absent]) == [True, False]
    memory.writer.remove([here])
    assert memory.may_have([here, absent]) == [False, False]
    assert not memory.words.any()


def test_two_pages_of_one_tag_take_two_places() -> None:
    memory = Memory()
    one, other = key_of(1, twin=1), key_of(1, twin=2)
    memory.writer.insert([one, other])
    assert np.count_nonzero(memory.words) == 2
    memory.writer.remove([one])
    assert memory.may_have([other]) == [True]
    memory.writer.remove([other])
    assert memory.may_have([other]) == [False]


def test_a_page_in_two_tiers_leaves_twice() -> None:
    memory = Memory()
    memory.writer.insert([key_of(1)])
    memory.writer.insert([key_of(1)])
    memory.writer.remove([key_of(1)])
    assert memory.may_have([key_of(1)]) == [True]


@pytest.mark.parametrize("count", [1, FEW_KEYS + 1])
def test_withdrawals_are_counted_before_they_are_made(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CHOSEN", choice.Choice(None, "a test says so"))
    memory = Memory()
    keys = [key_of(number) for number in range(count)]
    memory.writer.insert(keys)
    seen: list[tuple[int, int]] = []

    class Places:
        """The places, as they are written."""

        def __getitem__(self, what: slice) -> memoryview:
            return places[what]

        def __setitem__(self, at: int, value: int) -> None:
            seen.append((memory.reader.withdrawals, int(np.count_nonzero(memory.words))))
            places[at] = value

    places = memory.writer._places
    memory.writer._places = Places()  # type: ignore[assignment]
    before = memory.reader.withdrawals
    memory.writer.remove(keys)
    assert seen[0] == (before + 1, count)
    assert len(seen) == count


@pytest.mark.skipif(choice.native() is None, reason=choice.CHOSEN.reason or "native")
def test_the_native_core_takes_tags_behind_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    keys = [key_of(number) for number in range(5)]
    memory.writer.insert(keys)
    before, core, seen = memory.reader.withdrawals, choice.native(), []

    class Seeing:
        """The core, as it is called."""

        def take_tags(self, *arguments: Any) -> None:
            seen.append((memory.reader.withdrawals, int(np.count_nonzero(memory.words))))
            assert core is not None
            core.take_tags(*arguments)

    monkeypatch.setattr(choice, "CHOSEN", choice.Choice(Seeing(), ""))  # type: ignore[arg-type]
    memory.writer.remove(keys)
    assert seen == [(before + 1, 5)]
    assert not memory.words.any()


def test_where_pages_find_no_place_everything_is_maybe_for_good() -> None:
    memory = Memory(buckets=1)
    keys = [key_of(number) for number in range(PLACES + 1)]
    memory.writer.insert(keys[:PLACES])
    assert memory.writer.full_buckets == 0
    assert memory.may_have([key_of(99)]) == [False]
    memory.writer.insert(keys[PLACES:])
    assert memory.writer.full_buckets == 1
    memory.writer.remove(keys)
    assert memory.may_have([*keys, key_of(99)]) == [True] * (PLACES + 2)


def test_two_choices_leave_no_bucket_full_at_four_pages_each() -> None:
    memory = Memory(buckets=4096)
    for start in range(0, 4 * 4096, 512):
        memory.writer.insert([key_of(number) for number in range(start, start + 512)])
    assert memory.writer.full_buckets == 0
    assert all(memory.may_have([key_of(number) for number in range(4 * 4096)]))
    false = sum(memory.may_have([key_of(number) for number in range(10**6, 10**6 + 20_000)]))
    assert false == 0, "equal tags are rarer than that"


def test_a_header_of_another_format_is_none() -> None:
    packed = SummaryHeader(1000, 77).pack()
    assert SummaryHeader.unpack(packed) == SummaryHeader(1000, 77)
    assert SummaryHeader.unpack(packed[:-1]) is None
    for at in (0, 8, 12):
        assert SummaryHeader.unpack(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]) is None


class SummaryMachine(RuleBasedStateMachine):
    """Few buckets, and pages that share tags: whatever comes and goes, what is there is never a "no"."""

    keys = st.builds(key_of, st.integers(0, 60), twin=st.integers(0, 2))

    @initialize(buckets=st.sampled_from([1, 2, 3, 16]))
    def start(self, buckets: int) -> None:
        self.memory = Memory(buckets)
        self.here: Counter[bytes] = Counter()

    @rule(keys=st.lists(keys, max_size=20))
    def come(self, keys: list[bytes]) -> None:
        self.memory.writer.insert(keys)
        self.here.update(keys)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.here:
            keys = data.draw(st.lists(st.sampled_from(sorted(self.here)), unique=True, max_size=20))
            self.memory.writer.remove(keys)
            self.here -= Counter(keys)

    @invariant()
    def nothing_that_is_here_is_a_no(self) -> None:
        if not hasattr(self, "memory"):
            return
        assert all(self.memory.may_have(sorted(self.here)))
        if not self.memory.writer.full_buckets:
            assert np.count_nonzero(self.memory.words) == self.here.total()
            tags = {place(seed_of(key), key[32:], self.memory.writer._buckets) for key in self.here}
            others = [key_of(number) for number in range(80)]
            assert self.memory.may_have(others) == [
                any(mine[2] == other[2] and {mine[0], mine[1]} & {other[0], other[1]} for mine in tags)
                for other in (place(seed_of(key), key[32:], self.memory.writer._buckets) for key in others)
            ]


TestSummaryMachine = SummaryMachine.TestCase
TestSummaryMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
