from __future__ import annotations

import itertools

from kvstore.gpu.tuning import measure, ranking


def test_the_fastest_comes_first_and_one_slow_round_changes_nothing() -> None:
    assert ranking({"a": [2.0, 2.0, 2.1], "b": [1.0, 1.1, 50.0], "c": [3.0, 3.0, 3.0]}) == ["b", "a", "c"]


def test_equally_fast_ones_keep_their_order_and_one_without_timings_is_left_out() -> None:
    assert ranking({"staged": [1.0], "other": [1.0], "broken": []}) == ["staged", "other"]


def test_calls_take_turns_and_the_first_round_does_not_count() -> None:
    made: list[str] = []
    ticks = itertools.count()

    seconds = measure(
        {"a": lambda: made.append("a"), "b": lambda: made.append("b")}, rounds=2, clock=lambda: next(ticks)
    )

    assert made == ["a", "b"] * 3
    assert seconds == {"a": [1, 1], "b": [1, 1]}
