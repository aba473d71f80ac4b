"""Whether a load's pages were looked up before, for any order of lookups and loads, beside a model that is plain."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.recent_lookups import RecentLookups

PAGES = 12
SPACES = (b"a" * 32, b"b" * 32)
EVERYTHING = 1 << 30
runs = st.tuples(st.sampled_from(SPACES), st.integers(0, PAGES - 1), st.integers(1, PAGES))


def joined(first: int, count: int) -> bytes:
    """Hashes of pages of one chain; each holds the one behind it, too, at a place where no hash begins."""
    return b"".join(bytes([page]) * 16 + bytes([page + 1]) * 16 for page in range(first, first + count))


class Model:
    """The latest lookup first: its namespace, and its pages that were not loaded."""

    def __init__(self) -> None:
        self.lookups: list[tuple[bytes, list[int]]] = []

    def note(self, space: bytes, pages: list[int]) -> None:
        self.lookups.insert(0, (space, pages))

    def load(self, space: bytes, pages: list[int]) -> int:
        at_its_head = [left for where, left in self.lookups if where == space and left and left[0] == pages[0]]
        anywhere = [left for where, left in self.lookups if where == space and pages[0] in left]
        whole = [left for left in at_its_head if left[: len(pages)] == pages]
        for left in (*whole, *at_its_head, *anywhere):
            start = left.index(pages[0])
            known = min(len(left) - start, len(pages))
            del left[: start + known]
            return known
        return 0


def check_tables(recent: RecentLookups) -> None:
    """Each lookup is where a load finds it that goes on with it, the latest behind the others, and nothing else is."""
    listed = [each for alike in recent._next.values() for each in alike]
    assert sorted(each.number for each in listed) == list(recent._lookups)
    for key, alike in recent._next.items():
        assert all(each.next == key for each in alike)
        assert [each.number for each in alike] == sorted(each.number for each in alike)
        assert alike


@given(st.lists(st.tuples(st.booleans(), runs), max_size=60))
def test_a_load_is_looked_up_as_far_as_a_lookup_was_not_loaded_yet(steps):
    recent = RecentLookups(EVERYTHING, EVERYTHING, EVERYTHING)
    model = Model()
    for looks_up, (space, first, count) in steps:
        pages = list(range(first, first + count))
        if looks_up:
            recent.note(space, joined(first, count))
            model.note(space, list(pages))
        else:
            assert recent.load(space, joined(first, count)) == model.load(space, pages)
        check_tables(recent)


@given(st.lists(runs, min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 40 * 32))
def test_no_more_is_remembered_than_may_be(steps, most_lookups, most_bytes):
    recent = RecentLookups(most_lookups, most_bytes)
    for space, first, count in steps:
        recent.note(space, joined(first, count))
        kept = [len(each.hashes) for each in recent._lookups.values()]
        check_tables(recent)
        assert len(kept) <= most_lookups
        assert sum(kept) <= most_bytes or len(kept) == 1
        assert recent._bytes == sum(kept)
        assert kept[-1] == count * 32, "the latest is always remembered"


def test_batches_of_one_lookup_count_once_and_a_second_load_again():
    recent = RecentLookups()
    recent.note(SPACES[0], joined(0, 10))
    assert [recent.load(SPACES[0], joined(start, 4)) for start in (0, 4, 8)] == [4, 4, 2]
    assert recent.load(SPACES[0], joined(0, 4)) == 0
    assert recent._bytes == 0


def test_other_pages_behind_the_first_one_were_not_looked_up():
    recent = RecentLookups()
    recent.note(SPACES[0], joined(0, 4))
    assert recent.load(SPACES[0], joined(0, 2) + joined(7, 2)) == 2
    assert recent.load(SPACES[1], joined(2, 2)) == 0, "of another namespace"
    assert recent.load(SPACES[0], joined(2, 2)) == 2


@pytest.mark.parametrize("prompt", [0, 3], ids=["apart", "behind one system prompt"])
def test_a_thousand_lookups_before_the_first_load_are_all_remembered(prompt):
    recent = RecentLookups()
    requests = [joined(100, prompt) + number.to_bytes(32, "big") * 5 for number in range(200)]
    for space in (b"%32d" % number for number in range(5)):
        for request in requests:
            recent.note(space, request)
    for space in (b"%32d" % number for number in range(5)):
        for request in requests:
            assert recent.load(space, request) == prompt + 5
    assert not recent._lookups
    assert not recent._next
    assert recent._bytes == 0


class InterruptError(Exception):
    """What a signal's handler raises."""


def test_what_an_interrupt_left_half_changed_is_forgotten() -> None:
    """At each line of each operation; whatever comes behind it neither fails nor counts a page twice."""
    interrupted = 0
    for line in range(1, 80):
        recent = RecentLookups(most_lookups=2)
        recent.note(SPACES[0], joined(0, 6))
        recent.load(SPACES[0], joined(0, 2))
        left = line

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith("recent_lookups.py"):
                return None
            # Python looks for signals behind the lock's release, a tracer is called before it.
            locks = "with self._lock" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            left -= event == "line" and not locks
            if not left and not locks:
                raise InterruptError
            return trace

        sys.settrace(trace)
        try:
            recent.note(SPACES[0], joined(2, 6))
            recent.note(SPACES[1], joined(0, 6))
            recent.load(SPACES[0], joined(2, 2))
            recent.load(SPACES[0], joined(5, 3))
        except InterruptError:
            interrupted += 1
        finally:
            sys.settrace(None)
        for space in SPACES:
            for first in range(6):
                assert 0 <= recent.load(space, joined(first, 6)) <= 6
        for number in range(4):
            recent.note(SPACES[1], joined(number, 3))
        assert recent.load(SPACES[1], joined(3, 3)) == 3
    assert interrupted > 30
