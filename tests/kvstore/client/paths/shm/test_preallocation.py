"""Stores into preallocated slots, through a real node."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import suppress

import numpy as np
import pytest

import kvstore
from kvstore.client.paths.shm import preallocation

PAGE = 5000
SLOT = 8192


@pytest.fixture(autouse=True)
def small_stores_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preallocation, "LEAST_BYTES", 1)
    monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 1000.0)  # slots go back when a test says so


@pytest.fixture
def node(start_node):
    return start_node(arena=256 * SLOT, disk_limit=0)


@pytest.fixture
def near(node):
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        yield client


def there(client: kvstore.Client) -> int:
    """Reservations that the client has."""
    slots = client._session.path._preallocation
    with slots._lock:
        return sum(map(len, slots._slots.values()))


def store(pages: kvstore.Namespace, hashes: list[bytes], number: int) -> kvstore.StoreResult:
    return pages.store(hashes, np.full((len(hashes), PAGE), number, np.uint8))


def check(pages: kvstore.Namespace, hashes: list[bytes], number: int) -> None:
    into = np.zeros((len(hashes), PAGE), np.uint8)
    assert pages.load(hashes, into) == len(hashes)
    assert (into == number).all()


def test_the_next_store_makes_one_call_behind_its_copy(near, layout, hashes, calls, eventually):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(4, 0), 0)
    eventually(lambda: there(near) == 1)
    calls.clear()
    assert store(pages, hashes(4, 1), 1) == kvstore.StoreResult(stored=4)
    assert calls == ["CompleteStoreRequest"]
    for number in (0, 1):
        check(pages, hashes(4, number), number)


def test_only_what_is_missing_is_written(near, hashes, calls, eventually):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(4), 1)
    eventually(lambda: there(near) == 1)
    calls.clear()
    assert store(pages, hashes(6), 2) == kvstore.StoreResult(stored=2, present=4)
    assert calls == ["CompleteStoreRequest"]
    check(pages, hashes(4), 1)
    check(pages, hashes(6)[4:], 2)


def test_a_prefix_without_its_head_is_written_and_kept_as_it_was(near, hashes, calls, eventually):
    """Whether a page is here is looked up for the first one alone, where that is not: the node tells of the others."""
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(4), 1)
    eventually(lambda: there(near) == 1)
    assert pages.evict(hashes(4)[:1]) == 1
    calls.clear()
    assert store(pages, hashes(4), 2) == kvstore.StoreResult(stored=1, present=3)
    assert calls == ["CompleteStoreRequest"]
    check(pages, hashes(4)[1:], 1)
    check(pages, hashes(4)[:1], 2)


def test_a_forked_child_does_not_write_into_its_parents_slots(near, hashes, eventually):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(4), 1)
    eventually(lambda: there(near) == 1)
    child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            path = near._session.path
            status = int(path._preallocation.take(path._attachment, pages._handle.current[0], 4) is not None)
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_says_no_goodbye_for_its_parent(node, near, hashes):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(4), 1)
    child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            near._session.path._attachment.retire()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    pending = pages.prepare_store(hashes(4, 1))
    node.store.sweep()
    assert near.status().clients == 1
    assert pending.complete() == kvstore.StoreResult(stored=4)


def test_a_larger_store_reserves_slots_of_its_own(near, hashes, calls, eventually):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(2, 0), 0)
    eventually(lambda: there(near) == 1)
    calls.clear()
    assert store(pages, hashes(5, 1), 1) == kvstore.StoreResult(stored=5)
    assert calls == ["PrepareStoreRequest", "CompleteStoreRequest"]


def test_pages_leave_for_the_next_of_many_stores_alike(node, near, hashes, calls, eventually):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    for number in range(64):
        store(pages, hashes(4, number), number)
    eventually(lambda: there(near) == 1)
    assert node.store.statistics().arena_used_bytes == 256 * SLOT
    assert node.store.statistics().counters["evicted"] == 4, "the last store's pages and those expected do not fit"
    calls.clear()
    store(pages, hashes(4, 64), 64)
    assert calls == ["CompleteStoreRequest"]
    check(pages, hashes(4, 64), 64)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 5, 4, 5, 4)])
def test_no_page_leaves_for_a_store_that_nobody_expects(node, near, hashes, eventually, sizes):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(256 - sum(sizes), 0), 0)
    for number, size in enumerate(sizes, 1):
        store(pages, hashes(size, number), number)
    eventually(lambda: not near._session.path._preallocation._coming)
    assert node.store.statistics().counters["evicted"] == 0


def test_a_stream_of_stores_ends_with_its_time(near, monkeypatch):
    near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE)).lookup([bytes(32)])
    slots = near._session.path._preallocation
    monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 1.0)
    assert [slots._expects(b"a", 4, at) for at in (0.0, 0.9, 1.8, 2.7)] == [False, False, True, True]
    assert [slots._expects(b"a", 4, at) for at in (3.8, 4.7, 5.6)] == [False, False, True]


def test_slots_that_are_not_used_go_back(node, near, hashes, eventually, monkeypatch):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    store(pages, hashes(4), 1)
    eventually(lambda: there(near) == 1)
    assert node.store.statistics().arena_used_bytes == 8 * SLOT
    monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 0.2)
    eventually(lambda: node.store.statistics().arena_used_bytes == 4 * SLOT)
    eventually(lambda: near._session.path._preallocation._thread is None)
    monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 1000.0)
    assert store(pages, hashes(4, 1), 2) == kvstore.StoreResult(stored=4)
    eventually(lambda: there(near) == 1)  # it begins anew


def test_an_error_that_nobody_thought_of_keeps_no_slots(node, near, hashes, eventually, monkeypatch, caplog):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    failing = [True]
    settle = near._session.path._connections.settle_idle

    def settle_idle(deadline: float) -> None:
        if failing.pop() if failing else False:
            raise ValueError("unforeseen")
        settle(deadline)

    monkeypatch.setattr(near._session.path._connections, "settle_idle", settle_idle)
    monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 0.2)
    store(pages, hashes(4), 1)
    eventually(lambda: not failing)
    eventually(lambda: node.store.statistics().arena_used_bytes == 4 * SLOT)
    assert "unforeseen" in caplog.text


def test_slots_of_a_node_that_was_restarted_are_not_written(start_node, hashes, eventually, monkeypatch):
    node = start_node(arena=256 * SLOT, disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
        store(pages, hashes(4), 1)
        eventually(lambda: there(client) == 1)
        node.stop()
        again = start_node(arena=256 * SLOT, disk_limit=0)
        assert store(pages, hashes(4, 1), 2).stored == 4
        check(pages, hashes(4, 0), 1)
        check(pages, hashes(4, 1), 2)
        # Nor are they lost: the client lets go of what the earlier node gave.
        monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 0.2)
        eventually(lambda: again.store.statistics().arena_used_bytes == 8 * SLOT)
        with again.store.write_back.writing:
            again.store.check_integrity()


def test_an_arena_of_a_node_that_was_restarted_is_let_go(start_node, layout, hashes, eventually, monkeypatch):
    node = start_node(arena=256 * SLOT, disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
        store(pages, hashes(4), 1)
        eventually(lambda: there(client) == 1)
        former = weakref.ref(client._session.path._attachment)
        node.stop()
        start_node(arena=512 * SLOT, disk_limit=0)
        monkeypatch.setattr(preallocation, "LEAST_BYTES", 1 << 30)  # nothing is preallocated any more
        store(pages, hashes(4, 1), 2)
        monkeypatch.setattr(preallocation, "_IDLE_SECONDS", 0.2)

        def is_gone() -> bool:
            gc.collect()
            return former() is None

        eventually(is_gone)


def test_threads_share_what_is_preallocated(node, near, hashes):
    pages = near.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 8):
                assert store(pages, hashes(4, number), number).stored == 4
                check(pages, hashes(4, number), number)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for number in (*range(8), *range(20, 28), *range(40, 48)):
        check(pages, hashes(4, number), number)


def test_a_client_that_is_closed_keeps_nothing(node, hashes, eventually):
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
        store(pages, hashes(4), 1)
        eventually(lambda: there(client) == 1)
    eventually(lambda: node.store.statistics().arena_used_bytes == 4 * SLOT)
