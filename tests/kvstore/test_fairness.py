"""Shares: each gets half of what the others leave, and one in any case."""

from __future__ import annotations

from kvstore.fairness import Shares


def as_much_as_may(shares: Shares, who: object) -> int:
    taken = 0
    while shares.may_take(who):
        shares.take(who)
        taken += 1
        assert taken <= shares.limit
    return taken


def test_whoever_comes_finds_some_of_it_left() -> None:
    shares = Shares(32)
    assert [as_much_as_may(shares, who) for who in "abcdefgh"] == [16, 8, 4, 2, 1, 1, 1, 1]
    assert shares.taken == 34
    shares.give_back("a", 16)
    assert as_much_as_may(shares, "c") == 5
    assert not shares.may_take("b")
    for who, taken in {"b": 8, "c": 9, "d": 2, "e": 1, "f": 1, "g": 1, "h": 1}.items():
        shares.give_back(who, taken)
    assert shares.taken == 0
    assert not shares._of


def test_one_that_is_larger_than_a_share_may_be_taken_alone() -> None:
    shares = Shares(10)
    assert shares.may_take("a", 10)
    shares.take("a", 10)
    assert not shares.may_take("a", 1)
