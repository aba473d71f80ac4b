"""Slots that are reserved before anybody says which pages go into them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fake_clock import FakeClock
from local_clients import LocalClient
from memory_tier import MemoryTier
from tiny_stores import (
    OpenStore,
    counters_of,
    fill_reserved,
    found_pages,
    layout_of,
    load_pages,
    page_hash,
    page_hashes,
    payload_of,
    put_pages,
)

from kvstore.arena.clients import MOST_CLIENTS
from kvstore.arena.epochs import LINE_WORDS, ReadingLine
from kvstore.config.rules import NamespaceRule
from kvstore.errors import InvalidRequestError, LimitExceededError, UnknownNamespaceError
from kvstore.namespaces.registry import KnownNamespace
from kvstore.page_codes import StoreOutcome
from kvstore.store.leases import NODE, Part
from kvstore.store.residency import QUARANTINE_SECONDS
from kvstore.store.store import Store

FRAME = 4096


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store(64)


@pytest.fixture
def client(store: Store) -> Iterator[LocalClient]:
    client = LocalClient(store.arena.directory)
    client.number = store.owner_of(store.attach(client.name))
    yield client
    client.die()


def write(store: Store, known: KnownNamespace, numbers: list[int], frames: list[int]) -> None:
    for block_hash, frame in zip(page_hashes(numbers), frames, strict=False):
        store.arena.view(frame, known.layout.page_bytes)[:] = payload_of(known, block_hash)


def test_pages_named_behind_the_copy_are_stored(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    assert put_pages(store, known, [1]) == (1, 0, 0)
    ahead = store.reserve_ahead(client.number, known.fingerprint, 4, 10.0)
    assert len(ahead.frames) == 4
    store.check_integrity()
    write(store, known, [2, 3], ahead.frames)
    assert found_pages(store, known, [1, 2, 3]) == [1]
    outcomes = bytes([StoreOutcome.PRESENT, StoreOutcome.RESERVED, StoreOutcome.RESERVED])
    done = store.complete_ahead(
        client.number, ahead.lease, known.fingerprint, page_hashes([1, 2, 3]), outcomes, page_hash(0)
    )
    assert done == (2, 0, 0)
    assert load_pages(store, known, [1, 2, 3]) == 3
    assert store.statistics().arena_used_bytes == 3 * FRAME, "the slots beyond are free"
    assert counters_of(store, "stored", "present", "refused") == (3, 1, 0)
    store.check_integrity()
    again = store.complete_ahead(
        client.number, ahead.lease, known.fingerprint, page_hashes([9]), bytes([StoreOutcome.RESERVED])
    )
    assert again == (0, 0, 0), "a reservation is used once"


def test_a_page_that_came_meanwhile_is_kept_once(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 2, 10.0)
    write(store, known, [1, 2], ahead.frames)
    assert put_pages(store, known, [1]) == (1, 0, 0)
    done = store.complete_ahead(client.number, ahead.lease, known.fingerprint, page_hashes([1, 2]), bytes(2))
    assert done == (1, 1, 0)
    assert store.statistics().arena_used_bytes == 2 * FRAME
    store.check_integrity()


def test_a_page_that_a_lower_tier_has_is_promoted_and_is_not_written_again(
    open_store: OpenStore, tier: MemoryTier
) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    assert put_pages(store, known, [1]) == (1, 0, 0)
    store.flush()
    with store._state.lock:  # it leaves the arena, and stays below
        store._state.residency.drop(store._catalog.find(known.fingerprint + page_hash(1)))
    client = LocalClient(store.arena.directory)
    owner = store.owner_of(store.attach(client.name))
    ahead = store.reserve_ahead(owner, known.fingerprint, 2, 10.0)
    write(store, known, [1, 2], ahead.frames)
    assert store.complete_ahead(owner, ahead.lease, known.fingerprint, page_hashes([1, 2]), bytes(2)) == (2, 0, 0)
    assert store.statistics().dirty_pages == 1
    assert load_pages(store, known, [1, 2]) == 2
    store.check_integrity()
    client.die()


@pytest.mark.parametrize(
    ("numbers", "outcomes"),
    [
        ([1, 2, 3], bytes(3)),  # more than there are slots
        ([1, 2], bytes(1)),
        ([1], bytes([StoreOutcome.REFUSED])),
        ([1], bytes([77])),
    ],
)
def test_what_does_not_fit_together_is_refused_and_nothing_is_published(
    store: Store, client, numbers: list[int], outcomes: bytes
) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 2, 10.0)
    with pytest.raises(InvalidRequestError):
        store.complete_ahead(client.number, ahead.lease, known.fingerprint, page_hashes(numbers), outcomes)
    assert found_pages(store, known, numbers) == []
    store.check_integrity()
    assert store.statistics().arena_used_bytes == 0


def test_slots_of_another_namespace_are_not_for_these_pages(store: Store, client: LocalClient) -> None:
    one, other = (store.open_namespace(layout_of(name, FRAME)) for name in "ab")
    ahead = store.reserve_ahead(client.number, one.fingerprint, 2, 10.0)
    with pytest.raises(InvalidRequestError, match="do not go into a reservation"):
        store.complete_ahead(client.number, ahead.lease, other.fingerprint, page_hashes([1]), bytes(1))
    assert store.statistics().arena_used_bytes == 0


def test_a_named_reservation_can_not_be_named_again(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    reserved = store.prepare_store(client.number, known.fingerprint, page_hashes([1]), 10.0, direct=True)
    with pytest.raises(InvalidRequestError):
        store.complete_ahead(client.number, reserved.lease, known.fingerprint, page_hashes([2]), bytes(1))
    assert found_pages(store, known, [1, 2]) == []
    store.check_integrity()


def test_slots_that_nobody_named_are_never_pages(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 2, 10.0)
    assert store.complete_store(client.number, ahead.lease, publish=True) == (0, 0, 2)
    assert (len(found_pages(store, known, [0, 1, 2])), store.statistics().arena_used_bytes) == (0, 0)
    assert counters_of(store, "stored", "refused") == (0, 0)
    store.check_integrity()


def test_past_its_deadline_nothing_is_published_and_no_slot_is_anothers(
    store: Store, client: LocalClient, clock: FakeClock
) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 2, 10.0)
    clock.now += 11
    store.sweep()
    assert store.statistics().arena_used_bytes == 2 * FRAME, "the client may still be writing"
    done = store.complete_ahead(client.number, ahead.lease, known.fingerprint, page_hashes([1, 2]), bytes(2))
    assert done == (0, 0, 2)
    assert found_pages(store, known, [1, 2]) == []
    assert store.statistics().arena_used_bytes == 0
    store.check_integrity()


def test_a_client_that_dies_loses_what_it_had_ahead(store: Store, client: LocalClient, clock: FakeClock) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    store.reserve_ahead(client.number, known.fingerprint, 2, 10.0)
    client.die()
    store.sweep()
    clock.now += QUARANTINE_SECONDS
    store.sweep()
    assert store.statistics().arena_used_bytes == 0
    store.check_integrity()


def test_pages_of_a_namespace_that_was_cleared_meanwhile_are_refused(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 2, 10.0)
    store.clear(known.fingerprint)
    done = store.complete_ahead(client.number, ahead.lease, known.fingerprint, page_hashes([1, 2]), bytes(2))
    assert done == (0, 0, 2)
    assert store.statistics().arena_used_bytes == 0
    with pytest.raises(UnknownNamespaceError):
        store.reserve_ahead(client.number, known.fingerprint, 1, 10.0)


def test_parts_are_pages_while_the_rest_is_written(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 5, 10.0)
    assert ahead.frames == sorted(ahead.frames)
    write(store, known, [1, 2], ahead.frames)
    hashes = page_hashes([1, 2, 3, 4])
    tell = store.complete_ahead
    assert tell(client.number, ahead.lease, known.fingerprint, hashes[:2], bytes(2), part=Part(0, 2)) == (2, 0, 0)
    assert found_pages(store, known, [1, 2, 3, 4]) == [1, 2]
    assert load_pages(store, known, [1, 2]) == 2
    store.check_integrity()
    write(store, known, [3, 4], ahead.frames[2:])
    assert put_pages(store, known, [4]) == (1, 0, 0)
    done = tell(client.number, ahead.lease, known.fingerprint, hashes[2:], bytes(2), hashes[1], Part(2, 0))
    assert done == (1, 1, 0)
    assert load_pages(store, known, [1, 2, 3, 4]) == 4
    assert store.statistics().arena_used_bytes == 4 * FRAME
    store.check_integrity()


def test_parts_of_a_named_reservation(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    hashes = page_hashes([1, 2, 3])
    reserved = store.prepare_store(client.number, known.fingerprint, hashes, 10.0, direct=True)
    fill_reserved(store, known, hashes, reserved)
    assert store.complete_store(client.number, reserved.lease, publish=True, part=Part(0, 2)) == (2, 0, 0)
    assert found_pages(store, known, [1, 2, 3]) == [1, 2]
    assert store.complete_store(client.number, reserved.lease, publish=True, part=Part(2, 0)) == (1, 0, 0)
    assert load_pages(store, known, [1, 2, 3]) == 3
    store.check_integrity()


@pytest.mark.parametrize("part", [Part(1, 1), Part(0, 3), Part(0, 4), Part(2, 0)])
def test_what_is_no_part_of_a_reservation_changes_nothing(store: Store, client: LocalClient, part: Part) -> None:
    """Nobody may get a slot that is still being written, and no page the bytes of another one."""
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 3, 10.0)
    numbers = list(range(part.slots or 1))
    with pytest.raises(InvalidRequestError):
        store.complete_ahead(
            client.number, ahead.lease, known.fingerprint, page_hashes(numbers), bytes(len(numbers)), part=part
        )
    assert found_pages(store, known, numbers) == []
    assert store.statistics().arena_used_bytes == 3 * FRAME
    assert store.complete_store(client.number, ahead.lease, publish=False) == (0, 0, 3)
    store.check_integrity()


@pytest.mark.parametrize("what", ["lapsed", "cleared"])
def test_a_part_that_comes_too_late_leaves_the_rest_to_its_writer(
    store: Store, client: LocalClient, clock: FakeClock, what: str
) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    ahead = store.reserve_ahead(client.number, known.fingerprint, 3, 10.0)
    if what == "lapsed":
        clock.now += 11
        store.sweep()
    else:
        store.clear(known.fingerprint)
    tell = store.complete_ahead
    numbers = page_hashes([1, 2, 3])
    assert tell(client.number, ahead.lease, known.fingerprint, numbers[:2], bytes(2), part=Part(0, 2)) == (0, 0, 2)
    assert store.statistics().arena_used_bytes == FRAME, "the client is still writing into the last one"
    assert tell(client.number, ahead.lease, known.fingerprint, numbers[2:], bytes(1), part=Part(2, 0)) == (0, 0, 1)
    assert store.statistics().arena_used_bytes == 0
    store.check_integrity()


def test_no_page_leaves_for_a_guess(open_store: OpenStore) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(15):
        put_pages(store, known, [number])
    client = LocalClient(store.arena.directory)
    owner = store.owner_of(store.attach(client.name))
    assert store.reserve_ahead(owner, known.fingerprint, 2, 10.0) == (0, b"", [])
    assert len(found_pages(store, known, list(range(15)))) == 15
    assert len(store.reserve_ahead(owner, known.fingerprint, 1, 10.0).frames) == 1
    assert len(store.reserve_ahead(owner, known.fingerprint, 2, 10.0, evict=True).frames) == 2
    assert len(found_pages(store, known, list(range(15)))) == 13
    store.check_integrity()
    client.die()


def test_no_page_leaves_a_quota_for_a_guess(open_store: OpenStore) -> None:
    store = open_store(64, rules=[NamespaceRule(arena=32 * FRAME)])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(31):
        put_pages(store, known, [number])
    client = LocalClient(store.arena.directory)
    owner = store.owner_of(store.attach(client.name))
    assert store.reserve_ahead(owner, known.fingerprint, 2, 10.0) == (0, b"", [])
    assert len(found_pages(store, known, list(range(31)))) == 31
    assert len(store.reserve_ahead(owner, known.fingerprint, 1, 10.0).frames) == 1
    client.die()


def test_limits(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    batch = store.batch_pages(known)
    with pytest.raises(LimitExceededError, match=str(batch)):
        store.reserve_ahead(client.number, known.fingerprint, batch + 1, 10.0)
    with pytest.raises(InvalidRequestError, match="share the arena"):
        store.reserve_ahead(NODE, known.fingerprint, 1, 10.0)
    got = [len(store.reserve_ahead(client.number, known.fingerprint, batch, 10.0).frames) for _ in range(4)]
    assert sum(got) == 16, "a guess takes half of what a client may have in hand"
    known = store.open_namespace(layout_of("b", FRAME))
    assert store.prepare_store(client.number, known.fingerprint, page_hashes([1]), 10.0, direct=True).frames
    store.check_integrity()


def test_a_small_quota_is_for_pages_not_for_guesses(open_store: OpenStore) -> None:
    store = open_store(64, rules=[NamespaceRule(arena=32 * FRAME)])
    known = store.open_namespace(layout_of("a", FRAME))
    client = LocalClient(store.arena.directory)
    owner = store.owner_of(store.attach(client.name))
    assert store.reserve_ahead(owner, known.fingerprint, 3, 10.0) == (0, b"", [])
    assert len(store.reserve_ahead(owner, known.fingerprint, 2, 10.0).frames) == 2
    client.die()


def test_what_may_be_at_risk_is_not_for_guesses(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME), durability="disk")
    client = LocalClient(store.arena.directory)
    owner = store.owner_of(store.attach(client.name))
    assert store.reserve_ahead(owner, known.fingerprint, 2, 10.0) == (0, b"", [])
    client.die()


def test_slots_ahead_that_somebody_still_reads_are_no_refused_pages(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.store.state.LONGEST_WAIT_FOR_READERS", 0.01)
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(16):
        put_pages(store, known, [number])
    client = LocalClient(store.arena.directory)
    owner = store.owner_of(store.attach(client.name))
    line = ReadingLine(store.arena.lines[owner % MOST_CLIENTS * LINE_WORDS :][:LINE_WORDS], store.arena._epoch)
    line.begin(time.monotonic() + 30)
    assert store.reserve_ahead(owner, known.fingerprint, 2, 10.0, evict=True) == (0, b"", [])
    assert counters_of(store, "refused") == (0,)
    store.check_integrity()
    client.die()


def test_all_that_a_store_like_the_last_one_needs_or_nothing(store: Store, client: LocalClient) -> None:
    known = store.open_namespace(layout_of("a", FRAME))
    assert len(store.reserve_ahead(client.number, known.fingerprint, 10, 10.0).frames) == 10
    assert store.reserve_ahead(client.number, known.fingerprint, 10, 10.0) == (0, b"", []), "6 more are a guess's share"
    assert len(store.reserve_ahead(client.number, known.fingerprint, 6, 10.0).frames) == 6
    store.check_integrity()
