"""Loads that hold blocks beside each other, in numbers that can be counted by hand: blocks of 4 tokens, and a window of
8, for which a request has at most 5 blocks at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connector.groups import Group
from connector.room import Room

SIZE = 4
WHOLE = Group(SIZE, keeps=True, num_skipped=lambda num_tokens: 0)
WINDOW = Group(SIZE, keeps=False, num_skipped=lambda num_tokens: max(0, num_tokens - 7), most_blocks=5)


def test_a_load_alone_always_begins() -> None:
    assert Room([WHOLE], 1).admits("a", num_tokens=400, hit=360)


def test_what_one_still_needs_stays_free() -> None:
    # Each holds 4 blocks and needs one more: 9 blocks are enough for two of them, one after the other.
    for num_blocks, fits in ((9, True), (8, False)):
        room = Room([WHOLE], num_blocks)
        room.enter("a", num_tokens=20, hit=16)
        assert room.admits("b", num_tokens=20, hit=16) is fits


def test_the_block_that_a_window_needs_next_counts_though_as_many_are_behind_it() -> None:
    # Of ten places before the hit the window holds the last two (it sees tokens 33 to 40). Both groups need one more.
    for num_blocks, fits in ((12 + 12 + 2, True), (12 + 12 + 1, False)):
        room = Room([WHOLE, WINDOW], num_blocks)
        room.enter("a", num_tokens=44, hit=40)
        assert room.admits("b", num_tokens=44, hit=40) is fits


def test_a_window_never_needs_more_than_it_may_have() -> None:
    room = Room([WINDOW], 2 + 2 + 5)
    room.enter("a", num_tokens=4000, hit=40)
    assert room.admits("b", num_tokens=4000, hit=40)


def test_guessed_tokens_need_blocks_too() -> None:
    for lookahead, fits in ((4, True), (5, False)):
        room = Room([WHOLE], 4 + 4 + 1, lookahead)
        room.enter("a", num_tokens=16, hit=16)
        assert room.admits("b", num_tokens=16, hit=16) is fits


def test_who_was_refused_first_goes_first() -> None:
    room = Room([WHOLE], 20)
    room.enter("a", num_tokens=40, hit=36)
    assert not room.admits("large", num_tokens=60, hit=56)
    assert not room.admits("small", num_tokens=8, hit=4), "it goes past one that waits"
    assert [name for name in ("a", "large", "small", "new") if room.waits(name)] == ["small"]
    assert room.leave("a")
    assert not room.waits("small"), "nobody is beside it"
    assert room.admits("large", num_tokens=60, hit=56)


def test_nobody_waits_for_one_that_is_gone() -> None:
    room = Room([WHOLE], 20)
    room.enter("a", num_tokens=40, hit=36)
    assert not room.admits("large", num_tokens=60, hit=56)
    assert not room.admits("small", num_tokens=8, hit=4)
    assert not room.leave("large")
    assert not room.waits("small")
    assert room.admits("small", num_tokens=8, hit=4)


@given(
    st.integers(30, 60),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 80), st.integers(1, 80), st.booleans()), max_size=60),
)
def test_whatever_is_admitted_can_be_finished_one_after_the_other(
    num_blocks: int, events: list[tuple[str, int, int, bool]]
) -> None:
    """Each holder, taken first, gets what it needs beside what all hold."""
    room = Room([WHOLE, WINDOW], num_blocks)
    holds: dict[str, tuple[int, int]] = {}
    for name, hit, more, leaves in events:
        if leaves or name in holds:
            assert room.leave(name) == (holds.pop(name, None) is not None)
        elif room.admits(name, hit + more, hit):
            room.enter(name, hit + more, hit)
            places, behind = -(-hit // SIZE), -(-(hit + more) // SIZE) - -(-hit // SIZE)
            held = places + places - max(0, hit - 7) // SIZE
            holds[name] = held, behind + min(behind, 5)
            if len(holds) > 1:
                free = num_blocks - sum(held for held, _ in holds.values())
                assert all(needed <= free for _, needed in holds.values())
        assert room.holders == holds.keys()
