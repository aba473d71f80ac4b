"""What must look at all pages does so a few at a time: no hold of a lock treats more, however many there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_lock import CountingLock, replace_lock
from memory_tier import MemoryTier
from tiny_stores import OpenStore, layout_of, load_pages, page_hashes, put_pages

from kvstore.catalog.catalog import Catalog
from kvstore.catalog.slot_table import SlotTable
from kvstore.hashing import checksum_of
from kvstore.store import (
    pins,
    removal,
    state,
    write_back,
)
from kvstore.store.residency import Residency
from kvstore.store.store import Store
from kvstore.tiers.disk import catalog as disk_pages
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.tier import PageWrite

FRAME = 4096
PAGES = 100
STEP = 4


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SLOTS_A_LOOK", 32)
    for module in (state, removal, pins, disk_pages):
        monkeypatch.setattr(module, "PAGES_A_STEP", STEP)
    monkeypatch.setattr(write_back, "_WRITE_PAGES", STEP)


def clear(store: Store, fingerprint: bytes) -> None:
    assert store.clear(fingerprint) == PAGES


def evict(store: Store, fingerprint: bytes) -> None:
    assert store.evict(fingerprint, page_hashes(range(PAGES))) == PAGES


def unpin(store: Store, fingerprint: bytes) -> None:
    assert store.unpin(fingerprint, page_hashes(range(PAGES))) == PAGES


def make_durable(store: Store, fingerprint: bytes) -> None:
    known = store.namespaces.get(fingerprint)
    assert known is not None
    store.open_namespace(known.layout, "disk")
    assert store._catalog._durable_frames == PAGES


def flush(store: Store, fingerprint: bytes) -> None:
    assert store.flush() == PAGES + 8


def verify(store: Store, fingerprint: bytes) -> None:
    assert store.verify(threading.Event()) == 0


@pytest.mark.parametrize("walk", [clear, evict, unpin, make_durable, flush, verify])
def test_no_hold_of_the_stores_lock_treats_more_than_a_few_pages(
    open_store: OpenStore,
    tier: MemoryTier,
    monkeypatch: pytest.MonkeyPatch,
    walk: Callable[[Store, bytes], None],
) -> None:
    store = open_store(512, [tier])
    one, other = (store.open_namespace(layout_of(name, FRAME)) for name in ("one", "other"))
    put_pages(store, one, range(PAGES))
    put_pages(store, other, range(8))
    if walk in (unpin, clear):
        store.pin(one.fingerprint, page_hashes(range(PAGES)), 1000)
    if walk is clear:
        store.flush()
    with monkeypatch.context() as patched:
        holds = replace_lock(store, patched)
        for owner, name in (
            (SlotTable, "key"),
            (SlotTable, "find_stamp"),
            (Catalog, "_set_risk"),
            (Catalog, "unpin"),
            (Residency, "drop"),
            (Residency, "checksum"),
        ):
            patched.setattr(owner, name, holds.counted(name, getattr(owner, name)))
        mark_clean = Catalog.mark_clean

        def marking(catalog: Catalog, slots: Iterable[int]) -> None:
            cleaned = list(slots)
            holds.done[-1]["mark_clean"] += len(cleaned)
            mark_clean(catalog, cleaned)

        patched.setattr(Catalog, "mark_clean", marking)
        walk(store, one.fingerprint)
    treated = {
        clear: "drop",
        evict: "drop",
        unpin: "unpin",
        make_durable: "_set_risk",
        flush: "mark_clean",
        verify: "checksum",
    }[walk]
    assert holds.all(treated) >= PAGES
    for done in holds.done:
        assert max(done.values(), default=0) <= 3 * STEP, done
    store.check_integrity()
    assert load_pages(store, other, range(8)) == 8


def test_no_hold_of_the_disk_tiers_lock_treats_more_than_a_few_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, 8 << 20)
    try:
        payload = np.zeros(FRAME, np.uint8)
        checksum = checksum_of(payload)
        pages = [PageWrite(bytes(32) + block_hash, checksum, payload) for block_hash in page_hashes(range(PAGES))]
        assert all(tier.write(pages))
        holds = CountingLock(tier._catalog._lock)
        monkeypatch.setattr(tier._catalog, "_lock", holds)
        index = tier._catalog._pages.index

        def counted(what: str, method: Any) -> Any:
            def count(rows: Any) -> Any:
                if what in ("keys", "remove"):
                    holds.done[-1][what] += len(rows)
                return method(rows)

            return count

        for name in ("keys", "remove"):
            monkeypatch.setattr(index, name, counted(name, getattr(index, name)))
        keys = tier.keys(pages[0].key[:32])
        assert sorted(keys) == sorted(page.key for page in pages)
        assert tier.remove(keys) == PAGES
        assert max(holds.most("keys"), holds.most("remove")) == STEP
        assert tier.keys(pages[0].key[:32]) == []
    finally:
        tier.close()
