"""Batches that are loaded beside each other come back as one prefix."""

from __future__ import annotations

import threading

import pytest

from kvstore.client.paths.bulk import parallel as in_background
from kvstore.client.paths.bulk.parallel import load_in_parallel

BATCH = ["arena"] * 4


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
@pytest.mark.parametrize("batches", [0, 1, 2, 7])
def test_every_batch_is_loaded_once(threads, batches):
    loaded = []

    def load(place: int) -> tuple[list[str], bool]:
        loaded.append(place)
        return BATCH, True

    assert load_in_parallel(load, batches, threads) == BATCH * batches
    assert sorted(loaded) == list(range(batches))


@pytest.mark.parametrize("short", [0, 1, 5])
def test_the_prefix_ends_where_a_batch_does_and_nothing_more_is_begun(short):
    loaded = []

    def load(place: int) -> tuple[list[str], bool]:
        loaded.append(place)
        return (BATCH[:3], False) if place == short else (BATCH, True)

    assert load_in_parallel(load, 100, 2) == BATCH * short + BATCH[:3]
    assert len(loaded) < 100


def test_a_batch_that_comes_before_the_one_before_it_waits_for_it():
    second = threading.Event()

    def load(place: int) -> tuple[list[str], bool]:
        if place == 0:
            assert second.wait(60)
            return BATCH[:1], False
        second.set()
        return BATCH, True

    assert load_in_parallel(load, 2, 2) == BATCH[:1]


def test_an_error_ends_the_prefix_and_is_told_where_there_is_none():
    def load(failing: int, place: int) -> tuple[list[str], bool]:
        if place == failing:
            raise ValueError(place)
        return BATCH, True

    assert load_in_parallel(lambda place: load(2, place), 5, 2) == BATCH * 2
    with pytest.raises(ValueError, match="0"):
        load_in_parallel(lambda place: load(0, place), 5, 2)


def test_where_no_thread_can_be_had_one_does_all(monkeypatch):
    def refuse(*arguments: object, **more: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(in_background.threading.Thread, "start", refuse)
    assert load_in_parallel(lambda place: (BATCH, True), 5, 3) == BATCH * 5
    assert in_background.in_background(lambda: 7).result(timeout=0) == 7
