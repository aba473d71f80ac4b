"""What must look at all pages does so a few at a time: no hold of a lock treats more, however many there are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.catalog.catalog import Catalog
from kvstore.catalog.slot_table import SlotTable
from kvstore.hashing import checksum_of
from kvstore.store import (
    pins as keeping,
)
from kvstore.store import (
    removal as dropping,
)
from kvstore.store import (
    state as books,
)
from kvstore.store import (
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
OpenStore = Callable[..., Store]


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "SLOTS_A_LOOK", 32)
    for module in (books, dropping, keeping, disk_pages):
        monkeypatch.setattr(module, "PAGES_A_STEP", STEP)
    monkeypatch.setattr(write_back, "_WRITE_PAGES", STEP)


def clear(store: Store, fingerprint: bytes, kv: SimpleNamespace) -> None:
    assert store.clear(fingerprint) == PAGES


def evict(store: Store, fingerprint: bytes, kv: SimpleNamespace) -> None:
    assert store.evict(fingerprint, kv.hashes_of(range(PAGES))) == PAGES


def unpin(store: Store, fingerprint: bytes, kv: SimpleNamespace) -> None:
    assert store.unpin(fingerprint, kv.hashes_of(range(PAGES))) == PAGES


def make_durable(store: Store, fingerprint: bytes, kv: SimpleNamespace) -> None:
    known = store.namespaces.get(fingerprint)
    assert known is not None
    store.open_namespace(known.layout, "disk")
    assert store._catalog._durable_frames == PAGES


def flush(store: Store, fingerprint: bytes, kv: SimpleNamespace) -> None:
    assert store.flush() == PAGES + 8


def verify(store: Store, fingerprint: bytes, kv: SimpleNamespace) -> None:
    assert store.verify(threading.Event()) == 0


@pytest.mark.parametrize("walk", [clear, evict, unpin, make_durable, flush, verify])
def test_no_hold_of_the_stores_lock_treats_more_than_a_few_pages(
    open_store: OpenStore,
    kv: SimpleNamespace,
    tier: Any,
    monkeypatch: pytest.MonkeyPatch,
    walk: Callable[[Store, bytes, SimpleNamespace], None],
) -> None:
    store = open_store(512, [tier])
    one, other = (store.open_namespace(kv.layout(name, FRAME)) for name in ("one", "other"))
    kv.put(store, one, range(PAGES))
    kv.put(store, other, range(8))
    if walk in (unpin, clear):
        store.pin(one.fingerprint, kv.hashes_of(range(PAGES)), 1000)
    if walk is clear:
        store.flush()
    holds = kv.Holds(store._state.lock)
    with monkeypatch.context() as patched:
        patched.setattr(store._state, "lock", holds)
        patched.setattr(store.write_back, "_lock", holds)
        for owner, name in (
            (SlotTable, "key"),
            (SlotTable, "find_stamp"),
            (Catalog, "_set_risk"),
            (Catalog, "unpin"),
            (Catalog, "mark_clean"),
            (Residency, "drop"),
            (Residency, "checksum"),
        ):
            patched.setattr(owner, name, holds.counted(name, getattr(owner, name)))
        walk(store, one.fingerprint, kv)
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
    assert kv.get(store, other, range(8)) == 8


def test_no_hold_of_the_disk_tiers_lock_treats_more_than_a_few_pages(
    tmp_path: Path, kv: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, 8 << 20)
    try:
        payload = np.zeros(FRAME, np.uint8)
        checksum = checksum_of(payload)
        pages = [PageWrite(bytes(32) + block_hash, checksum, payload) for block_hash in kv.hashes_of(range(PAGES))]
        assert all(tier.write(pages))
        holds = kv.Holds(tier._pages._lock)
        monkeypatch.setattr(tier._pages, "_lock", holds)
        index = tier._pages._index

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
