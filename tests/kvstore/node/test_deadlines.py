"""Leases past their deadline, and those of clients that are gone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fake_clock import FakeClock
from local_clients import ChildClient, LocalClient
from tiny_stores import (
    counters_of,
    fill_reserved,
    found_pages,
    hold_pages,
    layout_of,
    load_pages,
    page_hashes,
    put_pages,
    result_of,
)

from kvstore.limits import LONGEST_LEASE
from kvstore.store.leases import NODE
from kvstore.store.residency import QUARANTINE_SECONDS
from kvstore.store.store import Store

FRAME = 4096
OpenStore = Callable[..., Store]


def test_a_lapsed_direct_reservation_is_not_reused_while_its_client_lives(
    open_store: OpenStore, shm: Path, clock: FakeClock, child_client: Callable[[Path], ChildClient]
) -> None:
    """A stopped process may wake up and go on writing: only its death (or its word) frees the slots."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    client = child_client(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    reserved = store.prepare_store(owner, known.fingerprint, page_hashes(range(4)), 5.0, direct=True)
    taken = set(reserved.frames)
    clock.now += 5.1
    store.sweep()
    assert counters_of(store, "lapsed") == (4,)
    for number in range(100, 130):
        put_pages(store, known, [number])
        for frame in taken:  # it does wake up
            store.arena.view(frame, FRAME)[:] = 0xFF
    store.sweep()
    found = found_pages(store, known, list(range(130)))
    assert found == list(range(118, 130)), "of 16 slots 12 are in use"
    assert all(load_pages(store, known, [number]) == 1 for number in found)
    assert store.statistics().arena_used_bytes == 16 * FRAME
    store.check_integrity()
    client.die()
    store.sweep()
    clock.now += QUARANTINE_SECONDS
    store.sweep()
    assert store.statistics().arena_used_bytes == 12 * FRAME
    assert store.statistics().clients == 0
    assert store.complete_store(owner, reserved.lease, publish=True) == (0, 0, 0)
    store.check_integrity()


def test_a_lapsed_reservation_cannot_be_published(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    reserved = store.prepare_store(NODE, known.fingerprint, page_hashes([1, 2]), 5.0, direct=True)
    clock.now += 5.1
    store.sweep()
    store.sweep()
    assert store.statistics().arena_used_bytes == 2 * FRAME
    assert store.complete_store(NODE, reserved.lease, publish=True) == (0, 0, 2)
    assert found_pages(store, known, [1, 2]) == []
    assert store.statistics().arena_used_bytes == 0
    assert counters_of(store, "lapsed", "refused", "stored") == (2, 2, 0)
    store.check_integrity()


def test_a_lapsed_indirect_reservation_is_freed_at_once(open_store: OpenStore, clock: FakeClock) -> None:
    """Nobody has its memory but the node's own threads."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    reserved = store.prepare_store(NODE, known.fingerprint, page_hashes([1, 2]), 5.0, direct=False)
    clock.now += 5.1
    store.sweep()
    assert store.statistics().arena_used_bytes == 0
    assert store.take_over_writing(NODE, reserved.lease) is None
    assert store.complete_store(NODE, reserved.lease, publish=True) == (0, 0, 0)
    assert counters_of(store, "lapsed") == (2,)


def test_no_lease_lasts_longer_than_the_limit(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    held = hold_pages(store, known, [1], ttl=1e9)
    store.prepare_store(NODE, known.fingerprint, page_hashes([2]), 1e9, direct=False)
    clock.now += LONGEST_LEASE + 0.1
    store.sweep()
    assert not store.complete_load(NODE, held.lease)
    assert store.statistics().arena_used_bytes == FRAME


def test_writing_by_the_nodes_own_thread_does_not_lapse(
    open_store: OpenStore, clock: FakeClock, threads: ThreadPoolExecutor
) -> None:
    """And nobody else can end it under way: its slots would be another's while it still writes."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    hashes = page_hashes([1, 2])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 5.0, direct=False)
    assert store.take_over_writing(3, reserved.lease) is None
    views = store.take_over_writing(NODE, reserved.lease)
    assert views is not None
    assert [view.ctypes.data for view in views] == [store.arena.view(at, FRAME).ctypes.data for at in reserved.frames]
    assert store.take_over_writing(NODE, reserved.lease) is None
    clock.now += 1e6
    store.sweep()
    abort = threads.submit(store.complete_store, NODE, reserved.lease, publish=False)
    assert result_of(abort) == (0, 0, 0)
    fill_reserved(store, known, hashes, reserved)
    assert store.complete_store(NODE, reserved.lease, publish=True) == (2, 0, 0)
    assert load_pages(store, known, [1, 2]) == 2


def test_a_lapsed_hold_is_not_valid(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    held = hold_pages(store, known, [1], ttl=5.0)
    assert store.still_held(NODE, held.lease)
    assert store.checksums(NODE, held.lease) is not None
    clock.now += 5.1
    store.sweep()
    assert not store.still_held(NODE, held.lease)
    assert store.checksums(NODE, held.lease) is None
    assert not store.complete_load(NODE, held.lease)
    for number in range(100, 116):
        put_pages(store, known, [number])
    assert found_pages(store, known, [1]) == [], "the page could leave"
    store.check_integrity()


def test_leases_belong_to_their_owner(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    held = store.prepare_load(3, known.fingerprint, page_hashes([1]), 5.0)
    reserved = store.prepare_store(3, known.fingerprint, page_hashes([2]), 5.0, direct=True)
    assert not store.complete_load(4, held.lease)
    assert not store.still_held(4, held.lease)
    assert store.checksums(4, held.lease) is None
    assert store.complete_store(4, reserved.lease, publish=True) == (0, 0, 0)
    assert found_pages(store, known, [2]) == []
    assert store.complete_load(3, held.lease)
    assert store.complete_store(3, reserved.lease, publish=True) == (1, 0, 0)


def test_what_a_dead_client_left_open_is_ended(open_store: OpenStore, shm: Path, clock: FakeClock) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    client, other = LocalClient(shm / "arena"), LocalClient(shm / "arena")
    owner, living = (store.owner_of(store.attach(each.name)) for each in (client, other))
    held = store.prepare_load(owner, known.fingerprint, page_hashes([1]), 5.0)
    reserved = store.prepare_store(owner, known.fingerprint, page_hashes([2]), 5.0, direct=True)
    stays = store.prepare_store(living, known.fingerprint, page_hashes([3]), 5.0, direct=True)
    client.die()
    store.sweep()
    store.check_integrity()
    assert not store.complete_load(owner, held.lease)
    assert store.complete_store(owner, reserved.lease, publish=True) == (0, 0, 0)
    clock.now += QUARANTINE_SECONDS
    store.sweep()
    assert store.statistics().arena_used_bytes == 2 * FRAME
    assert store.complete_store(living, stays.lease, publish=True) == (1, 0, 0)
    other.die()


def test_a_call_that_comes_behind_its_clients_end_leaves_nothing(
    open_store: OpenStore, shm: Path, clock: FakeClock
) -> None:
    """Its owner was looked up while the client lived; by now the client is forgotten."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    client = LocalClient(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    client.die()
    store.sweep()
    store.prepare_store(owner, known.fingerprint, page_hashes([2]), 5.0, direct=True)
    store.sweep()
    assert store.statistics().arena_used_bytes == 0
    store.check_integrity()
