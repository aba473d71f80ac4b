"""Write-back: what lower tiers learn: new pages, which page comes before, which are used."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from memory_tier import MemoryTier
from tiny_stores import (
    OpenStore,
    fill_reserved,
    found_pages,
    layout_of,
    load_pages,
    page_hash,
    page_hashes,
    put_pages,
    result_of,
)

from kvstore.arena.arena import Arena
from kvstore.errors import (
    InvalidRequestError,
    ResourceError,
)
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.leases import NODE
from kvstore.store.store import Store

FRAME = 4096
PATIENCE = 60.0


def test_dirty_pages_are_written_oldest_first_in_bounded_batches(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(10):
        put_pages(store, known, [number])
    keys = [known.fingerprint + page_hash(number) for number in range(10)]
    assert [store.write_back.write_back() for _ in range(4)] == [4, 4, 2, 0]
    assert [key for batch in tier.writes for key in batch] == keys
    assert store.statistics().dirty_pages == 0
    store.check_integrity()


def test_what_one_write_takes_is_not_little(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    little = []
    for number in range(5):
        put_pages(store, known, [number])
        little.append(store.write_back.is_little)
    assert little == [True, True, True, False, False]
    store.write_back.write_back()
    assert store.write_back.is_little
    store.check_integrity()


def test_namespaces_take_turns_and_fill_each_write_together(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    flood, own = (store.open_namespace(layout_of(name, FRAME)) for name in ("flood", "own"))
    for number in range(30):
        put_pages(store, flood, [number])
    assert store.write_back.write_back() == 8
    put_pages(store, own, [0, 1])
    assert [store.write_back.write_back() for _ in range(4)] == [8, 8, 8, 0]

    def keys(known: KnownNamespace, numbers: range) -> list[bytes]:
        return [known.fingerprint + page_hash(number) for number in numbers]

    assert tier.writes == [
        keys(flood, range(8)),
        keys(flood, range(8, 16)),
        keys(own, range(2)) + keys(flood, range(16, 22)),
        keys(flood, range(22, 30)),
    ]
    store.check_integrity()


def test_a_namespace_whose_pages_are_refused_for_good_does_not_keep_the_others_waiting(
    open_store: OpenStore, tier: MemoryTier
) -> None:
    store = open_store(64, [tier])
    refused, own = (store.open_namespace(layout_of(name, FRAME)) for name in ("refused", "own"))
    for known in (refused, own):
        put_pages(store, known, range(10))
        put_pages(store, known, range(10, 20))
    tier.refuse = lambda key: key.startswith(refused.fingerprint)
    assert [store.write_back.write_back() for _ in range(4)] == [8, 8, 4, 0]
    assert store.statistics().dirty_pages == 20
    store.check_integrity()


def test_namespaces_that_are_refused_together_are_not_tried_again_at_once(
    open_store: OpenStore, tier: MemoryTier
) -> None:
    store = open_store(64, [tier])
    for name in "abcdefgh":
        put_pages(store, store.open_namespace(layout_of(name, FRAME)), [1])
    tier.refuse = lambda key: True
    assert store.write_back.write_back() == 0
    assert [len(batch) for batch in tier.writes] == [8]
    store.check_integrity()


def test_namespaces_take_turns_in_a_flush(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    flood, own = (store.open_namespace(layout_of(name, FRAME)) for name in ("flood", "own"))
    for number in range(20):
        put_pages(store, flood, [number])
    put_pages(store, own, [0, 1])
    assert store.flush() == 22
    assert [{key[:32] for key in keys} for keys in tier.writes] == [
        {flood.fingerprint},
        {own.fingerprint},
        {flood.fingerprint},
        {flood.fingerprint},
    ]


def test_pages_that_a_tier_refuses_stay_dirty_and_let_others_go_first(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(6):
        put_pages(store, known, [number])
    tier.refuse = lambda key: key[-1] < 4
    assert store.write_back.write_back() == 0
    assert store.write_back.write_back() == 2
    assert store.statistics().dirty_pages == 4
    tier.refuse = lambda key: False
    assert store.write_back.write_back() == 4
    store.check_integrity()


def test_a_tier_that_raises_while_writing_changes_nothing(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    tier.write_gate.error = RuntimeError("broken")
    with pytest.raises(RuntimeError):
        store.write_back.write_back()
    assert store.statistics().dirty_pages == 1
    store.check_integrity()
    tier.write_gate.error = None
    assert store.write_back.write_back() == 1


def test_pages_being_written_back_do_not_leave(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    tier.write_gate.close()
    writing = threads.submit(store.write_back.write_back)
    tier.write_gate.wait_reached()
    for number in range(100, 120):
        put_pages(store, known, [number])
    assert found_pages(store, known, [1]) == [1]
    tier.write_gate.open()
    assert result_of(writing) == 1, "its checksum was right to the end"
    store.check_integrity()


def test_flush_returns_what_became_durable(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(9):
        put_pages(store, known, [number])
    assert store.flush() == 9
    assert (len(tier.pages), tier.flushes) == (9, 1)
    assert store.flush() == 0


def test_flush_writes_everything_that_can_be_written(open_store: OpenStore, tier: MemoryTier) -> None:
    """A whole batch that is refused is no reason to leave the others."""
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(12):
        put_pages(store, known, [number])
    tier.refuse = lambda key: key[-1] < 8
    with pytest.raises(ResourceError, match="8 of 12 pages are not on disk"):
        store.flush()
    assert (len(tier.pages), tier.flushes, store.statistics().dirty_pages) == (4, 1, 8)
    assert len(tier.writes) == 3, "each page is tried once"


def test_flush_stops_at_its_deadline(open_store: OpenStore, tier: MemoryTier, clock: FakeClock) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    for number in range(12):
        put_pages(store, known, [number])
    write = tier.write

    def slow(pages: Any) -> Any:
        clock.now += 1.0
        return write(pages)

    tier.write = slow
    with pytest.raises(ResourceError, match="4 of 12 pages are not on disk"):
        store.flush(clock.now + 1.5)
    assert len(tier.pages) == 8


def test_what_the_system_does_not_make_durable_is_an_error(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(32, [tier])
    put_pages(store, store.open_namespace(layout_of("a", FRAME)), [1])
    tier.flush_error = ResourceError("no")
    with pytest.raises(ResourceError):
        store.flush()
    store.check_integrity()


def test_waiting_for_dirty_pages(open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    assert not store.write_back.wait_for_dirty(0.0)
    waiting = threads.submit(store.write_back.wait_for_dirty, PATIENCE)
    put_pages(store, known, [1])
    assert result_of(waiting)
    assert store.write_back.wait_for_dirty(PATIENCE)


def test_tiers_learn_which_page_comes_before(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    came: dict[bytes, bytes] = {}
    write = tier.write

    def note(pages: Any) -> Any:
        came.update({page.key[-32:]: page.parent for page in pages})
        return write(pages)

    tier.write = note
    put_pages(store, known, [1, 2])
    hashes = page_hashes([2, 3, 4])  # a step later, with what was there before
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True, parent=page_hashes([1])[0])
    fill_reserved(store, known, hashes, reserved)
    store.complete_store(NODE, reserved.lease, publish=True)
    store.flush()
    keys = [known.fingerprint + each for each in page_hashes([1, 2, 3])]
    assert came == dict(zip(page_hashes([1, 2, 3, 4]), [b"", *keys], strict=True))
    with pytest.raises(InvalidRequestError, match="32 bytes, got one of 3"):
        store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True, parent=b"abc")


def test_lower_tiers_are_told_what_is_used_in_the_arena(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2, 3])
    told: list[bytes] = []
    tier.touch = lambda keys: told.extend(keys)
    store.sweep()
    assert told == []
    load_pages(store, known, [1, 2])
    store.touch(known.fingerprint, page_hashes([2, 9]))
    store.sweep()
    store.sweep()
    assert told == [known.fingerprint + each for each in page_hashes([1, 2])]


def test_a_prefix_that_was_stored_in_batches_is_not_told_as_used(shm: Path, tier: MemoryTier) -> None:
    """Its client touches it once more as a whole: in a Cluster that would be a script for each of its new pages."""
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        known = store.open_namespace(layout_of("a", FRAME))
        put_pages(store, known, [1, 2, 3])
        store.write_back.share()
        assert store.note_use(known.fingerprint, page_hashes([1, 2, 3]), read=False, missed=0) == 3
        store.write_back.tell_shared()
        assert tier.touched == []
        assert store.note_use(known.fingerprint, page_hashes([1, 2, 3]), read=True, missed=0) == 3
        store.write_back.tell_shared()
        assert len(tier.touched) == 3


def test_what_the_shared_tier_lost_is_offered_again_when_it_is_used(shm: Path, tier: MemoryTier) -> None:
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        known = store.open_namespace(layout_of("a", FRAME))
        put_pages(store, known, [1, 2, 3])
        assert store.write_back.share() == 3
        del tier.pages[known.fingerprint + page_hashes([2])[0]]
        store.write_back.tell_shared()
        assert not store.write_back.wait_for_unshared(0.0), "nothing was used"
        load_pages(store, known, [1, 2])
        load_pages(store, known, [1, 2])
        store.write_back.tell_shared()
        assert store.write_back.share() == 1
        assert len(tier.pages) == 3
        assert tier.writes[-1] == [known.fingerprint + page_hashes([2])[0]]


def put_claimed(
    store: Store, tier: MemoryTier, numbers: list[int], seconds: float
) -> tuple[KnownNamespace, list[bytes]]:
    """Store pages of which another node is sending the first two."""
    known = store.open_namespace(layout_of("a", FRAME))
    keys = [known.fingerprint + each for each in page_hashes(numbers)]
    tier.claimed = dict.fromkeys(keys[:2], seconds)
    put_pages(store, known, numbers)
    return known, keys


def test_what_another_node_is_sending_keeps_nothing_else_waiting(shm: Path, tier: MemoryTier) -> None:
    """Its pages are not held meanwhile, nobody who writes or clears waits, and it is offered again when that ended."""
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        known, keys = put_claimed(store, tier, [1, 2, 3], 1000.0)
        assert store.write_back.share() == 3, "one is there, and two are on their way"
        assert list(tier.pages) == keys[2:]
        assert store.statistics().counters["unshared"] == 0
        assert not store.write_back.sharing.locked()
        put_pages(store, known, [7])
        assert store.write_back.share() == 1
        load_pages(store, known, [1, 2])
        store.write_back.tell_shared()
        assert store.write_back.share() == 0, "what is waited for is not queued once more"
        tier.claimed = {}
        store.write_back.share_all(time.monotonic() + PATIENCE)
        assert set(tier.pages) >= set(keys)
        assert tier.looked == set(keys[:2])
        assert store.statistics().counters["shared"] == 4
        assert store.statistics().counters["unshared"] == 0
        store.check_integrity()


def test_a_claim_of_a_node_that_died_ends_with_its_time(shm: Path, tier: MemoryTier) -> None:
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        _, keys = put_claimed(store, tier, [1, 2], 0.1)
        assert store.write_back.share() == 2
        offer = tier.offer

        def once(pages: Any, looked: Any) -> Any:
            tier.claimed = {}
            return offer(pages, looked)

        tier.offer = once
        tier.ended = lambda claims: [False] * len(claims)
        store.write_back.share_all(time.monotonic() + PATIENCE)
        assert set(tier.pages) == set(keys)


def test_a_look_at_claims_that_fails_is_made_again(shm: Path, tier: MemoryTier) -> None:
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        _, keys = put_claimed(store, tier, [1, 2], 1000.0)
        assert store.write_back.share() == 2
        ended, tier.ended = tier.ended, raising
        with pytest.raises(RuntimeError, match="broken"):
            while True:
                store.write_back.wait_for_unshared(PATIENCE)
                store.write_back.look_at_claims()
        tier.ended, tier.claimed = ended, {}
        store.write_back.share_all(time.monotonic() + PATIENCE)
        assert set(tier.pages) == set(keys)


def raising(*_: Any) -> Any:
    raise RuntimeError("broken")


def test_a_page_that_leaves_while_another_node_sends_it_is_counted(shm: Path, tier: MemoryTier) -> None:
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        known, _ = put_claimed(store, tier, [1, 2], 1000.0)
        assert store.write_back.share() == 2
        store.evict(known.fingerprint, page_hashes([1]))
        tier.claimed = {}
        store.write_back.share_all(time.monotonic() + PATIENCE)
        counters = store.statistics().counters
        assert (counters["shared"], counters["unshared"]) == (1, 1)


def test_a_store_that_ends_waits_for_no_other_node(shm: Path, tier: MemoryTier) -> None:
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        put_claimed(store, tier, [1, 2, 3], 1000.0)
    assert len(tier.pages) == 1


def test_a_flush_waits_for_what_another_thread_is_sharing(
    shm: Path, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared=tier) as store:
        put_pages(store, store.open_namespace(layout_of("a", FRAME)), [1])
        tier.write_gate.close()
        sharing = threads.submit(store.write_back.share)
        tier.write_gate.wait_reached()
        store.flush(time.monotonic() + 0.05)
        assert not tier.pages, "it is given up at its deadline"
        flushing = threads.submit(store.flush)
        tier.write_gate.open()
        result_of(flushing)
        assert len(tier.pages) == 1
        assert result_of(sharing) == 1
