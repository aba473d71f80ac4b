"""Dropping: pages and namespaces go from every tier, whatever is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.arena.arena import Arena
from kvstore.errors import (
    ResourceError,
    UnknownNamespaceError,
)
from kvstore.store.leases import NODE
from kvstore.store.store import Store

FRAME = 4096
OpenStore = Callable[..., Store]
PATIENCE = 60.0


def test_evicted_pages_are_nowhere(open_store: OpenStore, kv: SimpleNamespace, tier: Any) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put(store, known, [1, 2])
    store.write_back.write_back()
    kv.put(store, known, [3, 4])
    assert store.evict(known.fingerprint, kv.hashes_of([2, 3, 3, 9])) == 2
    assert kv.found(store, known, [1, 2, 3, 4]) == [1, 4]
    assert list(tier.pages) == [known.fingerprint + kv.hash_of(1)]
    assert kv.counts(store, "evicted", "overrun") == (0, 0)
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
    writing = threads.submit(store.write_back.write_back)
    tier.write_gate.wait_reached()
    gone = threading.Event()
    drop = store._removal._drop_here

    def drop_and_say(keys: list[bytes]) -> set[bytes]:
        dropped = drop(keys)
        gone.set()
        return dropped

    store._removal._drop_here = drop_and_say  # type: ignore[method-assign, assignment]
    evicting = threads.submit(store.evict, known.fingerprint, kv.hashes_of([1]))
    assert gone.wait(PATIENCE)
    assert kv.found(store, known, [1]) == [], "gone from the arena at once, whatever the disk does"
    tier.write_gate.open()
    kv.result(writing)
    kv.result(evicting)
    assert kv.found(store, known, [1, 2]) == [2]
    assert kv.get(store, known, [1]) == 0
    store.check_integrity()


def test_a_page_dropped_while_it_comes_up_does_not_come_back(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put_below(store, known, tier, [1, 2])
    tier.read_gate.close()
    loading = threads.submit(kv.get, store, known, [1, 2])
    tier.read_gate.wait_reached()  # it has read
    assert store.evict(known.fingerprint, kv.hashes_of([2])) == 1
    tier.read_gate.open()
    assert kv.result(loading) == 1
    assert kv.found(store, known, [1, 2]) == [1]
    store.check_integrity()


def test_a_page_that_comes_up_while_it_is_dropped_does_not_stay(
    open_store: OpenStore, kv: SimpleNamespace, tier: Any, threads: ThreadPoolExecutor
) -> None:
    """It came when the arena had been looked through, and the tier below had it still."""
    store = open_store(16, [tier])
    known = store.open_namespace(kv.layout("a", FRAME))
    kv.put_below(store, known, tier, [1])
    remove = tier.remove

    def load_and_remove(keys: list[bytes]) -> int:
        assert kv.get(store, known, [1]) == 1
        return int(remove(keys))

    tier.remove = load_and_remove
    assert store.evict(known.fingerprint, kv.hashes_of([1])) == 1
    assert kv.found(store, known, [1]) == []
    store.check_integrity()


def test_what_a_tier_could_not_drop_is_said_and_can_be_cleared_again(shm: Path, kv: SimpleNamespace) -> None:
    shared = kv.MemoryTier(name="redis")
    with Store(Arena(shm / "arena", 64 * FRAME), [], [shm / "arena"], shared) as store:
        known = store.open_namespace(kv.layout("a", FRAME))
        kv.put(store, known, [1, 2, 3])
        store.write_back.share()
        remove, keys = shared.remove, shared.keys

        def away(*arguments: Any) -> Any:
            raise ResourceError("redis is away")

        shared.remove = away
        with pytest.raises(ResourceError, match="away"):
            store.evict(known.fingerprint, kv.hashes_of([1]))
        assert store._catalog.find(known.fingerprint + kv.hash_of(1)) is None
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
