"""Pages that are damaged in Redis, or between a node and an engine on another host: they are computed, and counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
from faulty_proxy import Proxy
from node_process import NodeProcess
from redis_servers import RedisServer

import kvstore
from kvstore.layout import Layout
from tests.vllm.engine import BLOCK_SIZE, PATIENT, transfer_config


def damage_chunks(server: RedisServer) -> int:
    """Flip a bit of one page in each chunk that a Redis server has. Returns how many there are."""
    found = 0
    for name in server.client.keys("kvstore:*:chunk:*:0"):
        value = bytearray(server.client.get(name))
        value[-len(value) // 4] ^= 0x40
        server.client.set(name, bytes(value), keepttl=True)
        found += 1
    return found


def test_pages_that_were_damaged_in_redis_are_computed(
    node_process: Callable[..., NodeProcess],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    tmp_path: Any,
) -> None:
    server = RedisServer(tmp_path / "redis")
    try:
        node = node_process(arena="64MiB", disk=None, disk_limit="0", redis=server.url, redis_limit="64MiB")
        prompts = [prompt(200, seed) for seed in range(4)]
        expected = plain(prompts).tokens
        with start_engine(transfer=transfer_config(node.url, **PATIENT)) as first:
            assert first.run(prompts).tokens == expected
            first.drain()
        with kvstore.connect(node.url, timeout=60.0) as client:
            client.flush()
            assert client.status().tier("redis").pages == 4 * 6
        assert node.terminate() == 0
        shutil.rmtree(node.arena_folder)  # what it has now is in Redis alone
        damaged = damage_chunks(server)
        assert damaged > 0
        node.start()
        with start_engine(transfer=transfer_config(node.url, **PATIENT)) as second:
            again = second.run(prompts, concurrency=1)
            assert again.tokens == expected
            assert again.counters['vllm:kvstore_pages_loaded{"tier": "redis"}'] > 0
            assert again.counters["vllm:kvstore_pages_not_loaded"] > 0
            second.drain()
            assert second.state()["blocks_in_use"] == 0
        with kvstore.connect(node.url, timeout=60.0) as client:
            assert 0 < client.status().tier("redis").counters["corrupt"] <= damaged
    finally:
        server.close()


class DamageOf:
    """Flips a bit of this page wherever it comes by, and leaves what is said about it alone."""

    def __init__(self, page: bytes) -> None:
        # Its bytes come in pieces: any of these is enough. (Shorter ones, of a single token, are in other pages too.)
        self._needles = [page[at : at + 512] for at in range(0, len(page), 1024)]
        self.count = 0

    def __call__(self, data: bytearray) -> None:
        at = next((at for at in map(data.find, self._needles) if at >= 0), -1)
        if at >= 0:
            data[at] ^= 0x40
            self.count += 1


def page_of(node: NodeProcess, tokens: list[int], place: int) -> bytes:
    """The page of a prompt's block."""
    with kvstore.connect(node.url, timeout=60.0) as client:
        (known,) = client.status().namespaces
        layout = Layout.from_json(known.layout)
        page = np.empty(layout.page_bytes, np.uint8)
        hashes = kvstore.hash_blocks(tokens, BLOCK_SIZE)
        assert client.namespace(layout).load(hashes[place : place + 1], page) == 1
    return page.tobytes()


def test_a_page_that_is_damaged_on_the_wire_is_computed(
    node: NodeProcess,
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(200, seed) for seed in range(3)]
    expected = plain(prompts).tokens
    with start_engine(transfer=transfer) as first:
        assert first.run(prompts).tokens == expected
        first.drain()
    damage = DamageOf(page_of(node, prompts[0], 2))
    # On another of this machine's addresses, with the node's own ports: a client asks the node for its second one.
    proxies = [Proxy(port, ("127.0.0.2", port)) for port in (node.port, node.bulk_port)]
    try:
        for proxy in proxies:
            proxy.garble = damage
        with start_engine(transfer=transfer_config(f"kv://127.0.0.2:{node.port}", **PATIENT)) as second:
            hit = second.run(prompts[:1])
            assert hit.tokens == expected[:1]
            assert damage.count > 0
            assert hit.counters["vllm:kvstore_pages_not_loaded"] == 6 - 2
            assert hit.counters['vllm:kvstore_pages_loaded{"tier": "arena"}'] == 2
            assert second.run(prompts[1:], concurrency=1).tokens == expected[1:]
            second.drain()
            assert second.state()["blocks_in_use"] == 0
    finally:
        for proxy in proxies:
            proxy.close()
