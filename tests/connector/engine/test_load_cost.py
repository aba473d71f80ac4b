"""Loading or computing, from timings that are given."""

from __future__ import annotations

import pytest

from kvstore.connector.engine.load_cost import (
    ENOUGH,
    LIFETIME,
    NEGLIGIBLE,
    SAMPLES,
    LoadCost,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def speeds(clock: Clock) -> LoadCost:
    """A token takes 1 ms, a page of the arena 1 ms, one of the disk 100 ms; a page has 16 tokens."""
    speeds = LoadCost(clock)
    for _ in range(ENOUGH):
        speeds.note_prefill(100, 0.1)
        speeds.note_load("arena", 10, 0.01)
        speeds.note_load("disk", 2, 0.2)
    return speeds


def test_a_fast_tier_is_loaded_and_a_slow_one_computed(speeds: LoadCost) -> None:
    assert speeds.pages_worth_loading(["arena"] * 20, 16) == 20
    assert speeds.pages_worth_loading(["disk"] * 20, 16) == 0
    assert speeds.pages_worth_loading(["disk"] * 20, 128) == 20


def test_slow_pages_are_loaded_for_the_fast_ones_behind_them_where_that_pays(speeds: LoadCost) -> None:
    assert speeds.pages_worth_loading(["arena"] * 5 + ["disk"] * 5, 16) == 5
    assert speeds.pages_worth_loading(["disk", *["arena"] * 20], 16) == 21
    assert speeds.pages_worth_loading(["disk", "arena"], 16) == 0


def test_a_difference_that_nobody_sees_is_no_reason_to_compute(speeds: LoadCost) -> None:
    tokens = round((0.1 - NEGLIGIBLE) * 1000)
    assert speeds.pages_worth_loading(["disk"], tokens + 1) == 1
    assert speeds.pages_worth_loading(["disk"], tokens - 1) == 0


def test_what_is_not_known_is_loaded(speeds: LoadCost, clock: Clock) -> None:
    assert speeds.pages_worth_loading(["redis"] * 3, 1) == 3
    clock.now += LIFETIME + 1
    assert speeds.page("disk") is None
    assert speeds.pages_worth_loading(["disk"] * 3, 16) == 3


def test_what_loading_saves_is_what_computing_would_have_taken_longer(speeds: LoadCost, clock: Clock) -> None:
    assert speeds.gain(["arena"] * 5 + ["disk"], 128) == pytest.approx(5 * (0.128 - 0.001) + 0.128 - 0.1)
    assert speeds.gain(["disk"], 16) == 0.0
    assert speeds.gain(["arena", "redis"], 128) == 0.0
    clock.now += LIFETIME + 1
    assert speeds.gain(["arena"], 128) == 0.0


def test_one_timing_that_went_wrong_changes_nothing(speeds: LoadCost) -> None:
    speeds.note_load("arena", 1, 60.0)
    assert speeds.pages_worth_loading(["arena"] * 20, 16) == 20
    for _ in range(SAMPLES):
        speeds.note_load("arena", 1, 60.0)
    assert speeds.pages_worth_loading(["arena"] * 20, 16) == 0
