"""Loads that hold blocks beside each other, in numbers that can be counted by hand: blocks of 4 tokens, and a window of
8, for which a request has at most 5 blocks at a time. Behind 40 tokens a request has ten blocks of the group that keeps
all, and the last two of the other (the next token sees tokens 33 to 40)."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.engine.groups import Group
from kvstore.connector.engine.load_admission import LoadAdmission

SIZE = 4
WHOLE = Group(SIZE, keeps=True, num_skipped=lambda num_tokens: 0)
WINDOW = Group(SIZE, keeps=False, num_skipped=lambda num_tokens: max(0, num_tokens - 7), most_blocks=5)
STATES = Group(SIZE, keeps=False, num_skipped=lambda num_tokens: num_tokens - 1, is_state=True, is_offered=True)
BLOCKS = itertools.count(1)


def held_behind(hit: int) -> int:
    places = -(-hit // SIZE)
    return places + places - max(0, hit - 7) // SIZE


def enter(admission: LoadAdmission, name: str, num_tokens: int, hit: int, shared: list[int] | None = None) -> list[int]:
    """Have a request hold as many blocks as a load of so many tokens takes, of which it shares some with others."""
    blocks = list(shared or ())
    blocks += [next(BLOCKS) for _ in range(held_behind(hit) - len(blocks))]
    admission.enter(name, num_tokens, hit, blocks)
    return blocks


def test_a_load_alone_always_begins() -> None:
    assert LoadAdmission([WHOLE, WINDOW], 1).admits("a", num_tokens=400, hit=360)


def test_without_windows_the_engine_counts_rightly_itself() -> None:
    admission = LoadAdmission([WHOLE, STATES], 1)
    enter(admission, "a", num_tokens=44, hit=40)
    assert admission.admits("b", num_tokens=44, hit=40)
    assert not admission.waits("b")


def test_the_block_that_a_window_needs_next_counts_though_as_many_are_behind_it() -> None:
    for num_blocks, fits in ((12 + 12 + 2, True), (12 + 12 + 1, False)):
        admission = LoadAdmission([WHOLE, WINDOW], num_blocks)
        enter(admission, "a", num_tokens=44, hit=40)
        assert admission.admits("b", num_tokens=44, hit=40) is fits


def test_a_window_never_needs_more_than_it_may_have() -> None:
    admission = LoadAdmission([WINDOW], 2 + 2 + 5)
    admission.enter("a", 4000, 40, [next(BLOCKS), next(BLOCKS)])
    assert admission.admits("b", num_tokens=4000, hit=40)


def test_guessed_tokens_need_blocks_too() -> None:
    for lookahead, fits in ((4, True), (5, False)):
        admission = LoadAdmission([WHOLE, WINDOW], 12 + 12 + 2, lookahead)
        enter(admission, "a", num_tokens=40, hit=40)
        assert admission.admits("b", num_tokens=40, hit=40) is fits


def test_blocks_that_several_have_count_once() -> None:
    admission = LoadAdmission([WHOLE, WINDOW], 12 + 1 + 1 + 12 + 2)
    shared = enter(admission, "a", num_tokens=44, hit=40)[:11]
    for name in ("b", "c"):
        assert admission.admits(name, num_tokens=44, hit=40)
        enter(admission, name, 44, 40, shared)
    assert admission.admits("d", num_tokens=44, hit=40)
    admission.release("a")
    enter(admission, "d", 44, 40)
    assert not admission.admits("e", num_tokens=44, hit=40), "the others still have what they shared"


def test_who_was_refused_first_goes_first() -> None:
    admission = LoadAdmission([WHOLE, WINDOW], 26)
    enter(admission, "a", num_tokens=44, hit=40)
    assert not admission.admits("large", num_tokens=60, hit=56)
    assert not admission.admits("small", num_tokens=8, hit=4), "it goes past one that waits"
    admission.release("large")  # it asks again, and is looked up once more
    assert [name for name in ("a", "large", "small", "new") if admission.waits(name)] == ["small"]
    assert admission.release("a")
    assert not admission.waits("small"), "nobody is beside it"
    assert admission.admits("large", num_tokens=60, hit=56)


def test_nobody_waits_for_one_that_is_gone() -> None:
    admission = LoadAdmission([WHOLE, WINDOW], 26)
    enter(admission, "a", num_tokens=44, hit=40)
    assert not admission.admits("large", num_tokens=60, hit=56)
    assert not admission.admits("small", num_tokens=8, hit=4)
    assert not admission.leave("large")
    assert not admission.waits("small")
    assert admission.admits("small", num_tokens=8, hit=4)


def test_nobody_waits_for_one_that_the_engine_takes_later() -> None:
    """As with priorities: others are asked first, again and again."""
    admission = LoadAdmission([WHOLE, WINDOW], 40)
    enter(admission, "a", num_tokens=44, hit=40)
    assert not admission.admits("large", num_tokens=150, hit=140)
    assert not admission.admits("small", num_tokens=8, hit=4)
    admission.release("a")
    for name in ("small", "another"):
        assert admission.admits(name, num_tokens=8, hit=4)
        enter(admission, name, num_tokens=8, hit=4)


@given(
    st.integers(30, 60),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 80), st.integers(1, 80), st.booleans()), max_size=60),
)
def test_whatever_is_admitted_can_be_finished_one_after_the_other(
    num_blocks: int, events: list[tuple[str, int, int, bool]]
) -> None:
    """Each holder, taken first, gets what it needs beside what all hold."""
    admission = LoadAdmission([WHOLE, WINDOW], num_blocks)
    holds: dict[str, tuple[int, int]] = {}
    for name, hit, more, leaves in events:
        if leaves or name in holds:
            assert admission.leave(name) == (holds.pop(name, None) is not None)
        elif admission.admits(name, hit + more, hit):
            enter(admission, name, hit + more, hit)
            behind = -(-(hit + more) // SIZE) - -(-hit // SIZE)
            holds[name] = held_behind(hit), behind + min(behind, 5)
            if len(holds) > 1:
                free = num_blocks - sum(held for held, _ in holds.values())
                assert all(needed <= free for _, needed in holds.values())
        assert admission.holders == holds.keys()
