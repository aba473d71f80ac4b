"""Namespaces that nobody uses: how old they are, and when they are dropped."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from memory_tier import MemoryTier
from tiny_stores import OpenStore, counters_of, found_pages, layout_of, load_pages, page_hashes, put_pages

import kvstore
import kvstore.namespaces.registry
from kvstore.config.rules import parse_rules
from kvstore.node.node import Node
from kvstore.store.store import Store

FRAME = 4096
DAY = 86400.0
NEVER = threading.Event()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = FakeClock()
    monkeypatch.setattr(kvstore.namespaces.registry, "time", clock)
    return clock


def names(store: Store) -> list[str]:
    return [usage.layout.model for usage in store.statistics().namespaces]


def test_only_what_nobody_uses_is_dropped_from_arena_and_disk(
    open_store: OpenStore, tier: MemoryTier, clock: FakeClock
) -> None:
    store = open_store(64, [tier], life=30 * DAY)
    old, used = (store.open_namespace(layout_of(name, FRAME)) for name in ("old", "used"))
    put_pages(store, old, [1, 2])
    put_pages(store, used, [1])
    while store.write_back.write_back():
        pass
    clock.now += 29 * DAY
    assert store.expiry.expire(NEVER) == 0
    load_pages(store, used, [1])
    clock.now += 2 * DAY
    assert store.expiry.expire(NEVER) == 2
    assert names(store) == ["used"]
    assert [key[:32] for key in tier.pages] == [used.fingerprint], "it left the disk as well"
    assert counters_of(store, "expired") == (2,)
    store.check_integrity()
    clock.now += 31 * DAY
    assert store.expiry.expire(NEVER) == 1
    again = store.open_namespace(layout_of("old", FRAME))
    assert found_pages(store, again, [1, 2]) == []


def test_reads_without_a_call_count_as_use(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(64, [], life=DAY)
    known = store.open_namespace(layout_of("a", FRAME))
    clock.now += 0.9 * DAY
    store.note_use(known.fingerprint, [], read=True, missed=1)
    clock.now += 0.9 * DAY
    assert store.expiry.expire(NEVER) == 0
    assert names(store) == ["a"]


def test_a_rule_says_more_than_the_nodes_default(open_store: OpenStore, clock: FakeClock) -> None:
    rules = parse_rules([{"match": "short*", "expire": "1h"}, {"match": "kept*", "expire": 0}])
    store = open_store(64, [], rules=rules, life=DAY)
    for name in ("short", "kept", "other"):
        store.open_namespace(layout_of(name, FRAME))
    clock.now += 3601
    store.expiry.expire(NEVER)
    assert names(store) == ["kept", "other"]
    clock.now += DAY
    store.expiry.expire(NEVER)
    assert names(store) == ["kept"]
    store.set_rules((), DAY)
    store.expiry.expire(NEVER)
    assert names(store) == []


def test_what_is_pinned_stays(open_store: OpenStore, clock: FakeClock) -> None:
    store = open_store(64, [], life=DAY)
    known = store.open_namespace(layout_of("a", FRAME))
    put_pages(store, known, [1])
    assert store.pin(known.fingerprint, page_hashes([1]), 1000.0) == 1
    clock.now += 2 * DAY
    assert store.expiry.expire(NEVER) == 0
    store.unpin(known.fingerprint, page_hashes([1]))
    clock.now += 2 * DAY
    assert store.expiry.expire(NEVER) == 1


def test_ages_outlive_the_node_but_not_time_in_which_none_ran(
    open_store: OpenStore, clock: FakeClock, shm: Path
) -> None:
    store = open_store(64, [])
    known = store.open_namespace(layout_of("a", FRAME))
    clock.now += 3 * DAY
    store.close()
    clock.now += 300 * DAY  # a machine that was off, or a clock that was set
    again = open_store(64, [], life=4 * DAY)
    [usage] = again.statistics().namespaces
    assert usage.idle_seconds == pytest.approx(3 * DAY, abs=1)
    again.expiry.expire(NEVER)
    assert names(again) == ["a"]
    assert again.namespaces.known()[0].created == pytest.approx(known.created, abs=1)
    clock.now += 1.5 * DAY
    again.expiry.expire(NEVER)
    assert names(again) == []


def test_a_register_of_an_older_version_is_read_as_new(open_store: OpenStore, shm: Path) -> None:
    store = open_store(64, [])
    store.open_namespace(layout_of("a", FRAME))
    store.close()
    register = shm / "arena" / "namespaces.json"
    table = json.loads(register.read_text())
    for entry in table["namespaces"]:
        del entry["created"], entry["idle"]
    register.write_text(json.dumps(table))
    [usage] = open_store(64, [], life=DAY).statistics().namespaces
    assert usage.idle_seconds < 60
    assert usage.age_seconds < 60


def test_a_client_that_was_idle_goes_on_with_a_namespace_that_was_dropped(start_node: Callable[..., Node]) -> None:
    node = start_node(disk_limit=0)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=30.0) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=5000))
        hashes = [bytes([number]) * 32 for number in range(4)]
        assert pages.store(hashes, np.ones((4, 5000), np.uint8)).stored == 4
        assert pages.lookup(hashes).prefix == 4
        node.store.set_rules((), 1e-6)
        assert node.store.expiry.expire(NEVER) == 4
        node.store.set_rules((), 0.0)
        assert pages.load(hashes, np.zeros((4, 5000), np.uint8)) == 0
        assert pages.store(hashes, np.full((4, 5000), 7, np.uint8)).stored == 4
        into = np.zeros((4, 5000), np.uint8)
        assert pages.load(hashes, into) == 4
        assert (into == 7).all()
