"""The node's own threads do their work, and go on when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_clock import FakeClock
from memory_tier import MemoryTier
from tiny_stores import OpenStore, found_pages, hold_pages, kill_store, layout_of, put_pages

from kvstore.store import maintenance
from kvstore.store.maintenance import Maintenance
from kvstore.store.store import Store

FRAME = 4096
PATIENCE = 60.0


class Watched:
    """A method that says when it was called so many times."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._changed = threading.Condition()
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._call(*arguments)
        finally:
            with self._changed:
                self.calls += 1
                self._changed.notify_all()

    def wait_for(self, calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.calls >= calls, PATIENCE), f"{self.calls} calls"


def watch(target: Any, method: str) -> Watched:
    watched = Watched(getattr(target, method))
    setattr(target, method, watched)
    return watched


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(maintenance, "_RETRY_SECONDS", 0.01)


@pytest.fixture
def keep_up() -> Iterator[Callable[[Store], Maintenance]]:
    running: list[Maintenance] = []

    def start(store: Store) -> Maintenance:
        running.append(Maintenance(store))
        return running[-1]

    yield start
    for each in running:
        each.stop()


def test_dirty_pages_are_written_back(
    open_store: OpenStore, tier: MemoryTier, keep_up: Callable[[Store], Maintenance]
) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    written = watch(store.write_back, "write_back")
    keep_up(store)
    put_pages(store, known, [1, 2])
    written.wait_for(1)
    put_pages(store, known, [3])
    written.wait_for(2)
    assert len(tier.pages) == 3
    assert store.statistics().dirty_pages == 0


def test_a_tier_that_fails_is_tried_again(
    open_store: OpenStore,
    tier: MemoryTier,
    keep_up: Callable[[Store], Maintenance],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    tier.write_gate.error = RuntimeError("broken")
    landed = threading.Event()
    tier.refuse = lambda key: landed.set() is not None
    written = watch(store.write_back, "write_back")
    with caplog.at_level(logging.ERROR):
        running = keep_up(store)
        put_pages(store, known, [1])
        written.wait_for(3)
        tier.write_gate.error = None
        assert landed.wait(PATIENCE)
        running.stop()
    assert "this is tried again" in caplog.text
    assert "broken" in caplog.text
    assert (len(tier.pages), store.statistics().dirty_pages) == (1, 0)


def test_what_is_overdue_is_ended(
    open_store: OpenStore, clock: FakeClock, keep_up: Callable[[Store], Maintenance]
) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    held = hold_pages(store, known, [1], ttl=5.0)
    swept = watch(store, "sweep")
    keep_up(store)
    swept.wait_for(2)
    assert store.still_held(0, held.lease)
    clock.now += 5.1
    swept.wait_for(swept.calls + 2)
    assert not store.still_held(0, held.lease)


def test_a_sweep_that_fails_is_not_the_last(
    open_store: OpenStore, keep_up: Callable[[Store], Maintenance], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    store.sweep = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    swept = watch(store, "sweep")
    keep_up(store)
    swept.wait_for(3)
    assert "ZeroDivisionError" in caplog.text


def test_an_arena_taken_over_is_verified(
    open_store: OpenStore,
    keep_up: Callable[[Store], Maintenance],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    held = hold_pages(store, known, [1, 2])
    store.checksums(0, held.lease)
    store.arena.view(held.frames[1], FRAME)[7] ^= 1
    kill_store(store)
    again = open_store()
    verified = watch(again, "verify")
    with caplog.at_level(logging.WARNING):
        running = keep_up(again)
        verified.wait_for(1)
        running.stop()
    assert found_pages(again, known, [1, 2]) == [1]
    assert "1 pages of the arena that was taken over were damaged" in caplog.text


def test_stopping_ends_all_threads(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    kill_store(store)
    before = set(threading.enumerate())  # others' clients may have threads that end later
    running = Maintenance(open_store(64, [tier]))
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} >= {"kvstore-write-back", "kvstore-sweep"}
    running.stop()
    assert not any(thread.is_alive() for thread in threads)


def test_the_end_does_not_wait_for_a_bucket_that_hangs(
    open_store: OpenStore, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the dirty pages would never come to the disk before the process is killed."""
    store = open_store(64, [tier])
    began, answers = threading.Event(), threading.Event()

    def hang(stop: threading.Event) -> None:
        began.set()
        answers.wait(PATIENCE)

    monkeypatch.setattr(store.orphans, "drop", hang)
    monkeypatch.setattr(maintenance, "_BUCKET_SECONDS", 0.01)
    running = Maintenance(store)
    try:
        assert began.wait(PATIENCE)
        stopping = threading.Thread(target=running.stop, daemon=True)
        stopping.start()
        stopping.join(PATIENCE / 2)
        assert not stopping.is_alive()
    finally:
        answers.set()


def test_a_flush_writes_to_the_disk_before_it_writes_to_a_bucket(
    open_store: OpenStore, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(64, [tier])
    put_pages(store, store.open_namespace(layout_of("a", FRAME)), [1, 2])
    on_disk: list[int] = []
    monkeypatch.setattr(store.archive, "write_all", lambda deadline: on_disk.append(len(tier.pages)))
    assert store.flush() == 2
    assert on_disk == [2]
