"""Prompts and outcomes in memory: what threads that read at once make of them, and how much there is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.responses import Caller, Limits, Sealing, open_store, remembered, sqlite
from kvstore.responses.remembered import Place, Remembered
from kvstore.responses.semantic.decision import Outcome
from kvstore.responses.semantic.guards import Likeness
from kvstore.responses.similar_prompt import SimilarPrompt
from kvstore.responses.store import Choice, Entry, Label, Store

PATIENCE = 60.0
SEALING = Sealing(bytes(32))
VECTOR = np.ones(4, np.float32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(str(tmp_path / "r.sqlite"), Limits())
    yield store
    store.close()


def remember(store: Any, now: Any = time.time) -> Remembered:
    return Remembered(store, SEALING, "ones", tuple, now)


def place_of(known: Remembered, context: str = "context") -> Place:
    return known.place(SimilarPrompt(Caller("k"), context, "text"), len(VECTOR))


def add_prompt(store: Store, known: Remembered, number: int, context: str = "context", ends_in: float = 3600) -> None:
    now = time.time()
    label = Label(f"{number:064x}", "", "k", "m", "r", now, now + ends_in)
    prompt = known.sealed_prompt(place_of(known, context), label, f"What is thing {number}?", VECTOR)
    store.put(Entry(label, b"sealed", prompt))


def learn(known: Remembered, number: int, shadow: bool = False) -> None:
    known.learn(
        place_of(known), Outcome(f"{number:064x}", Likeness.SAME_WORDS, 1.0, number % 3 > 0), shadow, time.time()
    )


def count_of(known: Remembered) -> int:
    return len(known._learnt[place_of(known).learner.name].experience)


class Held:
    """A store whose readers wait for each other, so that they read the same."""

    def __init__(self, store: Store, readers: int) -> None:
        self._store = store
        self._barrier = threading.Barrier(readers)
        self._left = readers
        self._lock = threading.Lock()

    def news(self, *asked: Any) -> Any:
        news = self._store.news(*asked)
        with self._lock:
            waits, self._left = self._left > 0, self._left - 1
        if waits:
            self._barrier.wait(PATIENCE)
        return news


def test_readers_of_several_groups_at_once_count_each_outcome_once(store):
    writer = remember(store)
    for number in range(300):
        learn(writer, number, shadow=number % 100 == 0)
    known = remember(Held(store, 4))
    with ThreadPoolExecutor(4) as threads:
        places = [place_of(known, f"context {number}") for number in range(4)]
        shadows = [check for read in threads.map(known.read, places) for check in read]
    assert count_of(known) == 300
    assert sorted(right for right, _ in shadows) == [False, True, True]


def test_a_group_that_another_thread_reads_is_not_waited_for(store):
    writer = remember(store)
    add_prompt(store, writer, 1)
    reads, goes_on = threading.Event(), threading.Event()

    class Slow:
        def news(self, *asked: Any) -> Any:
            reads.set()
            assert goes_on.wait(PATIENCE)
            return store.news(*asked)

    known = remember(Slow())
    place = place_of(known)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(known.read, place)
        assert reads.wait(PATIENCE)
        assert known.read(place) == []
        assert known.search(place, "What is thing 1?", VECTOR).found is None
        goes_on.set()
        reading.result(PATIENCE)
    assert known.search(place, "What is thing 1?", VECTOR).found is not None


def test_what_is_read_again_tells_no_check_twice(store):
    writer, known = remember(store), remember(store)
    for number in range(3):
        learn(writer, number, shadow=True)
        learn(known, number, shadow=True)  # its own are known to it
    assert len(known.read(place_of(known))) == 3
    store.delete(Choice(tenant="another"))  # somebody else's: all are read anew
    assert known.read(place_of(known)) == []
    assert count_of(known) == 6


def test_a_prompt_ends_in_memory_too(store):
    now = time.time()
    known = remember(store, lambda: now)
    add_prompt(store, known, 1, ends_in=100)
    add_prompt(store, known, 2, ends_in=200)
    place = place_of(known)
    known.read(place)
    assert len(known.search(place, "What is it?", VECTOR).candidates) == 2
    now += 150
    (left,) = known.search(place, "What is it?", VECTOR).candidates
    assert left.entry == f"{2:064x}"
    now += 100
    assert not known.search(place, "What is it?", VECTOR).candidates
    assert not known._known[place.group].ends


def test_memory_is_bounded_in_groups_bytes_and_callers(store, monkeypatch):
    monkeypatch.setattr(remembered, "_MOST_GROUPS", 3)
    monkeypatch.setattr(remembered, "_MOST_LEARNERS", 2)
    known = remember(store)
    places = [place_of(known, f"context {number}") for number in range(5)]
    for number, place in enumerate(places):
        add_prompt(store, known, number, f"context {number}")
        known.read(place)
    assert list(known._known) == [place.group for place in places[2:]]
    known.read(places[0])
    assert list(known._known) == [places[3].group, places[4].group, places[0].group]
    each = known._known[places[0].group].group.bytes
    monkeypatch.setattr(remembered, "_MOST_VECTOR_BYTES", 2 * each)
    known.read(places[0])
    assert list(known._known) == [places[4].group, places[0].group]
    monkeypatch.setattr(remembered, "_MOST_VECTOR_BYTES", 0)
    known.read(places[0])
    assert list(known._known) == [places[0].group]  # the one that is asked for stays
    for caller in "abc":
        known.read(known.place(SimilarPrompt(Caller(caller), "context", "text"), len(VECTOR)))
    assert len(known._learnt) == 2


def test_outcomes_in_memory_are_read_anew_when_they_are_many_more_than_the_store_keeps(store, monkeypatch):
    for module in (remembered, sqlite):
        monkeypatch.setattr(module, "MOST_OUTCOMES", 5)
    known = remember(store)
    for number in range(40):
        learn(known, number)
        known.read(place_of(known))
        assert min(number + 1, 5) <= count_of(known) <= 11
