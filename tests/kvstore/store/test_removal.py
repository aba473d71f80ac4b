"""Removal: pages and namespaces go from every tier, whatever is under way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_lock import CountingLock
from memory_tier import MemoryTier
from tiny_stores import (
    OpenStore,
    counters_of,
    found_pages,
    hold_pages,
    layout_of,
    load_pages,
    page_hash,
    page_hashes,
    payload_of,
    put_in_tier,
    put_pages,
    result_of,
)

from kvstore.arena.arena import Arena
from kvstore.errors import (
    ResourceError,
    UnknownNamespaceError,
)
from kvstore.store import removal
from kvstore.store.leases import NODE
from kvstore.store.store import Store

FRAME = 4096
PATIENCE = 60.0


def test_evicted_pages_are_nowhere(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    store.write_back.write_back()
    put_pages(store, known, [3, 4])
    assert store.evict(known.fingerprint, page_hashes([2, 3, 3, 9])) == 2
    assert found_pages(store, known, [1, 2, 3, 4]) == [1, 4]
    assert list(tier.pages) == [known.fingerprint + page_hash(1)]
    assert counters_of(store, "evicted", "overrun") == (0, 0)
    store.check_integrity()


@pytest.mark.parametrize("how", ["evict", "clear"])
def test_held_pages_can_be_dropped_and_their_bytes_stay_until_the_hold_ends(open_store: OpenStore, how: str) -> None:
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    other = store.open_namespace(layout_of("b", FRAME))
    put_pages(store, known, [1, 2])
    held = hold_pages(store, known, [1, 2])
    if how == "evict":
        assert store.evict(known.fingerprint, page_hashes([1, 2])) == 2
        assert found_pages(store, known, [1, 2]) == []
    else:
        assert store.clear(known.fingerprint) == 2
    store.check_integrity()
    for number in range(40):
        put_pages(store, other, [number])
    for number, frame in zip([1, 2], held.frames, strict=True):
        assert np.array_equal(store.arena.view(frame, FRAME), payload_of(known, page_hash(number)))
    assert store.complete_load(NODE, held.lease)
    assert len(found_pages(store, other, list(range(40)))) == 14
    put_pages(store, other, [50, 51])
    assert len(found_pages(store, other, list(range(60)))) == 16
    store.check_integrity()


def test_clear_drops_a_namespace_from_every_tier_and_no_other(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(16, [tier])
    one, other = (store.open_namespace(layout_of(model, FRAME)) for model in "ab")
    put_pages(store, one, [1, 2])
    put_pages(store, other, [1])
    store.flush()
    put_pages(store, one, [3])
    assert store.clear(one.fingerprint) == 3
    with pytest.raises(UnknownNamespaceError):
        store.lookup([(one.fingerprint, [])])
    with pytest.raises(UnknownNamespaceError):
        store.clear(one.fingerprint)
    assert [usage.layout.model for usage in store.statistics().namespaces] == ["b"]
    assert [key[:32] for key in tier.pages] == [other.fingerprint]
    assert found_pages(store, store.open_namespace(layout_of("a", FRAME)), [1, 2, 3]) == []
    assert load_pages(store, other, [1]) == 1


def test_a_store_under_way_in_a_cleared_namespace_is_refused(open_store: OpenStore) -> None:
    """Its header would name a namespace that is gone, also when one of the same layout was opened since."""
    store = open_store(16)
    known = store.open_namespace(layout_of("a", FRAME))
    hashes = page_hashes([1])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    store.clear(known.fingerprint)
    again = store.open_namespace(layout_of("a", FRAME))
    assert store.complete_store(NODE, reserved.lease, publish=True) == (0, 0, 1)
    assert found_pages(store, again, [1]) == []
    assert store.statistics().arena_used_bytes == 0


def test_a_page_dropped_while_it_is_written_back_does_not_come_back(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1, 2])
    tier.write_gate.close()
    writing = threads.submit(store.write_back.write_back)
    tier.write_gate.wait_reached()
    gone = threading.Event()
    drop = store._removal._drop_here

    def drop_and_say(keys: list[bytes]) -> set[bytes]:
        dropped = drop(keys)
        gone.set()
        return dropped

    store._removal._drop_here = drop_and_say  # type: ignore[method-assign, assignment]
    evicting = threads.submit(store.evict, known.fingerprint, page_hashes([1]))
    assert gone.wait(PATIENCE)
    assert found_pages(store, known, [1]) == [], "gone from the arena at once, whatever the disk does"
    tier.write_gate.open()
    result_of(writing)
    result_of(evicting)
    assert found_pages(store, known, [1, 2]) == [2]
    assert load_pages(store, known, [1]) == 0
    store.check_integrity()


def test_a_page_dropped_while_it_is_promoted_does_not_come_back(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1, 2])
    tier.read_gate.close()
    loading = threads.submit(load_pages, store, known, [1, 2])
    tier.read_gate.wait_reached()  # it has read
    assert store.evict(known.fingerprint, page_hashes([2])) == 1
    tier.read_gate.open()
    assert result_of(loading) == 1
    assert found_pages(store, known, [1, 2]) == [1]
    store.check_integrity()


def test_a_page_that_is_promoted_while_it_is_dropped_does_not_stay(
    open_store: OpenStore, tier: MemoryTier, threads: ThreadPoolExecutor
) -> None:
    """It came when the arena had been looked through, and the lower tier had it still."""
    store = open_store(16, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1])
    remove = tier.remove

    def load_and_remove(keys: list[bytes]) -> int:
        assert load_pages(store, known, [1]) == 1
        return int(remove(keys))

    tier.remove = load_and_remove
    assert store.evict(known.fingerprint, page_hashes([1])) == 1
    assert found_pages(store, known, [1]) == []
    store.check_integrity()


def test_who_shares_pages_waits_for_a_part_of_a_clear_alone(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a namespace is, the lock that keeps others from writing to a tier is let go between pieces."""
    monkeypatch.setattr(removal, "_KEYS_AT_ONCE", 3)
    shared = MemoryTier(name="redis")
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared) as store:
        known = store.open_namespace(layout_of("a", FRAME))
        put_pages(store, known, range(8))
        while store.write_back.share():
            pass
        lock = CountingLock(store.write_back.sharing)
        removed: list[int] = []
        remove = shared.remove

        def counted(keys: list[bytes]) -> int:
            removed.append(len(keys))
            return int(remove(keys))

        shared.remove = lock.counted("remove", counted)
        with monkeypatch.context() as counting:
            counting.setattr(store.write_back, "sharing", lock)
            assert store.clear(known.fingerprint) == 8
        assert removed == [3, 3, 2]
        assert lock.most("remove") == 1
        assert not shared.pages


def test_what_a_tier_could_not_drop_is_said_and_can_be_cleared_again(shm: Path) -> None:
    shared = MemoryTier(name="redis")
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared) as store:
        known = store.open_namespace(layout_of("a", FRAME))
        put_pages(store, known, [1, 2, 3])
        store.write_back.share()
        remove, keys = shared.remove, shared.keys

        def away(*arguments: Any) -> Any:
            raise ResourceError("redis is away")

        shared.remove = away
        with pytest.raises(ResourceError, match="away"):
            store.evict(known.fingerprint, page_hashes([1]))
        assert store._catalog.find(known.fingerprint + page_hash(1)) is None
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
