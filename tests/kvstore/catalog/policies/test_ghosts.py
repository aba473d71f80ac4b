"""What is remembered of pages that left, for how long, and in how many bytes."""

import random

import pytest

from kvstore.catalog.policies import ghosts as table
from kvstore.catalog.policies.ghosts import Ghost, Ghosts, places_for


def numbers(count: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.getrandbits(64) for _ in range(count)]


def test_what_left_is_remembered_once() -> None:
    ghosts = Ghosts()
    [number, other] = numbers(2)
    assert number not in ghosts
    assert ghosts.take(number, 100) is None
    ghosts.add(number, 224, 160, 10)
    assert number in ghosts
    assert ghosts.take(other, 480) is None
    assert ghosts.take(number, 480) == Ghost(224, 320)
    assert number not in ghosts
    assert ghosts.take(number, 480) is None


def test_a_hash_of_zeros_is_one_like_others() -> None:
    ghosts = Ghosts()
    [other] = numbers(1)
    ghosts.add(other, 3, 0, 10)
    assert 0 not in ghosts
    ghosts.add(0, 0, 0, 10)
    assert ghosts.take(0, 16) == Ghost(0, 16)


def test_the_table_grows_a_few_places_at_a_time_and_forgets_nothing_while_it_does() -> None:
    ghosts, all_ = Ghosts(), numbers(8000)
    places = 0
    for at, number in enumerate(all_):
        ghosts.add(number, at % 225, 16 * at, 4000)
        assert len(ghosts) - places <= 512 + 16, "64 buckets to begin with, then at most two a page"
        places = len(ghosts)
    kept = [(at, number) for at, number in enumerate(all_) if number in ghosts]
    assert len(kept) > 0.97 * len(all_), "but for buckets that were full"
    assert all(ghosts.take(number, 16 * 8000) == Ghost(at % 225, 16 * (8000 - at)) for at, number in kept)


def test_sixteen_times_the_pages_are_remembered_the_newest_ones() -> None:
    ghosts, all_ = Ghosts(), numbers(20_000)
    for number in all_:
        ghosts.add(number, 1, 0, 500)
    assert len(ghosts) <= 16 * 500
    assert sum(number in ghosts for number in all_[-4000:]) > 0.95 * 4000
    assert sum(number in ghosts for number in all_[:4000]) < 0.2 * 4000


def test_there_is_a_cap_in_bytes_that_grows_with_very_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    million = 1 << 20
    assert places_for(million) * table.GHOST_BYTES == table.MOST_BYTES
    assert places_for(3 * million // 2) * table.GHOST_BYTES == table.MOST_BYTES
    assert places_for(10 * million) == 80 * million
    monkeypatch.setattr(table, "MOST_BYTES", 16 << 10)
    ghosts = Ghosts()
    for number in numbers(5000):
        ghosts.add(number, 1, 0, 200)
        assert len(ghosts._records) * ghosts._records.itemsize <= 16 << 10


def test_unknown_hashes_are_seldom_taken_for_known_ones() -> None:
    ghosts = Ghosts()
    for number in numbers(20_000):
        ghosts.add(number, 1, 0, 2000)
    assert sum(number in ghosts for number in numbers(20_000, seed=2)) <= 2


def test_ages_go_on_when_their_clock_begins_again() -> None:
    ghosts = Ghosts()
    [number] = numbers(1)
    ghosts.add(number, 1, (1 << 28) * 5 - 1600, 10)
    assert ghosts.take(number, (1 << 28) * 5 + 1600) == Ghost(1, 3200)
