"""Odds by class, and how values fade."""

import pytest

from kvstore.catalog.policies.reuse_odds import CLASSES, STEPS, ReuseOdds, class_of, uses_of


def test_each_way_to_be_used_has_a_class_of_its_own() -> None:
    lengths = [0, 1, 3, 7, 15, 31, 63, 127, 255]
    classes = [class_of(uses, prefix, new) for uses in range(1, 6) for prefix in range(5) for new in lengths]
    assert sorted(classes) == list(range(CLASSES))
    assert CLASSES <= 255, "a byte, and one value is to spare"
    assert class_of(9, 9, 10_000) == class_of(5, 4, 255)
    assert [uses_of(class_of(uses, 2, 3)) for uses in range(1, 7)] == [1, 2, 3, 4, 5, 5]


def test_a_class_whose_pages_come_back_is_worth_more_as_many_times_as_they_do() -> None:
    odds = ReuseOdds()
    for _ in range(3000):
        odds.was_lost(1)
        odds.were_wanted(1, 10, 1, left=True)
        odds.was_lost(2)
        odds.were_wanted(3, 10, 1)
    for _ in range(3 * 3000):
        odds.was_lost(1)
    assert odds.value(3) - odds.value(1) == pytest.approx(2 * STEPS, abs=10), "always, and a quarter of the time"
    assert odds.value(2) < odds.value(1)


def test_without_data_all_classes_are_alike() -> None:
    odds = ReuseOdds()
    assert len({odds.value(each) for each in range(CLASSES)}) == 1


def test_one_prompt_says_little_about_a_class() -> None:
    odds = ReuseOdds()
    odds.were_wanted(1, 10, 1000)
    for _ in range(10):
        odds.was_lost(2)
    assert odds.value(1) - odds.value(2) < STEPS // 4


def test_values_halve_with_four_times_the_mean_age() -> None:
    odds = ReuseOdds()
    for age in (100, 10_000):
        odds.were_wanted(1, age - 1, 500)
    before = odds.value(1)
    odds.pass_by(4 * 1000, 50)
    assert odds.value(1) - before == pytest.approx(STEPS, abs=1)


def test_until_ages_are_known_they_halve_with_twice_the_pages() -> None:
    odds = ReuseOdds()
    before = odds.value(1)
    odds.pass_by(2001, 1000)
    assert odds.value(1) - before == STEPS


def test_the_clock_loses_nothing_over_years() -> None:
    """A year of 100,000 references a second, and yet a single one still counts."""
    odds = ReuseOdds()
    odds.were_wanted(1, 1 << 20, 1000)
    odds.pass_by(10**5 * 3600 * 24 * 365, 1 << 20)
    before = odds._now
    odds.pass_by(1, 1 << 20)
    assert odds._now - before == pytest.approx(STEPS * 2**32 / (4 << 20), rel=1e-3)
    assert 0 < odds.value(1) < 1 << 63, "a table of 64-bit numbers has it"


def test_what_was_learned_long_ago_counts_less() -> None:
    odds = ReuseOdds()
    odds.were_wanted(1, 10, 60_000)
    for _ in range(80_000):
        odds.was_lost(2)
    odds.pass_by(1, 100)
    assert (odds._again[1], odds._seen[2]) == (30_000, 40_000)
    odds.pass_by(1, 100)
    assert odds._seen[2] == 40_000
