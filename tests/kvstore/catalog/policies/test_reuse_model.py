"""The statistics behind expected reuse."""

import numpy as np
import pytest

from kvstore.catalog.policies.reuse_model import (
    BINS,
    EDGES,
    ReuseTimes,
    bin_of,
    bins_of,
)


def test_bins_by_one_and_by_many_are_the_same() -> None:
    ages = np.concatenate([np.arange(0.0, 2000.0, 7.0), EDGES[:-1] * 1.0001 + 0.001, [1e12]])
    assert [bin_of(age) for age in ages] == bins_of(ages).tolist()
    assert bin_of(0) == 0
    assert bin_of(1e12) == BINS - 1


def learnt(times: ReuseTimes, classes: int) -> ReuseTimes:
    for _ in range(classes + 1):
        times.refresh()
    return times


def watched(times: ReuseTimes, page_class: int, pages: int, until: float) -> None:
    times.have_waited(np.full(pages, page_class, np.uint8), np.zeros(pages), np.full(pages, until))


def test_nothing_is_learnt_from_little() -> None:
    times = ReuseTimes(2)
    before = [list(each) for each in times.worth]
    times.were_wanted(99, 0, 50, 0)
    times.refresh()
    assert times.worth == before
    assert all(a > b for a, b in zip(before[0], before[0][1:], strict=False)), "older is worth less"


def test_a_steady_chance_is_worth_the_same_at_each_age() -> None:
    """Exponential waiting times of mean 1,000: each reference is as good as any."""
    times = ReuseTimes(1)
    for age in np.random.default_rng(1).exponential(1000, 50_000):
        times.were_wanted(1, 0, float(age), 0)
    worth = learnt(times, 1).worth[0]
    for age in (10, 100, 1000, 3000):
        assert worth[bin_of(age)] == pytest.approx(1 / 1000, rel=0.2)


def test_a_pause_before_the_next_use_is_worth_waiting_for() -> None:
    """All pages are wanted at an age of about 500, and never later."""
    times = ReuseTimes(2)
    for age in np.random.default_rng(1).uniform(450, 550, 20_000):
        times.were_wanted(1, 0, float(age), 0)
    watched(times, 1, 20_000, 5000)
    worth = learnt(times, 2).worth[0]
    assert worth[bin_of(400)] > worth[bin_of(10)] > worth[bin_of(1500)]


def test_watching_in_pieces_is_watching_at_once() -> None:
    whole, pieces = ReuseTimes(1), ReuseTimes(1)
    whole.were_wanted(500, 0, 900, 0)
    watched(whole, 0, 1000, 4000)
    some = np.zeros(500, np.uint8)
    pieces.have_waited(some, np.zeros(500), np.full(500, 300.0))
    pieces.were_wanted(500, 0, 900, 300)
    many = np.zeros(1000, np.uint8)
    for begin, end in ((0.0, 77.0), (77.0, 1000.0), (1000.0, 4000.0)):
        pieces.have_waited(many, np.full(1000, begin), np.full(1000, end))
    assert learnt(pieces, 1).worth[0] == pytest.approx(learnt(whole, 1).worth[0])


def test_classes_that_come_again_are_worth_more_and_unknown_ones_lie_between() -> None:
    times = ReuseTimes(3)
    times.were_wanted(900, 0, 200, 0)
    watched(times, 0, 100, 2000)
    times.were_wanted(100, 1, 200, 0)
    watched(times, 1, 900, 2000)
    often, seldom, unknown = (each[bin_of(50)] for each in learnt(times, 3).worth)
    assert often > unknown > seldom


def test_what_is_old_counts_for_less() -> None:
    times = ReuseTimes(1)
    times.were_wanted(10_000, 0, 100, 0)
    before = learnt(times, 1).worth[0][bin_of(50)]
    times.forget(0.01)
    watched(times, 0, 1000, 2000)
    assert learnt(times, 1).worth[0][bin_of(50)] < before / 2
