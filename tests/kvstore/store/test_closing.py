"""Closing a store, and what it says of itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from memory_tier import MemoryTier
from tiny_stores import OpenStore, fill_reserved, hold_pages, layout_of, load_pages, page_hashes, put_in_tier, put_pages

from kvstore.arena.arena import Arena
from kvstore.errors import (
    InUseError,
    ResourceError,
    UnavailableError,
)
from kvstore.store.leases import NODE

FRAME = 4096
PATIENCE = 60.0


def test_a_closed_store_has_written_back_and_given_up_everything(
    open_store: OpenStore, tier: MemoryTier, shm: Path
) -> None:
    with open_store(32, [tier]) as store:
        known = store.open_namespace(layout_of("a", FRAME))
        put_pages(store, known, [1])
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
        lambda: store.open_namespace(layout_of("a", FRAME)),
    ):
        with pytest.raises(UnavailableError, match="stopping"):
            call()
    store.sweep()


def test_closing_gives_everything_up_also_when_the_disk_fails(
    open_store: OpenStore, tier: MemoryTier, shm: Path
) -> None:
    store = open_store(32, [tier])
    tier.flush_error = ResourceError("no")
    with pytest.raises(ResourceError):
        store.close()
    assert tier.closed
    Arena(shm / "arena", 32 * FRAME).close()


def test_the_arena_is_not_given_up_while_this_process_writes_into_it(
    open_store: OpenStore, tier: MemoryTier, shm: Path
) -> None:
    """A next node would give the slot to somebody else while a thread of this one still fills it."""
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [9])
    hashes = page_hashes([1])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    held = hold_pages(store, known, [9])
    store.close()
    with pytest.raises(InUseError):
        Arena(shm / "arena", 32 * FRAME)
    fill_reserved(store, known, hashes, reserved)
    assert store.complete_store(NODE, reserved.lease, publish=True) == (1, 0, 0)
    assert not store.complete_load(NODE, held.lease), "from now on the bytes are another node's to change"
    again = open_store(32, [])
    assert again.kept_pages == 2
    assert load_pages(again, known, [1]) == 1


def test_the_arena_is_not_given_up_while_pages_are_promoted_into_it(
    open_store: OpenStore, tier: MemoryTier, shm: Path, threads: ThreadPoolExecutor
) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", FRAME))
    put_in_tier(store, known, tier, [1])
    tier.read_gate.close()
    loading = threads.submit(load_pages, store, known, [1])
    tier.read_gate.wait_reached()
    store.close()
    with pytest.raises(InUseError):
        Arena(shm / "arena", 32 * FRAME)
    tier.read_gate.open()
    loading.exception(PATIENCE)
    Arena(shm / "arena", 32 * FRAME).close()


def test_statistics_say_what_is_where(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(64, [tier])
    one, other = store.open_namespace(layout_of("a", FRAME)), store.open_namespace(layout_of("b", 5000))
    put_pages(store, one, [1, 2])
    put_pages(store, other, [1])
    statistics = store.statistics()
    assert statistics.arena_used_bytes == 4 * FRAME
    assert statistics.arena_limit_bytes == 64 * FRAME
    assert (statistics.arena_pages, statistics.dirty_pages, statistics.clients) == (3, 3, 0)
    assert [(usage.layout.model, usage.arena_pages) for usage in statistics.namespaces] == [("a", 2), ("b", 1)]
