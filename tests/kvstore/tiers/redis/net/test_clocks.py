"""Nodes whose clocks differ by days: what lives in Redis is timed by Redis alone, so they share pages all the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node_process import ROOT, NodeProcess
from redis_servers import RedisServer

import kvstore

PAGE = 96 << 10
LAYOUT = kvstore.Layout(model="shared", block_size=16, page_bytes=PAGE)
DAY = 86400
_SHIFTED_CLOCK = """
import sys, time, types
sys.path.insert(0, {root!r})
import kvstore.node.node, kvstore.tiers.redis
kvstore.tiers.redis.RedisTier.__init__.__kwdefaults__.update(timeout=30.0, lookup_timeout=30.0)
shifted = types.SimpleNamespace(**vars(time))
shifted.time = lambda: time.time() + {seconds}
for name, module in list(sys.modules.items()):
    if name.startswith("kvstore.") and getattr(module, "time", None) is time:
        module.time = shifted
"""
"""What a node runs first: its own code has another clock than the libraries, which set alarms by the system's. And
it waits for a Redis on a busy machine."""


def prompt(name: str) -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(6)]


def pages_of(hashes: list[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.stack([np.frombuffer(hashlib.shake_256(each).digest(PAGE), np.uint8) for each in hashes])


@pytest.fixture
def node_at(
    short_folder: Path, shm_folder: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, int], NodeProcess]]:
    """Start a node, or the same once more, whose wall clock is so many seconds off."""
    nodes: dict[str, NodeProcess] = {}

    def start(name: str, seconds: int) -> NodeProcess:
        folder = short_folder / name
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(_SHIFTED_CLOCK.format(root=str(ROOT), seconds=seconds))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        options = {"redis": server.url, "redis-limit": "64MiB"}
        nodes[name] = NodeProcess(folder, shm_folder / name, **options)
        (shm_folder / name).mkdir(exist_ok=True)
        nodes[name].start()
        return nodes[name]

    yield start
    for node in nodes.values():
        node.kill()


def test_nodes_whose_clocks_are_days_apart_share_pages(node_at, eventually):
    behind, ahead = node_at("behind", -3 * DAY), node_at("ahead", 400 * DAY)
    with kvstore.connect(behind.url, timeout=30.0) as first, kvstore.connect(ahead.url, timeout=30.0) as second:
        ours, theirs = first.namespace(LAYOUT), second.namespace(LAYOUT)
        for store, load, name in ((ours, theirs, "one"), (theirs, ours, "two")):
            hashes = prompt(name)
            assert store.store(hashes, pages_of(hashes)).stored == 6
            eventually(lambda load=load, hashes=hashes: load.lookup(hashes).prefix == 6)
            into = np.zeros((6, PAGE), np.uint8)
            assert load.load(hashes, into) == 6
            assert np.array_equal(into, pages_of(hashes))
        # Both drop what has had its time, by Redis' clock: nothing of this has.
        for client in (first, second):
            counts = client.status().tier("redis").counters
            assert (counts["corrupt"], counts["errors"]) == (0, 0)


def test_a_clock_that_was_set_back_costs_no_page(node_at):
    node = node_at("one", 30 * DAY)
    hashes = prompt("kept")
    with kvstore.connect(node.url, timeout=30.0) as client:
        pages = client.namespace(LAYOUT)
        pages.store(hashes, pages_of(hashes))
        assert pages.pin(hashes, 3600) == 6
        client.flush()
    assert node.terminate() == 0
    node = node_at("one", -30 * DAY)
    with kvstore.connect(node.url, timeout=30.0) as client:
        into = np.zeros((6, PAGE), np.uint8)
        assert client.namespace(LAYOUT).load(hashes, into) == 6
        assert np.array_equal(into, pages_of(hashes))
        assert client.status().namespaces[0].pinned_pages == 6
