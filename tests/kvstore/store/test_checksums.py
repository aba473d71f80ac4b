"""Checksums: made once, taken over, verified."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_clock import FakeClock
from memory_tier import MemoryTier
from tiny_stores import (
    OpenStore,
    counters_of,
    fill_reserved,
    found_pages,
    hold_pages,
    layout_of,
    load_pages,
    page_hashes,
    put_pages,
)

from kvstore.page_codes import PageTier
from kvstore.store.leases import NODE

FRAME = 4096


def test_checksums_are_made_once_and_kept(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    held = hold_pages(store, known, [1])
    sums = store.checksums(NODE, held.lease)
    assert sums is not None
    store.arena.view(held.frames[0], FRAME)[0] ^= 1
    assert store.checksums(NODE, held.lease) == sums
    store.complete_load(NODE, held.lease)
    assert store.verify(threading.Event()) == 1
    assert found_pages(store, known, [1]) == []


def test_checksums_of_a_hold_that_lapses_meanwhile_are_not_used(
    open_store: OpenStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be another page's by then."""
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    held = hold_pages(store, known, [1], ttl=5.0)

    def slowly(payload: Any) -> int:
        clock.now += 5.1
        store.sweep()
        return 7

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.store.loads.checksum_of", slowly)
        assert store.checksums(NODE, held.lease) is None
    held = hold_pages(store, known, [1])
    assert store.checksums(NODE, held.lease) != [7]


def test_a_writers_checksums_are_taken_over(open_store: OpenStore) -> None:
    store = open_store()
    known = store.open_namespace(layout_of("a", FRAME))
    hashes = page_hashes([1, 2])
    reserved = store.prepare_store(NODE, known.fingerprint, hashes, 10.0, direct=True)
    fill_reserved(store, known, hashes, reserved)
    store.complete_store(NODE, reserved.lease, publish=True, checksums=[11, 12])
    held = hold_pages(store, known, [1, 2])
    assert store.checksums(NODE, held.lease) == [11, 12]


def test_verify_finds_a_flipped_byte_and_drops_the_page(open_store: OpenStore, tier: MemoryTier) -> None:
    store = open_store(32, [tier])
    known = store.open_namespace(layout_of("a", 5000))
    put_pages(store, known, [1, 2, 3])
    store.write_back.write_back()
    held = hold_pages(store, known, [1, 2, 3])
    for frame in held.frames[:2]:
        store.arena.view(frame, 5000)[4999] ^= 0x80
    store.complete_load(NODE, held.lease)
    stop = threading.Event()
    stop.set()
    assert store.verify(stop) == 0
    assert store.verify(threading.Event()) == 2
    assert counters_of(store, "corrupt") == (2,)
    assert store.verify(threading.Event()) == 0
    [tiers] = store.lookup([(known.fingerprint, page_hashes([1, 2, 3]))])
    assert list(tiers) == [PageTier.DISK, PageTier.DISK, PageTier.ARENA]
    assert load_pages(store, known, [1, 2, 3]) == 3
    store.check_integrity()
