"""An arena that was taken over is verified: what can't be looked at is tried again, a few times, and said truly."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_stores import OpenStore, counters_of, found_pages, hold_pages, kill_store, layout_of, page_hashes, put_pages

from kvstore.hashing import checksum_of
from kvstore.store import verification as verifying
from kvstore.store.maintenance import Maintenance
from kvstore.store.state import StoreState
from kvstore.store.store import Store
from kvstore.store.verification import TRIES

FRAME = 4096
NUMBERS = range(1, 9)


class Faults:
    """In place of making a checksum: says that there is no memory for it, so often for each page."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        """By the address of a page."""
        self.looks: dict[int, int] = {}
        self.leaves: dict[int, Callable[[], object]] = {}

    def __call__(self, view: Any) -> int:
        at = address(view)
        self.looks[at] = self.looks.get(at, 0) + 1
        self.leaves.pop(at, lambda: None)()
        if self.left.get(at, 0) > 0:
            self.left[at] -= 1
            raise MemoryError
        return checksum_of(view)


def address(view: Any) -> int:
    at: int = view.__array_interface__["data"][0]
    return at


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr(verifying, "checksum_of", faults)
    monkeypatch.setattr(verifying, "PAUSE_SECONDS", 0.0)
    return faults


def fill(store: Store) -> tuple[Any, dict[int, int]]:
    """Pages that have their checksums, and where each lies."""
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, NUMBERS)
    held = hold_pages(store, known, NUMBERS)
    assert store.checksums(0, held.lease) is not None
    store.complete_load(0, held.lease)
    return known, dict(zip(NUMBERS, held.frames, strict=True))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    faulty=st.dictionaries(st.sampled_from(NUMBERS), st.integers(1, TRIES + 1)),
    damaged=st.sets(st.sampled_from(NUMBERS)),
    leaving=st.sets(st.sampled_from(NUMBERS)),
    walks=st.integers(0, TRIES + 1),
)
def test_every_page_is_looked_at_as_often_as_it_takes_and_no_more(
    open_store: OpenStore,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
    faulty: dict[int, int],
    damaged: set[int],
    leaving: set[int],
    walks: int,
) -> None:
    """Whatever fails how often, and whichever pages leave while they are looked at."""
    store = open_store()
    try:
        known, frames = fill(store)
        before = counters_of(store, "corrupt", "unverified")
        places = {number: address(store.arena.view(frame, FRAME)) for number, frame in frames.items()}
        for number in damaged:
            store.arena.view(frames[number], FRAME)[number] ^= 1
        faults.looks = {}
        faults.left = {places[number]: times for number, times in faulty.items()}
        faults.leaves = {
            places[number]: partial(store.evict, known.fingerprint, page_hashes([number])) for number in leaving
        }
        failing = iter([True] * walks)
        whole = StoreState.pages_here

        def pages_here(state: StoreState) -> Iterator[list[int]]:
            yield from whole(state)
            if next(failing, False):
                raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(StoreState, "pages_here", pages_here)
            found = store.verify(threading.Event())
        stay = set(NUMBERS) - leaving
        seen = {number for number in damaged & stay if faulty.get(number, 0) < TRIES}
        never = {number for number in stay if faulty.get(number, 0) >= TRIES}
        assert found == len(seen)
        assert found_pages(store, known, NUMBERS) == sorted(stay - seen)
        assert set(places.values()) == faults.looks.keys(), "one that fails holds none up"
        assert max(faults.looks.values()) <= TRIES
        counted = [now - then for now, then in zip(counters_of(store, "corrupt", "unverified"), before, strict=True)]
        assert counted == [found, len(never) if walks < TRIES else 0]
        store.check_integrity()
        store.evict(known.fingerprint, page_hashes(NUMBERS))
        assert store.statistics().arena_used_bytes == 0, "nothing is held for ever"
    finally:
        kill_store(store)


def test_what_is_said_is_what_is_done(open_store: OpenStore, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store()
    known, frames = fill(store)
    kill_store(store)
    again = open_store()
    assert again.kept_pages == len(NUMBERS)
    places = {number: address(again.arena.view(frame, FRAME)) for number, frame in frames.items()}
    faults.left = {places[1]: 1, places[2]: 99, places[3]: 99}
    again.arena.view(frames[4], FRAME)[0] ^= 1
    with caplog.at_level(logging.WARNING):
        assert again.verify(threading.Event()) == 1
    first, second, last = caplog.messages
    assert first.startswith("3 pages of the arena that was taken over could not be verified, and are tried again")
    assert second.startswith("2 pages of the arena that was taken over could not be verified, and are tried again")
    assert last == "2 pages of the arena that was taken over could not be verified in 3 tries, and stay as they are"
    assert again.statistics().counters["unverified"] == 2
    assert found_pages(again, known, NUMBERS) == [1, 2, 3, 5, 6, 7, 8]


def test_a_node_that_stops_waits_for_no_other_try(
    open_store: OpenStore, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "PAUSE_SECONDS", 3600.0)
    store = open_store()
    fill(store)
    kill_store(store)
    again = open_store()
    failed = threading.Event()

    def fail(view: Any) -> int:
        failed.set()
        raise MemoryError

    monkeypatch.setattr(verifying, "checksum_of", fail)
    running = Maintenance(again)
    assert failed.wait(60)
    running.stop()
    assert again.statistics().counters["unverified"] == 0
