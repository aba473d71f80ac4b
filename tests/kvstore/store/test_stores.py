"""Stores: what is reserved, published, refused, and what leaves for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from local_clients import LocalClient
from memory_tier import MemoryTier
from tiny_stores import (
    OpenStore,
    counters_of,
    fill_reserved,
    found_pages,
    hold_pages,
    kill_store,
    layout_of,
    load_pages,
    page_hash,
    page_hashes,
    put_pages,
)

from kvstore.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    LimitExceededError,
    NotAttachedError,
    UnknownNamespaceError,
)
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.page_codes import PageTier, StoreOutcome
from kvstore.store.leases import NODE
from kvstore.store.residency import QUARANTINE_SECONDS

FRAME = 4096


@pytest.mark.parametrize("page_bytes", [1, 4095, 4096, 4097, 20_000])
def test_what_was_stored_is_found_and_loaded(open_store: OpenStore, page_bytes: int) -> None:
    store = open_store(128)
    known = store.open_namespace(layout_of("a", page_bytes))
    assert put_pages(store, known, [1, 2]) == (2, 0, 0)
    assert put_pages(store, known, [2, 3]) == (1, 1, 0)
    [tiers] = store.lookup([(known.fingerprint, page_hashes([1, 2, 3, 4]))])
    assert list(tiers) == [PageTier.ARENA, PageTier.ARENA, PageTier.ARENA, PageTier.ABSENT]
    assert load_pages(store, known, [1, 2, 3, 4]) == 3
    assert load_pages(store, known, [4, 1]) == 0
    assert counters_of(store, "stored", "present", "refused") == (3, 1, 0)
    assert counters_of(store, "asked", "hit", "missed") == (6, 3, 3)
    store.check_integrity()


def test_a_page_is_visible_only_when_it_is_complete(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    hashes = page_hashes([1, 2])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    fill_reserved(store, known, hashes, reserved)
    assert found_pages(store, known, [1, 2]) == []
    assert load_pages(store, known, [1, 2]) == 0
    assert store.complete_store(NODE, reserved.lease, publish=True) == (2, 0, 0)
    assert load_pages(store, known, [1, 2]) == 2
    assert store.complete_store(NODE, reserved.lease, publish=True) == (0, 0, 0)


def test_what_was_given_up_is_not_found_and_its_slots_are_free(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    reserved = store.prepare_store(NODE, known.fingerprint, page_hashes([1, 2]), 10.0, direct=True)
    assert store.complete_store(NODE, reserved.lease, publish=False) == (0, 0, 2)
    assert found_pages(store, known, [1, 2]) == []
    assert store.statistics().arena_used_bytes == 0
    assert counters_of(store, "refused") == (2,)


def test_two_writers_of_one_page_both_succeed_and_one_copy_is_kept(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    hashes = page_hashes([1, 2])
    first, second = (store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True) for _ in range(2))
    assert set(first.frames).isdisjoint(second.frames)
    fill_reserved(store, known, hashes, first)
    fill_reserved(store, known, hashes, second)
    assert store.complete_store(NODE, second.lease, publish=True) == (2, 0, 0)
    assert store.complete_store(NODE, first.lease, publish=True) == (0, 2, 0)
    assert load_pages(store, known, [1, 2]) == 2
    assert store.statistics().arena_used_bytes == 2 * FRAME
    store.check_integrity()


def test_a_page_twice_in_a_batch_is_one_page(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    assert put_pages(store, known, [1, 1, 2]) == (2, 1, 0)
    assert put_pages(store, known, [1, 1]) == (0, 2, 0)
    assert load_pages(store, known, [1, 1, 2, 1]) == 4
    store.check_integrity()


def test_namespaces_do_not_see_each_others_pages(open_store: OpenStore) -> None:
    store = open_store()
    one, other = (store.open_namespace(layout_of(model, FRAME)) for model in "ab")
    put_pages(store, one, [1, 2])
    assert found_pages(store, other, [1, 2]) == []
    put_pages(store, other, [2])
    assert (load_pages(store, one, [1, 2]), load_pages(store, other, [2])) == (2, 1)
    answers = store.lookup([(known.fingerprint, page_hashes([1, 2])) for known in (one, other)])
    assert [list(tiers) for tiers in answers] == [[PageTier.ARENA, PageTier.ARENA], [PageTier.ABSENT, PageTier.ARENA]]


def test_a_batch_never_pushes_out_its_own_pages(open_store: OpenStore) -> None:
    """The oldest page of a full arena, named in the batch behind (or before) a new one, stays."""
    for batch in ([100, 0], [0, 100], [100, 101, 1, 0]):
        store = open_store(16)
        known = store.open_namespace(layout_of("a", FRAME))
        for number in range(16):
            put_pages(store, known, [number])
        hashes = page_hashes(batch)
        reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
        assert list(reserved.outcomes) == [
            StoreOutcome.RESERVED if number >= 100 else StoreOutcome.PRESENT for number in batch
        ]
        fill_reserved(store, known, hashes, reserved)
        store.complete_store(NODE, reserved.lease, publish=True)
        assert found_pages(store, known, batch) == batch
        assert load_pages(store, known, batch) == len(batch)
        store.clear(known.fingerprint)
        kill_store(store)


def test_a_new_tail_leaves_before_the_head_that_was_here(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    put_pages(store, known, [1, 2, 3, 4])
    for number in range(100, 112):
        put_pages(store, known, [number])
    left = []
    for number in range(200, 204):
        put_pages(store, known, [number])
        left += [each for each in (1, 2, 3, 4) if each not in found_pages(store, known, [1, 2, 3, 4]) + left]
    assert left == [4, 3, 2, 1]


def test_a_loaded_prefix_stays_and_its_tail_leaves_first(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2, 3])
    for number in range(100, 113):
        put_pages(store, known, [number])
    assert load_pages(store, known, [1, 2, 3]) == 3
    for number in range(200, 213):
        put_pages(store, known, [number])
    assert found_pages(store, known, [1, 2, 3, *range(100, 113)]) == [1, 2, 3]
    assert store.touch(known.fingerprint, page_hashes([1, 2, 9])) == 2
    stayed = [[1, 2, 3]]
    for number in range(300, 500):
        put_pages(store, known, [number])
        found = found_pages(store, known, [1, 2, 3])
        if found != stayed[-1]:
            stayed.append(found)
    assert stayed == [[1, 2, 3], [1, 2], [1], []]


def test_pages_that_leave_are_counted_exactly(open_store: OpenStore, tier: MemoryTier) -> None:
    """Evicted: a lower tier had it. Overrun: none had, and it is no longer found."""
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    put_pages(store, known, [3, 4])
    assert store.write_back.write_back() == 2
    assert put_pages(store, known, [5, 6]) == (2, 0, 0)
    for number in range(10, 20):
        put_pages(store, known, [number])
    assert counters_of(store, "evicted", "overrun") == (0, 0)
    put_pages(store, known, [20, 21])
    assert counters_of(store, "evicted", "overrun") == (2, 0)
    assert found_pages(store, known, [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    put_pages(store, known, [22, 23, 24])
    assert counters_of(store, "evicted", "overrun") == (2, 3)
    everything = [*range(1, 7), *range(10, 20), *range(20, 25)]
    found = found_pages(store, known, everything)
    assert len(found) == len(everything) - 3
    assert counters_of(store, "stored") == (len(everything),)
    assert load_pages(store, known, [24, 23, 22]) == 3
    store.check_integrity()


def test_without_a_tier_nothing_is_overrun(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(20):
        put_pages(store, known, [number])
    assert counters_of(store, "stored", "evicted", "overrun") == (20, 4, 0)
    assert store.write_back.write_back() == 0
    assert store.statistics().dirty_pages == 0


def test_when_everything_is_held_a_store_is_refused_and_counted(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    holds = []
    for number in range(16):
        put_pages(store, known, [number])
        holds.append(hold_pages(store, known, [number], owner=100 + number))
    client = 7
    answer = store.prepare_store(client, known.fingerprint, page_hashes([20, 3, 21]), 10.0, direct=True)
    assert (answer.lease, list(answer.outcomes), answer.frames) == (
        0,
        [StoreOutcome.REFUSED, StoreOutcome.PRESENT, StoreOutcome.REFUSED],
        [],
    )
    assert counters_of(store, "stored", "present", "refused", "evicted") == (16, 1, 2, 0)
    assert found_pages(store, known, [20, 21]) == []
    for owner, held in enumerate(holds[:2], 100):
        assert store.complete_load(owner, held.lease)
    answer = store.prepare_store(client, known.fingerprint, page_hashes([20, 21, 22]), 10.0, direct=True)
    assert list(answer.outcomes) == [StoreOutcome.RESERVED, StoreOutcome.RESERVED, StoreOutcome.REFUSED]
    store.check_integrity()


def test_one_owner_reserves_half_of_the_arena_at_most(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    outcomes = []
    for first in range(0, 12, 4):
        hashes = page_hashes(range(first, first + 4))
        outcomes += list(store.prepare_store(3, known.fingerprint, hashes, 10.0, direct=True).outcomes)
    assert outcomes == [StoreOutcome.RESERVED] * 8 + [StoreOutcome.REFUSED] * 4
    assert (
        list(store.prepare_store(4, known.fingerprint, hashes, 10.0, direct=True).outcomes)
        == [StoreOutcome.RESERVED] * 4
    )
    assert store.statistics().arena_used_bytes == 12 * FRAME


def test_behind_a_refused_page_everything_new_is_refused(open_store: OpenStore) -> None:
    """A prefix with a hole is worth nothing behind it."""
    store = open_store(64)
    large = store.open_namespace(layout_of("large", 31 * FRAME))
    small = store.open_namespace(layout_of("small", FRAME))
    put_pages(store, small, [1])
    store.prepare_store(3, large.fingerprint, page_hashes([1]), 10.0, direct=True)
    outcomes = store.prepare_store(3, small.fingerprint, page_hashes([2, 3, 1, 4]), 10.0, direct=True).outcomes
    assert list(outcomes) == [StoreOutcome.RESERVED, StoreOutcome.REFUSED, StoreOutcome.PRESENT, StoreOutcome.REFUSED]


def test_bad_requests_name_value_and_limit_and_change_nothing(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    before = store.statistics()
    batch = store.batch_pages(known)
    assert batch == 16
    many = page_hashes(range(batch + 1))
    calls: list[Callable[[bytes, list[bytes]], object]] = [
        lambda fingerprint, hashes: store.prepare_store(NODE, fingerprint, hashes, 1.0, direct=True),
        lambda fingerprint, hashes: store.prepare_load(NODE, fingerprint, hashes, 1.0),
        lambda fingerprint, hashes: store.lookup([(fingerprint, hashes)]),
        store.touch,
        store.evict,
    ]
    for call in calls:
        with pytest.raises(UnknownNamespaceError, match="unknown namespace 6161616161616161: open it first"):
            call(b"a" * 32, [])
        with pytest.raises(UnknownNamespaceError, match=r"unknown namespace \(empty\)"):
            call(b"", [])
        for wrong in (b"", b"x" * 31, b"x" * 33, b"x" * 64):
            with pytest.raises(InvalidRequestError, match=f"a block hash has 32 bytes, got one of {len(wrong)}"):
                call(known.fingerprint, [page_hash(1), wrong])
    for call in calls[:2]:
        with pytest.raises(LimitExceededError, match="17 pages in one batch, the limit is 16"):
            call(known.fingerprint, many)
    with pytest.raises(LimitExceededError, match=f"a lookup of {MOST_LOOKUP_PAGES + 1} pages, the limit is"):
        store.lookup([(known.fingerprint, [b""] * MOST_LOOKUP_PAGES), (known.fingerprint, [b""])])
    assert store.statistics() == before
    assert load_pages(store, known, [1]) == 1


def test_a_layout_that_disagrees_is_refused_and_nothing_is_lost(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    with pytest.raises(LayoutMismatchError, match="page_bytes 4096, not 8192"):
        store.open_namespace(layout_of("a", 2 * FRAME))
    assert load_pages(store, known, [1]) == 1
    assert store.clear(known.fingerprint) == 1
    wider = store.open_namespace(layout_of("a", 2 * FRAME))
    assert found_pages(store, wider, [1]) == []
    put_pages(store, wider, [1])
    assert load_pages(store, wider, [1]) == 1


def test_pages_above_half_of_the_arena_are_refused_at_once(open_store: OpenStore) -> None:
    """They could never be stored."""
    store = open_store(64)
    largest = store.open_namespace(layout_of("a", 32 * FRAME))
    assert store.batch_pages(largest) == 1
    assert put_pages(store, largest, [1]) == (1, 0, 0)
    with pytest.raises(LimitExceededError, match=r"page_bytes is 131073 \(128 KiB\), the limit is half .*, 128 KiB"):
        store.open_namespace(layout_of("b", 32 * FRAME + 1))


def test_a_namespace_from_a_larger_arena_refuses_stores_and_loads_nothing(
    open_store: OpenStore, shm: Path, tier: MemoryTier
) -> None:
    (shm / "disk").mkdir()
    store = open_store(256, [tier], also=[shm / "disk"])
    known = store.open_namespace(layout_of("a", 100 * FRAME))
    put_pages(store, known, [1])
    store.close()
    tier.closed = False
    smaller = open_store(64, [tier], also=[shm / "disk"])
    assert found_pages(smaller, known, [1]) == [1]
    assert load_pages(smaller, known, [1]) == 0
    assert put_pages(smaller, known, [2]) == (0, 0, 1)
    smaller.check_integrity()


@pytest.mark.parametrize("lapsed", [False, True])
def test_what_a_dead_client_was_writing_is_lent_to_nobody_for_some_seconds(
    open_store: OpenStore, shm: Path, clock: FakeClock, lapsed: bool
) -> None:
    """A device may go on copying for it. A client that leaves has said that it stopped."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    leaves, dies = LocalClient(shm / "arena"), LocalClient(shm / "arena")
    for number, client in enumerate((leaves, dies)):
        owner = store.owner_of(store.attach(client.name))
        reserved = store.prepare_store(owner, known.fingerprint, page_hashes([number]), 9.0, direct=True)
    if lapsed:
        clock.now += 9.1
        store.sweep()
    leaves.leave()
    dies.die()
    store.sweep()
    store.check_integrity()
    assert store.statistics().clients == 0
    assert store.statistics().arena_used_bytes == FRAME

    for number in range(100, 120):
        put_pages(store, known, [number])
        store.arena.view(reserved.frames[0], FRAME)[:] = 0xFF
    clock.now += QUARANTINE_SECONDS - 0.1
    store.sweep()
    found = found_pages(store, known, list(range(100, 120)))
    assert len(found) == 15
    assert all(load_pages(store, known, [number]) == 1 for number in found)

    clock.now += 0.2
    store.sweep()
    store.check_integrity()
    put_pages(store, known, [200])
    assert store.statistics().arena_pages == 16


def test_clients_are_named_by_their_arena(open_store: OpenStore, shm: Path) -> None:
    store = open_store()
    client = LocalClient(shm / "arena")
    name = store.attach(client.name)
    assert store.owner_of(name) == 1
    for other in (0, 1, name + 1, name ^ (1 << 20), 1 << 63):
        with pytest.raises(NotAttachedError):
            store.owner_of(other)
    client.die()
    store.sweep()
    with pytest.raises(NotAttachedError):
        store.owner_of(name)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_reservation_that_fails_halfway_leaves_nothing_behind(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    store = open_store(64)
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(64):
        put_pages(store, known, [number])
    client = LocalClient(store.arena.directory)
    owner = store.owner_of(store.attach(client.name))
    evictor = store._state.catalog._evicting
    make_room, calls = evictor.make_room, 0

    def fail(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError
        return make_room(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(evictor, "make_room", fail)
        with pytest.raises(MemoryError):
            if ahead:
                store.reserve_ahead(owner, known.fingerprint, 5, 10.0, evict=True)
            else:
                store.prepare_store(owner, known.fingerprint, page_hashes(range(64, 70)), 10.0, direct=True)
    store.check_integrity()
    assert store.statistics().counters["evicted"] == 2
    assert put_pages(store, known, range(64, 70)).stored == 6
    store.check_integrity()
    client.die()
