"""Checksums: made once, taken over, verified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.limits import ARENA, DISK
from kvstore.store.leases import NODE
from kvstore.store.store import Store

FRAME = 4096
OpenStore = Callable[..., Store]


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
        patch.setattr("kvstore.store.loads.checksum_of", slowly)
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
    store.write_back.write_back()
    held = kv.hold(store, known, [1, 2, 3])
    for frame in held.frames[:2]:
        store.arena.view(frame, 5000)[4999] ^= 0x80
    store.complete_load(NODE, held.ticket)
    stop = threading.Event()
    stop.set()
    assert store.verify(stop) == 0
    assert store.verify(threading.Event()) == 2
    assert kv.counts(store, "corrupt") == (2,)
    assert store.verify(threading.Event()) == 0
    [tiers] = store.lookup([(known.fingerprint, kv.hashes_of([1, 2, 3]))])
    assert list(tiers) == [DISK, DISK, ARENA]
    assert kv.get(store, known, [1, 2, 3]) == 3
    store.check_integrity()
