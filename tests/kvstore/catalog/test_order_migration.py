"""A namespace's first quota, set while it has pages: these move into an order of their own, a few at a time."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from counting_lock import replace_lock
from tiny_stores import OpenStore, found_pages, layout_of, load_pages, page_hashes, put_pages, result_of

from kvstore.catalog import order_migration
from kvstore.catalog.eviction_orders import EvictionOrders
from kvstore.catalog.policies import ExpectedReuse
from kvstore.catalog.slot_table import SlotTable
from kvstore.config.rules import parse_rules
from kvstore.errors import UnknownNamespaceError
from kvstore.store.store import Store

FRAME = 4096


class Pauses(threading.Event):
    """Does something while nobody has the store's lock."""

    def __init__(self, what: Callable[[], object]) -> None:
        super().__init__()
        self._what = what
        self.count = 0

    def is_set(self) -> bool:
        self.count += 1
        self._what()
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        raise AssertionError("a signal that comes while its lock is held would never be handled")


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_migration, "SLOTS_A_STEP", 32)
    monkeypatch.setattr(order_migration, "PAGES_A_STEP", 4)


def set_quota(store: Store, pages: int, stop: threading.Event | None = None) -> None:
    store.set_rules(
        parse_rules([{"match": "one*", "arena": pages * FRAME}]), 0.0, (), stop.is_set if stop else lambda: False
    )


def pages_of(store: Store) -> int:
    return store.statistics().namespaces[0].used_bytes["arena"] // FRAME


def test_no_hold_of_the_lock_treats_more_than_a_few_pages(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(512)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(100))
    put_pages(store, one, range(1000, 1060))
    with monkeypatch.context() as patched:
        holds = replace_lock(store, patched)
        patched.setattr(SlotTable, "stamp", holds.counted("looked at", SlotTable.stamp))
        patched.setattr(ExpectedReuse, "remove", holds.counted("moved", ExpectedReuse.remove))
        set_quota(store, 50)
    assert sum(holds.done, Counter()) == {"looked at": 160, "moved": 160}
    assert max(done["looked at"] for done in holds.done) == 32
    assert max(done["moved"] for done in holds.done) == 4
    store.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_between_two_steps(open_store: OpenStore, seed: int) -> None:
    store = open_store(128)
    one, other = (store.open_namespace(layout_of(name, FRAME)) for name in ("one", "other"))
    for first in range(0, 80, 8):
        put_pages(store, one, range(first, first + 8))
    chance = random.Random(seed)

    def some() -> range:
        first = chance.randrange(0, 88, 8)
        return range(first, first + chance.randint(1, 8))

    def anything() -> None:
        chance.choice(
            (
                lambda: put_pages(store, one, some()),
                lambda: put_pages(store, other, some()),
                lambda: load_pages(store, one, some()),
                lambda: store.touch(one.fingerprint, page_hashes(some())),
                lambda: store.evict(one.fingerprint, page_hashes(some())),
                lambda: store.pin(one.fingerprint, page_hashes(some()), 1000),
                lambda: store.unpin(one.fingerprint, page_hashes(range(88))),
            )
        )()
        store.check_integrity()

    pauses = Pauses(anything)
    set_quota(store, 16, pauses)
    assert pauses.count > 10
    store.unpin(one.fingerprint, page_hashes(range(88)))
    put_pages(store, one, [500])
    assert pages_of(store) <= 16, "the quota counts, for pages that were moved and those that came meanwhile"
    store.check_integrity()


def test_a_quota_waits_until_all_pages_are_in_their_order(open_store: OpenStore) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(40))
    pages: list[int] = []

    def put_one() -> None:
        assert put_pages(store, one, [100 + len(pages)]).stored == 1
        pages.append(pages_of(store))

    set_quota(store, 20, Pauses(put_one))
    assert pages == [*range(41, 40 + len(pages)), 20], "no page left too early; behind the last step the quota counts"


def test_the_head_of_a_prefix_outlives_its_tail_also_where_the_tail_was_used_last(open_store: OpenStore) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(20))
    store.touch(one.fingerprint, page_hashes(range(10, 20)))
    set_quota(store, 8)
    put_pages(store, one, [500])
    assert found_pages(store, one, range(20)) == [*range(7)]


def test_a_namespace_that_is_dropped_on_the_way(open_store: OpenStore) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(40))
    pauses = Pauses(lambda: pauses.count == 6 and store.clear(one.fingerprint))
    set_quota(store, 20, pauses)
    with pytest.raises(UnknownNamespaceError):
        store.lookup([(one.fingerprint, page_hashes([1]))])
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(20))
    assert put_pages(store, one, [30]).stored == 1
    assert pages_of(store) == 20
    store.check_integrity()


@pytest.mark.parametrize(
    ("where", "name", "at"),
    [
        (order_migration.OrderMigration, "_look", 2),
        (order_migration.OrderMigration, "_sorted", 1),
        (order_migration.OrderMigration, "_move", 2),
        (EvictionOrders, "end_move", 1),
        (EvictionOrders, "enter", 6),
    ],
)
def test_what_fails_on_the_way_is_told_and_tried_again(
    open_store: OpenStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: type,
    name: str,
    at: int,
) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(40))
    method, calls = getattr(where, name), 0

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise MemoryError
        return method(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, fail)
        set_quota(store, 20)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"namespace {one.number} wait" in caplog.text
    store.check_integrity()
    assert put_pages(store, one, [100]).stored == 1
    assert pages_of(store) == 41, "the quota waits, and stores go on"
    store.migrate_orders(threading.Event())
    assert put_pages(store, one, [101]).stored == 1
    assert pages_of(store) == 20
    store.check_integrity()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("name", "at"), [("insert", 6), ("insert", 46), ("remove", 6)])
def test_a_page_that_a_policy_fails_at_does_not_keep_a_quota_waiting(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(40))
    method, calls = getattr(ExpectedReuse, name), 0

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise MemoryError
        return method(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ExpectedReuse, name, fail)
        set_quota(store, 20)
    assert calls > at
    store.check_integrity()
    assert put_pages(store, one, [100]).stored == 1
    assert pages_of(store) == 20
    store.check_integrity()


def test_a_quota_that_another_thread_is_at_counts_when_it_was_set(
    open_store: OpenStore, threads: ThreadPoolExecutor
) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(40))
    stopped = threading.Event()
    stopped.set()
    set_quota(store, 20, stopped)  # is left to the next one
    reached, go_on = threading.Event(), threading.Event()
    other = threads.submit(store.migrate_orders, Pauses(lambda: (reached.set(), go_on.wait(60))))
    try:
        assert reached.wait(60)
        set_quota(store, 20, Pauses(go_on.set))
        put_pages(store, one, [100])
        assert pages_of(store) == 20
    finally:
        go_on.set()
        result_of(other)


def test_whoever_waits_for_another_threads_migration_stops_when_the_node_does(
    open_store: OpenStore, threads: ThreadPoolExecutor
) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(40))
    stopped = threading.Event()
    stopped.set()
    set_quota(store, 20, stopped)
    reached, go_on = threading.Event(), threading.Event()
    other = threads.submit(store.migrate_orders, Pauses(lambda: (reached.set(), go_on.wait(60))))
    try:
        assert reached.wait(60)
        set_quota(store, 20, stopped)
        assert not other.done()
    finally:
        go_on.set()
        result_of(other)


def test_a_node_that_stops_leaves_it_undone(open_store: OpenStore) -> None:
    store = open_store(256)
    one = store.open_namespace(layout_of("one", FRAME))
    put_pages(store, one, range(40))
    pauses = Pauses(lambda: pauses.count == 6 and pauses.set())
    set_quota(store, 20, pauses)
    assert pauses.count == 6
    put_pages(store, one, range(100, 130))
    assert load_pages(store, one, range(40)) == 40
    store.check_integrity()
