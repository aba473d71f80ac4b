"""When the learned order is trusted."""

import numpy as np
import pytest

from kvstore.eviction.trial import Trial


@pytest.fixture
def trial() -> Trial:
    """Of a cache of 100 pages, where 200 pages were used at ages from 0 to 199: LRU would keep pages up to 100."""
    trial = Trial()
    trial.saw(np.arange(200.0))
    trial.saw_all(100)
    return trial


def test_nothing_is_trusted_before_anything_was_seen() -> None:
    assert not Trial().trusted(10**9, 100)


def test_what_lru_would_have_had_counts_against_it(trial: Trial) -> None:
    assert trial.trusted(1000, 100)
    for _ in range(100):
        trial.lost(130)
        trial.kept(1, 70)
    assert trial.trusted(1000, 100), "neither would LRU have had those, nor would it have lost these"
    for _ in range(17):
        trial.lost(70)
    assert not trial.trusted(1000, 100)


def test_what_lru_would_have_lost_counts_for_it(trial: Trial) -> None:
    assert trial.trusted(1000, 100)
    trial.kept(50, 130)
    for _ in range(60):
        trial.lost(70)
    assert trial.trusted(1000, 100)


def test_it_is_tried_again(trial: Trial) -> None:
    assert trial.trusted(1000, 100)
    for _ in range(17):
        trial.lost(70)
    assert [trial.trusted(clock, 100) for clock in (1000, 1399, 1400, 1401)] == [False, False, True, True]
