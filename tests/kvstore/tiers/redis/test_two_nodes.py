"""Nodes that share a real Redis: what one stored, another one finds."""

from __future__ import annotations

import hashlib
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis_servers import RedisServer, wait_until

import kvstore
from kvstore import Client, Layout, Namespace
from kvstore.hashing import checksum_of
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.tier import PageWrite

PAGE = 96 << 10
LAYOUT = Layout(model="shared", block_size=16, page_bytes=PAGE)
PROMPT = [hashlib.sha256(b"page %d" % number).digest() for number in range(24)]


def page(block_hash: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(hashlib.shake_256(block_hash).digest(PAGE), np.uint8)


def load(namespace: Namespace, hashes: list[bytes]) -> int:
    """How many leading pages could be loaded; their bytes are checked."""
    into = [np.zeros(PAGE, np.uint8) for _ in hashes]
    loaded = namespace.load(hashes, into)
    for block_hash, got in zip(hashes[:loaded], into, strict=False):
        assert np.array_equal(got, page(block_hash))
    return loaded


def store(namespace: Namespace, hashes: list[bytes]) -> int:
    return namespace.store(hashes, [page(block_hash) for block_hash in hashes]).stored


@pytest.fixture
def open_node(tmp_path: Path, shm_folder: Path) -> Iterator[Callable[..., Client]]:
    """An embedded node: the whole store with its threads, in this process."""
    clients: list[Client] = []

    def start(name: str, redis: str, **options: Any) -> Client:
        settings = {"arena": "8MiB", "disk_limit": "32MiB", "redis": redis, "redis_limit": "64MiB"}
        settings |= {"arena_dir": str(shm_folder / name)} | options
        client = kvstore.connect(f"embedded://{tmp_path / name}?{urllib.parse.urlencode(settings)}", timeout=30.0)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()


def counters(client: Client, tier: str) -> dict[str, int]:
    return dict(client.status().tier(tier).counters)


def test_one_node_stores_and_another_one_loads(server: RedisServer, open_node: Callable[..., Client]) -> None:
    first, second = open_node("first", server.url), open_node("second", server.url)
    assert store(first.namespace(LAYOUT), PROMPT) == len(PROMPT)
    first.flush()
    theirs = second.namespace(LAYOUT)
    found = theirs.lookup(PROMPT)
    assert found.prefix == len(PROMPT)
    assert set(found.tiers) == {"redis"}
    assert load(theirs, PROMPT) == len(PROMPT)
    assert counters(first, "arena")["shared"] == len(PROMPT)
    assert set(theirs.lookup(PROMPT).tiers) == {"arena"}


def test_what_came_from_redis_goes_to_the_own_disk(server: RedisServer, open_node: Callable[..., Client]) -> None:
    first, second = open_node("first", server.url), open_node("second", server.url)
    store(first.namespace(LAYOUT), PROMPT)
    first.flush()
    theirs = second.namespace(LAYOUT)
    assert load(theirs, PROMPT) == len(PROMPT)
    second.flush()
    server.client.flushall()
    filler = [hashlib.sha256(b"filler %d" % number).digest() for number in range(80)]
    for start in range(0, len(filler), 8):
        store(theirs, filler[start : start + 8])
    assert "disk" in set(theirs.lookup(PROMPT).tiers)
    assert load(theirs, PROMPT) == len(PROMPT)


def test_a_prefix_is_put_together_from_disk_and_redis(server: RedisServer, open_node: Callable[..., Client]) -> None:
    first = open_node("first", server.url)
    alone = open_node("second", "")
    store(alone.namespace(LAYOUT), PROMPT[:12])
    alone.close()
    store(first.namespace(LAYOUT), PROMPT[12:])
    first.flush()
    second = open_node("second", server.url, arena="16MiB")  # another arena: what it had is on disk only
    theirs = second.namespace(LAYOUT)
    assert theirs.lookup(PROMPT).tiers == ("disk",) * 12 + ("redis",) * 12
    assert load(theirs, PROMPT) == len(PROMPT)


def test_a_hot_prefix_crosses_the_wire_once_a_node(
    server: RedisServer, open_node: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests of four nodes, at once and again: each keeps it in its arena behind the first of them."""
    for deadline in ("lookup_timeout", "timeout"):  # however slow the machine is
        monkeypatch.setitem(RedisTier.__init__.__kwdefaults__, deadline, 60.0)
    first = open_node("first", server.url)
    store(first.namespace(LAYOUT), PROMPT)
    first.flush()
    others = [open_node(f"node{number}", server.url, arena="32MiB") for number in range(4)]
    theirs = [node.namespace(LAYOUT) for node in others]
    before = server.client.info("stats")["total_net_output_bytes"]

    def serve(namespace: Namespace) -> bool:
        return namespace.lookup(PROMPT).prefix == load(namespace, PROMPT) == len(PROMPT)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(serve, theirs * 4))
    ranges = server.client.info("commandstats")["cmdstat_getrange"]["calls"]
    assert [counters(node, "redis")["asked"] for node in others] == [len(PROMPT)] * 4
    assert all(map(serve, theirs * 10))
    assert server.client.info("commandstats")["cmdstat_getrange"]["calls"] == ranges
    assert [counters(node, "redis")["asked"] for node in others] == [len(PROMPT)] * 4
    sent = server.client.info("stats")["total_net_output_bytes"] - before
    assert 4 * len(PROMPT) * PAGE < sent < 4.3 * len(PROMPT) * PAGE


def test_overlapping_prompts_of_two_nodes_share_their_pages(
    server: RedisServer, open_node: Callable[..., Client]
) -> None:
    first, second = open_node("first", server.url), open_node("second", server.url)
    for client in (first, second):
        store(client.namespace(LAYOUT), PROMPT)
        client.flush()
    assert first.status().tier("redis").pages <= len(PROMPT)
    third = open_node("third", server.url)
    assert load(third.namespace(LAYOUT), PROMPT) == len(PROMPT)


def test_a_node_goes_on_while_redis_is_away_and_after_it_came_back(
    start_server: Callable[..., Any], open_node: Callable[..., Client]
) -> None:
    redis = start_server()
    first, second = open_node("first", redis.url), open_node("second", redis.url)
    ours, theirs = first.namespace(LAYOUT), second.namespace(LAYOUT)
    redis.kill()
    assert store(ours, PROMPT) == len(PROMPT)
    first.flush()
    assert load(ours, PROMPT) == len(PROMPT)
    assert theirs.lookup(PROMPT).prefix == 0
    assert load(theirs, PROMPT) == 0
    assert counters(first, "arena")["unshared"] == len(PROMPT)
    redis.start()
    later = [hashlib.sha256(b"later %d" % number).digest() for number in range(200)]
    for number in range(200):  # the node leaves a server alone for a while after it failed
        store(ours, [later[number]])
        first.flush()
        if theirs.lookup(later[: number + 1]).present[number]:
            break
    else:
        pytest.fail("nothing was shared after Redis came back")


def test_dropped_pages_are_gone_for_every_node(server: RedisServer, open_node: Callable[..., Client]) -> None:
    first, second = open_node("first", server.url), open_node("second", server.url)
    ours = first.namespace(LAYOUT)
    store(ours, PROMPT)
    first.flush()
    assert ours.evict(PROMPT[:4]) == 4
    theirs = second.namespace(LAYOUT)
    assert theirs.lookup(PROMPT).present[:4] == (False,) * 4
    assert all(theirs.lookup(PROMPT).present[4:])
    ours.clear()
    assert not any(theirs.lookup(PROMPT).present)


def test_what_a_node_claimed_and_never_sent_holds_up_nothing(
    server: RedisServer, open_node: Callable[..., Client], open_redis: Callable[..., RedisTier]
) -> None:
    """Its claim lasts for ten minutes here: other pages are shared, a namespace is cleared, and the node ends."""
    dead = open_redis(server.url, refresh=1000.0)
    dead._buckets._claim_ms = b"600000"
    dead._writer._chunks._send = killed  # type: ignore[method-assign]
    claimed = [LAYOUT.fingerprint + block_hash for block_hash in PROMPT[:8]]
    with pytest.raises(RuntimeError, match="killed"):
        dead.write([PageWrite(key, checksum_of(page(key[32:])), page(key[32:])) for key in claimed])
    [claim] = server.client.scan_iter(match="kvstore:*:claim:*")
    first, second = open_node("first", server.url), open_node("second", server.url)
    ours = first.namespace(LAYOUT)
    server.client.config_resetstat()
    store(ours, PROMPT[:8])
    wait_until(lambda: server.client.info("commandstats").get("cmdstat_pttl"))
    later = [hashlib.sha256(b"later %d" % number).digest() for number in range(8)]
    store(ours, later)
    theirs = second.namespace(LAYOUT)
    wait_until(lambda: theirs.lookup(later).prefix == 8)
    assert load(ours, PROMPT[:8]) == 8
    assert counters(first, "arena")["unshared"] == 0
    ours.clear()
    assert not any(theirs.lookup(later).present)
    store(first.namespace(LAYOUT), PROMPT[:8])
    wait_until(lambda: server.client.info("commandstats")["cmdstat_pttl"]["calls"] > 1)
    first.close()
    server.client.delete(claim)
    store(theirs, PROMPT[:8])
    second.flush()
    third = open_node("third", server.url)
    assert load(third.namespace(LAYOUT), PROMPT[:8]) == 8


def killed(*_: Any) -> Any:
    raise RuntimeError("killed")


def test_pages_that_left_the_arena_before_their_turn_are_counted(
    start_server: Callable[..., Any], open_node: Callable[..., Client]
) -> None:
    redis = start_server()
    first = open_node("first", redis.url, disk_limit="0")
    ours = first.namespace(LAYOUT)
    redis.pause()  # the write under way hangs until its deadline
    stored = 0
    for start in range(0, 400, 8):
        batch = [hashlib.sha256(b"burst %d" % number).digest() for number in range(start, start + 8)]
        stored += store(ours, batch)
    redis.resume()
    first.flush()
    counts = counters(first, "arena")
    assert counts["shared"] + counts["unshared"] == stored
    assert counts["unshared"] > 0
