from __future__ import annotations

import itertools

import pytest

from kvstore.gpu.tuning import MUCH_SLOWER, measure, much_slower


def test_one_that_takes_several_times_as_long_is_much_slower_and_one_slow_round_changes_nothing() -> None:
    seconds = {"a": [2.0, 2.0, 2.1], "b": [1.0, 1.1, 50.0], "c": [7.0, 7.7, 8.0]}

    assert much_slower(seconds) == {"c": pytest.approx(7.0)}


def test_what_is_just_as_slow_as_may_be_is_not_much_slower() -> None:
    assert much_slower({"a": [1.0], "b": [MUCH_SLOWER]}) == {}


@pytest.mark.parametrize("seconds", [{}, {"only": [3.0]}])
def test_the_only_one_is_the_fastest(seconds: dict[str, list[float]]) -> None:
    assert much_slower(seconds) == {}


def test_calls_take_turns_and_the_first_round_does_not_count() -> None:
    made: list[str] = []
    ticks = itertools.count()

    seconds = measure(
        {"a": lambda: made.append("a"), "b": lambda: made.append("b")}, rounds=2, clock=lambda: next(ticks)
    )

    assert made == ["a", "b"] * 3
    assert seconds == {"a": [1, 1], "b": [1, 1]}
