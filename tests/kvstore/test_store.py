"""The store's primitives: storing, loading, dropping, and what their faults leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.answers import ABSENT, ARENA, DISK, LONGEST_TICKET, MOST_LOOKUP_PAGES, PRESENT, REFUSED, RESERVED
from kvstore.arena.arena import Arena
from kvstore.errors import (
    InUseError,
    InvalidRequestError,
    LayoutMismatchError,
    LimitExceededError,
    NotAttachedError,
    ResourceError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvstore.store import Store
from kvstore.tickets import NODE

FRAME = 4096
OpenStore = Callable[..., Store]
PATIENCE = 20.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def result(future: Future[Any]) -> Any:
    return future.result(PATIENCE)


def counts(store: Store, *names: str) -> tuple[int, ...]:
    counters = store.statistics().counters
    return tuple(counters[name] for name in names)


# -- storing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [1, 4095, 4096, 4097, 20_000])
def test_what_was_stored_is_found_and_loaded(open_store: OpenStore, kv: SimpleNamespace, page_bytes: int) -> None:
    store = open_store(128)
    known = store.open_namespace(kv.layout("a", page_bytes))
    assert kv.put(store, known, [1, 2]) == (2, 0, 0)
    assert kv.put(store, known, [2, 3]) == (1, 1, 0)
    [tiers] = store.lookup([(known.fingerprint, kv.hashes_of([1, 2, 3, 4]))])
    assert list(tiers) == [ARENA, ARENA, ARENA, ABSENT]
    assert kv.get(store, known, [1, 2, 3, 4]) == 3
    assert kv.get(store, known, [4, 1]) == 0
    assert counts(store, "stored", "present", "refused") == (3, 1, 0)
    assert counts(store, "asked", "hit", "missed") == (6, 3, 3)
    store.check_integrity()


def test_a_page_is_visible_only_when_it_is_complete(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    hashes = kv.hashes_of([1, 2])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    kv.fill(store, known, hashes, reserved)
    assert kv.found(store, known, [1, 2]) == []
    assert kv.get(store, known, [1, 2]) == 0
    assert store.complete_store(NODE, reserved.ticket, publish=True) == (2, 0, 0)
    assert kv.get(store, known, [1, 2]) == 2
    assert store.complete_store(NODE, reserved.ticket, publish=True) == (0, 0, 0)


def test_what_was_given_up_is_not_found_and_its_slots_are_free(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    reserved = store.prepare_store(NODE, known.fingerprint, kv.hashes_of([1, 2]), 10.0, direct=True)
    assert store.complete_store(NODE, reserved.ticket, publish=False) == (0, 0, 2)
    assert kv.found(store, known, [1, 2]) == []
    assert store.statistics().arena_used_bytes == 0
    assert counts(store, "refused") == (2,)


def test_two_writers_of_one_page_both_succeed_and_one_copy_is_kept(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    hashes = kv.hashes_of([1, 2])
    first, second = (store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True) for _ in range(2))
    assert set(first.frames).isdisjoint(second.frames)
    kv.fill(store, known, hashes, first)
    kv.fill(store, known, hashes, second)
    assert store.complete_store(NODE, second.ticket, publish=True) == (2, 0, 0)
    assert store.complete_store(NODE, first.ticket, publish=True) == (0, 2, 0)
    assert kv.get(store, known, [1, 2]) == 2
    assert store.statistics().arena_used_bytes == 2 * FRAME
    store.check_integrity()


def test_a_page_twice_in_a_batch_is_one_page(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    assert kv.put(store, known, [1, 1, 2]) == (2, 1, 0)
    assert kv.put(store, known, [1, 1]) == (0, 2, 0)
    assert kv.get(store, known, [1, 1, 2, 1]) == 4
    store.check_integrity()


def test_namespaces_do_not_see_each_others_pages(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    one, other = (store.open_namespace(kv.layout(model, FRAME)) for model in "ab")
    kv.put(store, one, [1, 2])
    assert kv.found(store, other, [1, 2]) == []
    kv.put(store, other, [2])
    assert (kv.get(store, one, [1, 2]), kv.get(store, other, [2])) == (2, 1)
    answers = store.lookup([(known.fingerprint, kv.hashes_of([1, 2])) for known in (one, other)])
    assert [list(tiers) for tiers in answers] == [[ARENA, ARENA], [ABSENT, ARENA]]


def test_a_batch_never_pushes_out_its_own_pages(open_store: OpenStore, kv: SimpleNamespace) -> None:
    """The oldest page of a full arena, named in the batch behind (or before) a new one, stays."""
    for batch in ([100, 0], [0, 100], [100, 101, 1, 0]):
        store = open_store(16)
        known = store.open_namespace(kv.layout("a", FRAME))
        for number in range(16):
            kv.put(store, known, [number])
        hashes = kv.hashes_of(batch)
        reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
        assert list(reserved.outcomes) == [RESERVED if number >= 100 else PRESENT for number in batch]
        kv.fill(store, known, hashes, reserved)
        store.complete_store(NODE, reserved.ticket, publish=True)
        assert kv.found(store, known, batch) == batch
        assert kv.get(store, known, batch) == len(batch)
        store.clear(known.fingerprint)
        kv.kill(store)


def test_a_new_tail_leaves_before_the_head_that_was_here(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2])
    kv.put(store, known, [1, 2, 3, 4])
    for number in range(100, 112):
        kv.put(store, known, [number])
    left = []
    for number in range(200, 204):
        kv.put(store, known, [number])
        left += [each for each in (1, 2, 3, 4) if each not in kv.found(store, known, [1, 2, 3, 4]) + left]
    assert left == [4, 3, 2, 1]


def test_a_loaded_prefix_stays_and_its_tail_leaves_first(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2, 3])
    for number in range(100, 113):
        kv.put(store, known, [number])
    assert kv.get(store, known, [1, 2, 3]) == 3
    for number in range(200, 213):
        kv.put(store, known, [number])
    assert kv.found(store, known, [1, 2, 3, *range(100, 113)]) == [1, 2, 3]
    assert store.touch(known.fingerprint, kv.hashes_of([1, 2, 9])) == 2
    for number in range(300, 314):
        kv.put(store, known, [number])
    assert kv.found(store, known, [1, 2, 3]) == [1, 2]
    kv.put(store, known, [314])
    assert kv.found(store, known, [1, 2, 3]) == [1]


def test_pages_that_leave_are_counted_exactly(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    """Evicted: a tier below had it. Overrun: none had, and it is no longer found."""
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2])
    kv.put(store, known, [3, 4])
    assert store.write_behind.write_back() == 2
    assert kv.put(store, known, [5, 6]) == (2, 0, 0)
    for number in range(10, 20):
        kv.put(store, known, [number])
    assert counts(store, "evicted", "overrun") == (0, 0)
    kv.put(store, known, [20, 21])
    assert counts(store, "evicted", "overrun") == (2, 0)
    assert kv.found(store, known, [1, 2, 3, 4, 5, 6]) == [1, 2, 3, 4, 5, 6]
    kv.put(store, known, [22, 23, 24])
    assert counts(store, "evicted", "overrun") == (2, 3)
    everything = [*range(1, 7), *range(10, 20), *range(20, 25)]
    found = kv.found(store, known, everything)
    assert len(found) == len(everything) - 3
    assert counts(store, "stored") == (len(everything),)
    assert kv.get(store, known, [24, 23, 22]) == 3
    store.check_integrity()


def test_without_a_tier_nothing_is_overrun(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    for number in range(20):
        kv.put(store, known, [number])
    assert counts(store, "stored", "evicted", "overrun") == (20, 4, 0)
    assert store.write_behind.write_back() == 0
    assert store.statistics().dirty_pages == 0


def test_when_everything_is_held_a_store_is_refused_and_counted(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    holds = []
    for number in range(16):
        kv.put(store, known, [number])
        holds.append(kv.hold(store, known, [number], owner=100 + number))
    client = 7
    answer = store.prepare_store(client, known.fingerprint, kv.hashes_of([20, 3, 21]), 10.0, direct=True)
    assert (answer.ticket, list(answer.outcomes), answer.frames) == (0, [REFUSED, PRESENT, REFUSED], [])
    assert counts(store, "stored", "present", "refused", "evicted") == (16, 1, 2, 0)
    assert kv.found(store, known, [20, 21]) == []
    for owner, held in enumerate(holds[:2], 100):
        assert store.complete_load(owner, held.ticket)
    answer = store.prepare_store(client, known.fingerprint, kv.hashes_of([20, 21, 22]), 10.0, direct=True)
    assert list(answer.outcomes) == [RESERVED, RESERVED, REFUSED]
    store.check_integrity()


def test_one_owner_reserves_half_of_the_arena_at_most(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    outcomes = []
    for first in range(0, 12, 4):
        hashes = kv.hashes_of(range(first, first + 4))
        outcomes += list(store.prepare_store(3, known.fingerprint, hashes, 10.0, direct=True).outcomes)
    assert outcomes == [RESERVED] * 8 + [REFUSED] * 4
    assert list(store.prepare_store(4, known.fingerprint, hashes, 10.0, direct=True).outcomes) == [RESERVED] * 4
    assert store.statistics().arena_used_bytes == 12 * FRAME


def test_behind_a_refused_page_everything_new_is_refused(open_store: OpenStore, kv: SimpleNamespace) -> None:
    """A prefix with a hole is worth nothing behind it."""
    store = open_store(64)
    large = store.open_namespace(kv.layout("large", 31 * FRAME))
    small = store.open_namespace(kv.layout("small", FRAME))
    kv.put(store, small, [1])
    store.prepare_store(3, large.fingerprint, kv.hashes_of([1]), 10.0, direct=True)
    outcomes = store.prepare_store(3, small.fingerprint, kv.hashes_of([2, 3, 1, 4]), 10.0, direct=True).outcomes
    assert list(outcomes) == [RESERVED, REFUSED, PRESENT, REFUSED]


# -- what is refused -----------------------------------------------------------------------------------------------


def test_bad_requests_name_value_and_limit_and_change_nothing(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    before = store.statistics()
    batch = store.batch_pages(known)
    assert batch == 16
    many = kv.hashes_of(range(batch + 1))
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
                call(known.fingerprint, [kv.hash_of(1), wrong])
    for call in calls[:2]:
        with pytest.raises(LimitExceededError, match="17 pages in one batch, the limit is 16"):
            call(known.fingerprint, many)
    with pytest.raises(LimitExceededError, match=f"a lookup of {MOST_LOOKUP_PAGES + 1} pages, the limit is"):
        store.lookup([(known.fingerprint, [b""] * MOST_LOOKUP_PAGES), (known.fingerprint, [b""])])
    assert store.statistics() == before
    assert kv.get(store, known, [1]) == 1


def test_a_layout_that_disagrees_is_refused_and_nothing_is_lost(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    with pytest.raises(LayoutMismatchError, match="page_bytes 4096, not 8192"):
        store.open_namespace(kv.layout("a", 2 * FRAME))
    assert kv.get(store, known, [1]) == 1
    assert store.clear(known.fingerprint) == 1
    wider = store.open_namespace(kv.layout("a", 2 * FRAME))
    assert kv.found(store, wider, [1]) == []
    kv.put(store, wider, [1])
    assert kv.get(store, wider, [1]) == 1


def test_pages_above_half_of_the_arena_are_refused_at_once(open_store: OpenStore, kv: SimpleNamespace) -> None:
    """They could never be stored."""
    store = open_store(64)
    largest = store.open_namespace(kv.layout("a", 32 * FRAME))
    assert store.batch_pages(largest) == 1
    assert kv.put(store, largest, [1]) == (1, 0, 0)
    with pytest.raises(LimitExceededError, match=r"page_bytes is 131073 \(128 KiB\), the limit is half .*, 128 KiB"):
        store.open_namespace(kv.layout("b", 32 * FRAME + 1))


def test_a_namespace_from_a_larger_arena_refuses_stores_and_loads_nothing(
    open_store: OpenStore, kv: SimpleNamespace, shm: Path, tier: Any
) -> None:
    (shm / "disk").mkdir()
    store = open_store(256, [tier], also=[shm / "disk"])
    known = store.open_namespace(kv.layout("a", 100 * FRAME))
    kv.put(store, known, [1])
    store.close()
    tier.closed = False
    smaller = open_store(64, [tier], also=[shm / "disk"])
    assert kv.found(smaller, known, [1]) == [1]
    assert kv.get(smaller, known, [1]) == 0
    assert kv.put(smaller, known, [2]) == (0, 0, 1)
    smaller.check_integrity()


def test_clients_are_named_by_their_arena(open_store: OpenStore, kv: SimpleNamespace, shm: Path) -> None:
    store = open_store()
    client = kv.LocalClient(shm / "arena")
    name = store.attach(client.name)
    assert store.owner_of(name) == 1
    for other in (0, 1, name + 1, name ^ (1 << 20), 1 << 63):
        with pytest.raises(NotAttachedError):
            store.owner_of(other)
    client.die()
    store.sweep()
    with pytest.raises(NotAttachedError):
        store.owner_of(name)


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_a_lapsed_direct_reservation_is_not_reused_while_its_client_lives(
    open_store: OpenStore, kv: SimpleNamespace, shm: Path, clock: Any, child_client: Callable[[Path], Any]
) -> None:
    """A stopped process may wake up and go on writing: only its death (or its word) frees the slots."""
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    client = child_client(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    reserved = store.prepare_store(owner, known.fingerprint, kv.hashes_of(range(4)), 5.0, direct=True)
    taken = set(reserved.frames)
    clock.now += 5.1
    store.sweep()
    assert counts(store, "lapsed") == (4,)
    for number in range(100, 130):
        kv.put(store, known, [number])
        for frame in taken:  # it does wake up
            store.arena.view(frame, FRAME)[:] = 0xFF
    store.sweep()
    found = kv.found(store, known, list(range(130)))
    assert found == list(range(118, 130)), "of 16 slots 12 are in use"
    assert all(kv.get(store, known, [number]) == 1 for number in found)
    assert store.statistics().arena_used_bytes == 16 * FRAME
    store.check_integrity()
    client.die()
    store.sweep()
    assert store.statistics().arena_used_bytes == 12 * FRAME
    assert store.statistics().clients == 0
    assert store.complete_store(owner, reserved.ticket, publish=True) == (0, 0, 0)
    store.check_integrity()


def test_a_lapsed_reservation_cannot_be_published(open_store: OpenStore, kv: SimpleNamespace, clock: Any) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    reserved = store.prepare_store(NODE, known.fingerprint, kv.hashes_of([1, 2]), 5.0, direct=True)
    clock.now += 5.1
    store.sweep()
    store.sweep()
    assert store.statistics().arena_used_bytes == 2 * FRAME
    assert store.complete_store(NODE, reserved.ticket, publish=True) == (0, 0, 2)
    assert kv.found(store, known, [1, 2]) == []
    assert store.statistics().arena_used_bytes == 0
    assert counts(store, "lapsed", "refused", "stored") == (2, 2, 0)
    store.check_integrity()


def test_a_lapsed_indirect_reservation_is_freed_at_once(open_store: OpenStore, kv: SimpleNamespace, clock: Any) -> None:
    """Nobody has its memory but the node's own threads."""
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    reserved = store.prepare_store(NODE, known.fingerprint, kv.hashes_of([1, 2]), 5.0, direct=False)
    clock.now += 5.1
    store.sweep()
    assert store.statistics().arena_used_bytes == 0
    assert store.take_over_writing(NODE, reserved.ticket) is None
    assert store.complete_store(NODE, reserved.ticket, publish=True) == (0, 0, 0)
    assert counts(store, "lapsed") == (2,)


def test_no_ticket_lasts_longer_than_the_limit(open_store: OpenStore, kv: SimpleNamespace, clock: Any) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    held = kv.hold(store, known, [1], ttl=1e9)
    store.prepare_store(NODE, known.fingerprint, kv.hashes_of([2]), 1e9, direct=False)
    clock.now += LONGEST_TICKET + 0.1
    store.sweep()
    assert not store.complete_load(NODE, held.ticket)
    assert store.statistics().arena_used_bytes == FRAME


def test_writing_by_the_nodes_own_thread_does_not_lapse(
    open_store: OpenStore, kv: SimpleNamespace, clock: Any, threads: ThreadPoolExecutor
) -> None:
    """And nobody else can end it under way: its slots would be another's while it still writes."""
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    hashes = kv.hashes_of([1, 2])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 5.0, direct=False)
    assert store.take_over_writing(3, reserved.ticket) is None
    slots = store.take_over_writing(NODE, reserved.ticket)
    assert slots is not None
    assert [slot.frame for slot in slots] == reserved.frames
    assert store.take_over_writing(NODE, reserved.ticket) is None
    clock.now += 1e6
    store.sweep()
    abort = threads.submit(store.complete_store, NODE, reserved.ticket, publish=False)
    assert result(abort) == (0, 0, 0)
    kv.fill(store, known, hashes, reserved)
    assert store.complete_store(NODE, reserved.ticket, publish=True) == (2, 0, 0)
    assert kv.get(store, known, [1, 2]) == 2


def test_a_lapsed_hold_is_not_valid(open_store: OpenStore, kv: SimpleNamespace, clock: Any) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    held = kv.hold(store, known, [1], ttl=5.0)
    assert store.still_held(NODE, held.ticket)
    assert store.checksums(NODE, held.ticket) is not None
    clock.now += 5.1
    store.sweep()
    assert not store.still_held(NODE, held.ticket)
    assert store.checksums(NODE, held.ticket) is None
    assert not store.complete_load(NODE, held.ticket)
    for number in range(100, 116):
        kv.put(store, known, [number])
    assert kv.found(store, known, [1]) == [], "the page could leave"
    store.check_integrity()


def test_tickets_belong_to_their_owner(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    held = store.prepare_load(3, known.fingerprint, kv.hashes_of([1]), 5.0)
    reserved = store.prepare_store(3, known.fingerprint, kv.hashes_of([2]), 5.0, direct=True)
    assert not store.complete_load(4, held.ticket)
    assert not store.still_held(4, held.ticket)
    assert store.checksums(4, held.ticket) is None
    assert store.complete_store(4, reserved.ticket, publish=True) == (0, 0, 0)
    assert kv.found(store, known, [2]) == []
    assert store.complete_load(3, held.ticket)
    assert store.complete_store(3, reserved.ticket, publish=True) == (1, 0, 0)


def test_what_a_dead_client_left_open_is_ended(
    open_store: OpenStore, kv: SimpleNamespace, shm: Path, clock: Any
) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    client, other = kv.LocalClient(shm / "arena"), kv.LocalClient(shm / "arena")
    owner, living = (store.owner_of(store.attach(each.name)) for each in (client, other))
    held = store.prepare_load(owner, known.fingerprint, kv.hashes_of([1]), 5.0)
    reserved = store.prepare_store(owner, known.fingerprint, kv.hashes_of([2]), 5.0, direct=True)
    stays = store.prepare_store(living, known.fingerprint, kv.hashes_of([3]), 5.0, direct=True)
    client.die()
    store.sweep()
    store.check_integrity()
    assert not store.complete_load(owner, held.ticket)
    assert store.complete_store(owner, reserved.ticket, publish=True) == (0, 0, 0)
    assert store.statistics().arena_used_bytes == 2 * FRAME
    assert store.complete_store(living, stays.ticket, publish=True) == (1, 0, 0)
    other.die()


def test_a_call_that_comes_behind_its_clients_end_leaves_nothing(
    open_store: OpenStore, kv: SimpleNamespace, shm: Path, clock: Any
) -> None:
    """Its owner was looked up while the client lived; by now the client is forgotten."""
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    client = kv.LocalClient(shm / "arena")
    owner = store.owner_of(store.attach(client.name))
    client.die()
    store.sweep()
    store.prepare_store(owner, known.fingerprint, kv.hashes_of([2]), 5.0, direct=True)
    store.sweep()
    assert store.statistics().arena_used_bytes == 0
    store.check_integrity()


# -- dropping ------------------------------------------------------------------------------------------------------


def test_evicted_pages_are_nowhere(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2])
    store.write_behind.write_back()
    kv.put(store, known, [3, 4])
    assert store.evict(known.fingerprint, kv.hashes_of([2, 3, 3, 9])) == 2
    assert kv.found(store, known, [1, 2, 3, 4]) == [1, 4]
    assert list(tier.pages) == [known.fingerprint + kv.hash_of(1)]
    assert counts(store, "evicted", "overrun") == (0, 0)
    store.check_integrity()


@pytest.mark.parametrize("how", ["evict", "clear"])
def test_held_pages_can_be_dropped_and_their_bytes_stay_until_the_hold_ends(
    open_store: OpenStore, kv: SimpleNamespace, how: str
) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    other = store.open_namespace(kv.layout("b", FRAME))
    kv.put(store, known, [1, 2])
    held = kv.hold(store, known, [1, 2])
    if how == "evict":
        assert store.evict(known.fingerprint, kv.hashes_of([1, 2])) == 2
        assert kv.found(store, known, [1, 2]) == []
    else:
        assert store.clear(known.fingerprint) == 2
    store.check_integrity()
    for number in range(40):
        kv.put(store, other, [number])
    for number, frame in zip([1, 2], held.frames, strict=True):
        assert np.array_equal(store.arena.view(frame, FRAME), kv.payload_of(known, kv.hash_of(number)))
    assert store.complete_load(NODE, held.ticket)
    assert len(kv.found(store, other, list(range(40)))) == 14
    kv.put(store, other, [50, 51])
    assert len(kv.found(store, other, list(range(60)))) == 16
    store.check_integrity()


def test_clear_drops_a_namespace_from_every_tier_and_no_other(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    store = open_store(16, [tier])
    one, other = (store.open_namespace(kv.layout(model, FRAME)) for model in "ab")
    kv.put(store, one, [1, 2])
    kv.put(store, other, [1])
    store.flush()
    kv.put(store, one, [3])
    assert store.clear(one.fingerprint) == 3
    with pytest.raises(UnknownNamespaceError):
        store.lookup([(one.fingerprint, [])])
    with pytest.raises(UnknownNamespaceError):
        store.clear(one.fingerprint)
    assert [usage.layout.model for usage in store.statistics().namespaces] == ["b"]
    assert [key[:32] for key in tier.pages] == [other.fingerprint]
    assert kv.found(store, store.open_namespace(kv.layout("a", FRAME)), [1, 2, 3]) == []
    assert kv.get(store, other, [1]) == 1


def test_a_store_under_way_in_a_cleared_namespace_is_refused(open_store: OpenStore, kv: SimpleNamespace) -> None:
    """Its header would name a namespace that is gone, also when one of the same layout was opened since."""
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    hashes = kv.hashes_of([1])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    store.clear(known.fingerprint)
    again = store.open_namespace(kv.layout("a", FRAME))
    assert store.complete_store(NODE, reserved.ticket, publish=True) == (0, 0, 1)
    assert kv.found(store, again, [1]) == []
    assert store.statistics().arena_used_bytes == 0


def test_a_page_dropped_while_it_is_written_below_does_not_come_back(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2])
    tier.write_gate.close()
    writing = threads.submit(store.write_behind.write_back)
    tier.write_gate.wait_reached()
    gone = threading.Event()
    drop = store._drop_here

    def drop_and_say(keys: list[bytes]) -> set[bytes]:
        dropped = drop(keys)
        gone.set()
        return dropped

    store._drop_here = drop_and_say  # type: ignore[method-assign, assignment]
    evicting = threads.submit(store.evict, known.fingerprint, kv.hashes_of([1]))
    assert gone.wait(PATIENCE)
    assert kv.found(store, known, [1]) == [], "gone from the arena at once, whatever the disk does"
    tier.write_gate.open()
    result(writing)
    result(evicting)
    assert kv.found(store, known, [1, 2]) == [2]
    assert kv.get(store, known, [1]) == 0
    store.check_integrity()


def test_a_page_dropped_while_it_comes_up_does_not_come_back(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2])
    tier.read_gate.close()
    loading = threads.submit(kv.get, store, known, [1, 2])
    tier.read_gate.wait_reached()  # it has read
    assert store.evict(known.fingerprint, kv.hashes_of([2])) == 1
    tier.read_gate.open()
    assert result(loading) == 1
    assert kv.found(store, known, [1, 2]) == [1]
    store.check_integrity()


def test_a_page_that_comes_up_while_it_is_dropped_does_not_stay(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    """It came when the arena had been looked through, and the tier below had it still."""
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1])
    remove = tier.remove

    def load_and_remove(keys: list[bytes]) -> int:
        assert kv.get(store, known, [1]) == 1
        return int(remove(keys))

    tier.remove = load_and_remove
    assert store.evict(known.fingerprint, kv.hashes_of([1])) == 1
    assert kv.found(store, known, [1]) == []
    store.check_integrity()


# -- bringing up ---------------------------------------------------------------------------------------------------


def below(store: Store, known: Any, kv: SimpleNamespace, tier: Any, numbers: list[int]) -> None:
    """Store pages, and let them be on the tier below only."""
    for number in numbers:
        kv.put(store, known, [number])
    while store.write_behind.write_back():
        pass
    keep = dict(tier.pages)
    store.evict(known.fingerprint, kv.hashes_of(numbers))
    tier.pages.update(keep)
    tier.asked.clear()


def test_pages_come_up_from_below_and_say_so(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2, 3])
    [tiers] = store.lookup([(known.fingerprint, kv.hashes_of([1, 2, 3, 4]))])
    assert list(tiers) == [DISK, DISK, DISK, ABSENT]
    kv.put(store, known, [4])
    held = kv.hold(store, known, [1, 4, 2])
    assert list(held.tiers) == [DISK, ARENA, DISK]
    assert store.complete_load(NODE, held.ticket)
    assert kv.get(store, known, [1, 2]) == 2
    assert len(tier.asked) == 2, "a page that came up is in the arena"
    assert counts(store, "stored") == (4,)
    assert store.statistics().dirty_pages == 1
    store.check_integrity()


def test_what_is_below_is_present_for_a_store(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1])
    assert kv.put(store, known, [1, 2]) == (1, 1, 0)
    assert kv.get(store, known, [1, 2]) == 2


def test_a_page_damaged_below_is_a_miss_and_the_prefix_ends_there(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2, 3])
    kv.put(store, known, [4])
    tier.damage(known.fingerprint + kv.hash_of(2))
    assert kv.get(store, known, [1, 2, 3, 4]) == 1
    assert counts(store, "asked", "hit", "missed") == (4, 1, 3)
    assert kv.found(store, known, [1, 2, 3, 4]) == [1, 3, 4]
    assert kv.get(store, known, [3, 4]) == 2
    assert kv.put(store, known, [2]) == (1, 0, 0)
    store.check_integrity()


def test_a_page_twice_in_a_load_is_read_once(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1])
    assert kv.get(store, known, [1, 1, 1]) == 3
    assert len(tier.asked) == 1
    store.check_integrity()


def test_concurrent_loads_read_a_page_once(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2, 3])
    tier.read_gate.close()
    first = threads.submit(kv.get, store, known, [1, 2])
    tier.read_gate.wait_reached()
    others = [threads.submit(kv.get, store, known, [1, 2]) for _ in range(4)]
    tier.read_gate.open()
    assert [result(each) for each in (first, *others)] == [2] * 5
    assert sorted(tier.asked) == [known.fingerprint + kv.hash_of(number) for number in (1, 2)]
    store.check_integrity()


def test_a_load_that_waits_for_another_keeps_nobody_waiting(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    """It publishes what it read itself before it waits, so that no ring of loads can wait for each other."""
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2])
    read, slow, second_read = tier.read, kv.Gate(), threading.Event()
    slow.close()

    def read_slowly(keys: list[bytes], into: list[Any]) -> list[int | None]:
        if keys[-1:] == [known.fingerprint + kv.hash_of(1)]:
            slow.go_through()
        elif keys:
            second_read.set()
        return list(read(keys, into))

    tier.read = read_slowly
    first = threads.submit(kv.get, store, known, [1])
    slow.wait_reached()
    second = threads.submit(kv.get, store, known, [2, 1])
    assert second_read.wait(PATIENCE)
    third = threads.submit(kv.get, store, known, [2])
    assert result(third) == 1
    assert not first.done()
    assert not second.done()
    slow.open()
    assert (result(first), result(second)) == (1, 2)
    assert len(tier.asked) == 2
    store.check_integrity()


def test_a_load_waits_for_anothers_reading_no_longer_than_its_deadline(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1])
    kv.put(store, known, [2])
    tier.read_gate.close()
    first = threads.submit(kv.get, store, known, [1])
    tier.read_gate.wait_reached()
    held = store.prepare_load(NODE, known.fingerprint, kv.hashes_of([2, 1]), 0.01)
    assert len(held.frames) == 1
    tier.read_gate.open()
    assert result(first) == 1
    store.complete_load(NODE, held.ticket)
    store.check_integrity()


def test_a_tier_that_raises_leaks_nothing(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2])
    kv.put(store, known, [3])
    used = store.statistics().arena_used_bytes
    tier.read_gate.error = RuntimeError("broken")
    tier.read_gate.close()
    first = threads.submit(kv.get, store, known, [3, 1, 2])
    tier.read_gate.wait_reached()
    second = threads.submit(kv.get, store, known, [3, 1])
    tier.read_gate.open()
    with pytest.raises(RuntimeError, match="broken"):
        result(first)
    # It waited for the first one's page, or read it itself, which broke, too.
    assert isinstance(second.exception(PATIENCE), RuntimeError) or result(second) == 1
    assert store.statistics().arena_used_bytes == used
    store.check_integrity()
    tier.read_gate.error = None
    assert kv.get(store, known, [3, 1, 2]) == 3


def test_a_second_tier_is_asked_for_what_the_first_one_misses(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    lower = kv.MemoryTier(name="lower")
    store = open_store(16, [tier, lower])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2])
    key = known.fingerprint + kv.hash_of(1)
    lower.pages[key] = tier.pages[key]
    tier.damage(key)
    assert kv.get(store, known, [1, 2]) == 2
    assert lower.asked == [key]
    assert list(store.statistics().below) == ["disk", "lower"]


def test_a_load_without_room_is_shorter(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1, 2, 3])
    holds = []
    for number in range(100, 114):
        kv.put(store, known, [number])
        holds.append(kv.hold(store, known, [number], owner=number))
    held = kv.hold(store, known, [1, 2, 3, 100])
    assert len(held.frames) == 2
    store.check_integrity()
    assert store.complete_load(NODE, held.ticket)
    for owner, each in enumerate(holds, 100):
        assert store.complete_load(owner, each.ticket)
    assert kv.get(store, known, [1, 2, 3]) == 3


def test_one_owner_holds_half_of_the_arena_at_most(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store(16)
    known = store.open_namespace(kv.layout("a", FRAME))
    for number in range(16):
        kv.put(store, known, [number])
    sizes = [len(kv.hold(store, known, list(range(first, first + 4)), owner=3).frames) for first in range(0, 12, 4)]
    assert sizes == [4, 4, 0]
    assert len(kv.hold(store, known, [8, 9], owner=4).frames) == 2
    store.check_integrity()


def test_a_disk_that_hangs_takes_half_of_the_arena_and_some_calls_at_most(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the arena is loaded and stored meanwhile."""
    monkeypatch.setattr("kvstore.bringup.MOST_RUNS", 3)
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, list(range(12)))
    kv.put(store, known, [100])
    tier.read_gate.close()
    hanging = []
    for first in (0, 4, 8):
        begun = len(tier.asked)
        hanging.append(threads.submit(kv.get, store, known, list(range(first, first + 4))))
        if first < 8:
            tier.read_gate.wait_reached()
            tier.read_gate.close()
            assert len(tier.asked) == begun + 4
    assert result(hanging.pop()) == 0, "no room for more on their way"
    assert kv.get(store, known, [100, 11]) == 1
    assert kv.put(store, known, [101]) == (1, 0, 0)
    third = threads.submit(kv.get, store, known, [0])
    while store._bringups._runs < 3:
        assert not third.done()
    assert kv.get(store, known, [1]) == 0, "a fourth call does not wait"
    tier.read_gate.open()
    assert [result(each) for each in (*hanging, third)] == [4, 4, 1]
    assert kv.get(store, known, [1]) == 1
    store.check_integrity()


def test_bringing_up_does_not_push_out_the_rest_of_the_prefix(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1])
    kv.put(store, known, [2])
    for number in range(100, 115):
        kv.put(store, known, [number])
    assert kv.get(store, known, [1, 2]) == 2, "the oldest page of a full arena was the prefix's own"


# -- writing back --------------------------------------------------------------------------------------------------


def test_dirty_pages_are_written_oldest_first_in_bounded_batches(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    for number in range(10):
        kv.put(store, known, [number])
    keys = [known.fingerprint + kv.hash_of(number) for number in range(10)]
    assert [store.write_behind.write_back() for _ in range(4)] == [4, 4, 2, 0]
    assert [key for batch in tier.writes for key in batch] == keys
    assert store.statistics().dirty_pages == 0
    store.check_integrity()


def test_pages_that_a_tier_refuses_stay_dirty_and_let_others_go_first(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    for number in range(6):
        kv.put(store, known, [number])
    tier.refuse = lambda key: key[-1] < 4
    assert store.write_behind.write_back() == 0
    assert store.write_behind.write_back() == 2
    assert store.statistics().dirty_pages == 4
    tier.refuse = lambda key: False
    assert store.write_behind.write_back() == 4
    store.check_integrity()


def test_a_tier_that_raises_while_writing_changes_nothing(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    tier.write_gate.error = RuntimeError("broken")
    with pytest.raises(RuntimeError):
        store.write_behind.write_back()
    assert store.statistics().dirty_pages == 1
    store.check_integrity()
    tier.write_gate.error = None
    assert store.write_behind.write_back() == 1


def test_pages_being_written_below_do_not_leave(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    tier.write_gate.close()
    writing = threads.submit(store.write_behind.write_back)
    tier.write_gate.wait_reached()
    for number in range(100, 120):
        kv.put(store, known, [number])
    assert kv.found(store, known, [1]) == [1]
    tier.write_gate.open()
    assert result(writing) == 1, "its checksum was right to the end"
    store.check_integrity()


def test_flush_returns_what_became_durable(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    for number in range(9):
        kv.put(store, known, [number])
    assert store.flush() == 9
    assert (len(tier.pages), tier.flushes) == (9, 1)
    assert store.flush() == 0


def test_flush_writes_everything_that_can_be_written(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    """A whole batch that is refused is no reason to leave the others."""
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    for number in range(12):
        kv.put(store, known, [number])
    tier.refuse = lambda key: key[-1] < 8
    with pytest.raises(ResourceError, match="8 of 12 pages are not on disk"):
        store.flush()
    assert (len(tier.pages), tier.flushes, store.statistics().dirty_pages) == (4, 1, 8)
    assert len(tier.writes) == 3, "each page is tried once"


def test_flush_stops_at_its_deadline(open_store: OpenStore, kv: SimpleNamespace, tier: Any, clock: Any) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    for number in range(12):
        kv.put(store, known, [number])
    write = tier.write

    def slow(pages: Any) -> Any:
        clock.now += 1.0
        return write(pages)

    tier.write = slow
    with pytest.raises(ResourceError, match="4 of 12 pages are not on disk"):
        store.flush(clock.now + 1.5)
    assert len(tier.pages) == 8


def test_what_the_system_does_not_make_durable_is_an_error(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any
) -> None:
    store = open_store(32, [tier])
    kv.put(store, store.open_namespace(kv.layout("a", FRAME)), [1])
    tier.flush_error = ResourceError("no")
    with pytest.raises(ResourceError):
        store.flush()
    store.check_integrity()


def test_waiting_for_dirty_pages(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    assert not store.write_behind.wait_for_dirty(0.0)
    waiting = threads.submit(store.write_behind.wait_for_dirty, PATIENCE)
    kv.put(store, known, [1])
    assert result(waiting)
    assert store.write_behind.wait_for_dirty(PATIENCE)


# -- checksums -----------------------------------------------------------------------------------------------------


def test_checksums_are_made_once_and_kept(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    held = kv.hold(store, known, [1])
    sums = store.checksums(NODE, held.ticket)
    assert sums is not None
    store.arena.view(held.frames[0], FRAME)[0] ^= 1
    assert store.checksums(NODE, held.ticket) == sums
    store.complete_load(NODE, held.ticket)
    assert store.verify(threading.Event()) == 1
    assert kv.found(store, known, [1]) == []


def test_checksums_of_a_hold_that_lapses_meanwhile_are_not_used(
    open_store: OpenStore, kv: SimpleNamespace, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be another page's by then."""
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    held = kv.hold(store, known, [1], ttl=5.0)

    def slowly(payload: Any) -> int:
        clock.now += 5.1
        store.sweep()
        return 7

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.store.checksum_of", slowly)
        assert store.checksums(NODE, held.ticket) is None
    held = kv.hold(store, known, [1])
    assert store.checksums(NODE, held.ticket) != [7]


def test_a_writers_checksums_are_taken_over(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    hashes = kv.hashes_of([1, 2])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    kv.fill(store, known, hashes, reserved)
    store.complete_store(NODE, reserved.ticket, publish=True, checksums=[11, 12])
    held = kv.hold(store, known, [1, 2])
    assert store.checksums(NODE, held.ticket) == [11, 12]


def test_verify_finds_a_flipped_byte_and_drops_the_page(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", 5000))
    kv.put(store, known, [1, 2, 3])
    store.write_behind.write_back()
    held = kv.hold(store, known, [1, 2, 3])
    for frame in held.frames[:2]:
        store.arena.view(frame, 5000)[4999] ^= 0x80
    store.complete_load(NODE, held.ticket)
    stop = threading.Event()
    stop.set()
    assert store.verify(stop) == 0
    assert store.verify(threading.Event()) == 2
    assert counts(store, "corrupt") == (2,)
    assert store.verify(threading.Event()) == 0
    [tiers] = store.lookup([(known.fingerprint, kv.hashes_of([1, 2, 3]))])
    assert list(tiers) == [DISK, DISK, ARENA]
    assert kv.get(store, known, [1, 2, 3]) == 3
    store.check_integrity()


# -- the end -------------------------------------------------------------------------------------------------------


def test_a_closed_store_has_written_back_and_given_up_everything(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, shm: Path
) -> None:
    with open_store(32, [tier]) as store:
        known = store.open_namespace(kv.layout("a", FRAME))
        kv.put(store, known, [1])
    assert (len(tier.pages), tier.flushes, tier.closed) == (1, 1, True)
    store.close()
    Arena(shm / "arena", 32 * FRAME).close()
    for call in (
        lambda: store.prepare_store(NODE, known.fingerprint, [], 1.0, direct=True),
        lambda: store.prepare_load(NODE, known.fingerprint, [], 1.0),
        lambda: store.evict(known.fingerprint, []),
        lambda: store.clear(known.fingerprint),
        store.flush,
        lambda: store.attach("new-" + "0" * 32),
        lambda: store.open_namespace(kv.layout("a", FRAME)),
    ):
        with pytest.raises(UnavailableError, match="stopping"):
            call()
    store.sweep()


def test_closing_gives_everything_up_also_when_the_disk_fails(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, shm: Path
) -> None:
    store = open_store(32, [tier])
    tier.flush_error = ResourceError("no")
    with pytest.raises(ResourceError):
        store.close()
    assert tier.closed
    Arena(shm / "arena", 32 * FRAME).close()


def test_the_arena_is_not_given_up_while_this_process_writes_into_it(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, shm: Path
) -> None:
    """A next node would give the slot to somebody else while a thread of this one still fills it."""
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [9])
    hashes = kv.hashes_of([1])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    held = kv.hold(store, known, [9])
    store.close()
    with pytest.raises(InUseError):
        Arena(shm / "arena", 32 * FRAME)
    kv.fill(store, known, hashes, reserved)
    assert store.complete_store(NODE, reserved.ticket, publish=True) == (1, 0, 0)
    assert not store.complete_load(NODE, held.ticket), "from now on the bytes are another node's to change"
    again = open_store(32, [])
    assert again.kept_pages == 2
    assert kv.get(again, known, [1]) == 1


def test_the_arena_is_not_given_up_while_pages_come_up_into_it(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, shm: Path, threads: ThreadPoolExecutor
) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    below(store, known, kv, tier, [1])
    tier.read_gate.close()
    loading = threads.submit(kv.get, store, known, [1])
    tier.read_gate.wait_reached()
    store.close()
    with pytest.raises(InUseError):
        Arena(shm / "arena", 32 * FRAME)
    tier.read_gate.open()
    loading.exception(PATIENCE)
    Arena(shm / "arena", 32 * FRAME).close()


def test_statistics_say_what_is_where(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(64, [tier])
    one, other = store.open_namespace(kv.layout("a", FRAME)), store.open_namespace(kv.layout("b", 5000))
    kv.put(store, one, [1, 2])
    kv.put(store, other, [1])
    statistics = store.statistics()
    assert statistics.arena_used_bytes == 4 * FRAME
    assert statistics.arena_limit_bytes == 64 * FRAME
    assert (statistics.arena_pages, statistics.dirty_pages, statistics.clients) == (3, 3, 0)
    assert [(usage.layout.model, usage.arena_pages) for usage in statistics.namespaces] == [("a", 2), ("b", 1)]


def test_tiers_learn_which_page_comes_before(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    came: dict[bytes, bytes] = {}
    write = tier.write

    def note(pages: Any) -> Any:
        came.update({page.key[-32:]: page.parent for page in pages})
        return write(pages)

    tier.write = note
    kv.put(store, known, [1, 2])
    hashes = kv.hashes_of([2, 3, 4])  # a step later, with what was there before
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True, parent=kv.hashes_of([1])[0])
    kv.fill(store, known, hashes, reserved)
    store.complete_store(NODE, reserved.ticket, publish=True)
    store.flush()
    keys = [known.fingerprint + each for each in kv.hashes_of([1, 2, 3])]
    assert came == dict(zip(kv.hashes_of([1, 2, 3, 4]), [b"", *keys], strict=True))
    with pytest.raises(InvalidRequestError, match="32 bytes, got one of 3"):
        store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True, parent=b"abc")


def test_tiers_below_are_told_what_is_used_above(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2, 3])
    told: list[bytes] = []
    tier.touch = lambda keys: told.extend(keys)
    store.sweep()
    assert told == []
    kv.get(store, known, [1, 2])
    store.touch(known.fingerprint, kv.hashes_of([2, 9]))
    store.sweep()
    store.sweep()
    assert told == [known.fingerprint + each for each in kv.hashes_of([1, 2])]


def test_what_the_shared_tier_lost_is_offered_again_when_it_is_used(shm: Path, kv: SimpleNamespace, tier: Any) -> None:
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        known = store.open_namespace(kv.layout("a", FRAME))
        kv.put(store, known, [1, 2, 3])
        assert store.write_behind.share() == 3
        del tier.pages[known.fingerprint + kv.hashes_of([2])[0]]
        store.write_behind.tell_shared()
        assert not store.write_behind.wait_for_unshared(0.0), "nothing was used"
        kv.get(store, known, [1, 2])
        kv.get(store, known, [1, 2])
        store.write_behind.tell_shared()
        assert store.write_behind.share() == 1
        assert len(tier.pages) == 3
        assert tier.writes[-1] == [known.fingerprint + kv.hashes_of([2])[0]]


def test_a_report_that_counts_more_than_there_can_be_does_no_harm(open_store: OpenStore, kv: SimpleNamespace) -> None:
    store = open_store()
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1])
    for _ in range(3):
        store.note_use(known.fingerprint, kv.hashes_of([1]), read=True, missed=(1 << 64) - 1)
    assert counts(store, "asked", "hit", "missed") == (3 * (1 + MOST_LOOKUP_PAGES), 3, 3 * MOST_LOOKUP_PAGES)
    assert kv.get(store, known, [1]) == 1
    with pytest.raises(LimitExceededError, match=str(MOST_LOOKUP_PAGES)):
        store.note_use(known.fingerprint, [bytes(32)] * (MOST_LOOKUP_PAGES + 1), read=True, missed=0)


def test_what_a_tier_could_not_drop_is_said_and_can_be_cleared_again(shm: Path, kv: SimpleNamespace) -> None:
    shared = kv.MemoryTier(name="redis")
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared) as store:
        known = store.open_namespace(kv.layout("a", FRAME))
        kv.put(store, known, [1, 2, 3])
        store.write_behind.share()
        remove, keys = shared.remove, shared.keys

        def away(*arguments: Any) -> Any:
            raise ResourceError("redis is away")

        shared.remove = away
        with pytest.raises(ResourceError, match="away"):
            store.evict(known.fingerprint, kv.hashes_of([1]))
        assert [slot for slot in store._catalog.resident() if slot.key[-32:] == kv.hashes_of([1])[0]] == []
        with pytest.raises(ResourceError, match="away"):
            store.clear(known.fingerprint)
        shared.remove, shared.keys = remove, away
        with pytest.raises(ResourceError, match="away"):
            store.clear(known.fingerprint)
        shared.keys = keys
        assert store.clear(known.fingerprint) == 3
        assert not shared.pages
        with pytest.raises(UnknownNamespaceError):
            store.clear(known.fingerprint)
