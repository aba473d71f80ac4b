"""Readers take turns at a server: one that asks for much keeps another waiting for one exchange, and no longer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import pytest
from made_pages import make_page
from redis_servers import Cluster, RedisServer, servers_of, wait_until

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.net import server as server_module
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.server import MOST_CONNECTIONS
from kvstore.tiers.redis.net.threads import ServerThreads
from kvstore.tiers.tier import READER

LIMIT = 256 << 20
PATIENCE = 60.0


def test_at_its_connections(
    server: RedisServer, open_redis: Callable[..., RedisTier], eventually: Callable[..., None]
) -> None:
    tier = open_redis(server.url, LIMIT, refresh=1000.0)
    tier._refresher.close()
    [node] = servers_of(tier)
    deadline = time.monotonic() + PATIENCE

    def ask(who: Hashable, *arguments: bytes) -> None:
        READER.set(who)
        node.exchange([Request(0, arguments)], deadline, writing=False)

    with ThreadPoolExecutor(MOST_CONNECTIONS + 13) as threads:
        held = [b"held%d" % number for number in range(MOST_CONNECTIONS)]
        calls = [threads.submit(ask, "flood", b"BLPOP", name, b"0") for name in held]
        eventually(lambda: server.client.info("clients")["blocked_clients"] == MOST_CONNECTIONS)
        calls += [threads.submit(ask, "flood", b"RPUSH", b"order", b"flood") for _ in range(12)]
        eventually(lambda: len(node._waiting) == 12)
        calls.append(threads.submit(ask, "own", b"RPUSH", b"order", b"own"))
        eventually(lambda: len(node._waiting) == 13)
        for name in held:  # the first one's connection serves most of them, or all
            server.client.rpush(name, b"1")
            calls[-1].result(PATIENCE)
        for call in calls:
            call.result(PATIENCE)
    assert server.client.lrange("order", 0, 1) == [b"flood", b"own"]
    assert server.client.llen("order") == 13
    assert not node._waiting
    assert not node._turns
    assert node._connected == MOST_CONNECTIONS == len(node._idle)


def test_connections_that_nobody_uses_any_more_are_closed(
    cluster: Cluster, open_redis: Callable[..., RedisTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the servers' own lists: eight at most while many ask, and one when the rush is over."""
    before = {server.port: len(server.client.client_list()) for server in cluster.primaries()}
    tier = open_redis(cluster.url, LIMIT, refresh=1000.0)
    tier._refresher.close()

    def opened() -> list[int]:
        return [len(server.client.client_list()) - before[server.port] for server in cluster.primaries()]

    pages = [make_page(number, 1000) for number in range(64)]
    keys = [page.key for page in pages]
    assert all(tier.write(pages))
    together = threading.Barrier(3 * MOST_CONNECTIONS)

    def ask(_: int) -> list[bool]:
        together.wait(PATIENCE)
        return [here for _ in range(20) for here in tier.contains(keys)]

    with ThreadPoolExecutor(3 * MOST_CONNECTIONS) as threads:
        assert all(map(all, threads.map(ask, range(3 * MOST_CONNECTIONS))))
    manager = 1  # redis-py's own, by which it learns where slots are
    assert all(most <= MOST_CONNECTIONS + manager for most in opened())
    assert max(opened()) > 1 + manager
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.0)
    assert all(tier.contains(keys))
    wait_until(lambda: max(opened()) <= 1 + manager)
    assert [node._connected for node in servers_of(tier)] == [1, 1, 1]
    assert all(tier.contains(keys)), "the one that is left serves"


def test_whoever_gave_up_is_passed_over(
    server: RedisServer, open_redis: Callable[..., RedisTier], eventually: Callable[..., None]
) -> None:
    tier = open_redis(server.url, LIMIT, refresh=1000.0)
    tier._refresher.close()
    [node] = servers_of(tier)
    connections = [node._take(time.monotonic() + PATIENCE) for _ in range(MOST_CONNECTIONS)]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(node._take, time.monotonic() + PATIENCE)
        eventually(lambda: len(node._waiting) == 1)
        for _ in range(3):
            assert node._take(time.monotonic()) is None
        second = threads.submit(node._take, time.monotonic() + PATIENCE)
        eventually(lambda: len(node._waiting) == 2)
        for connection, waiting in zip(connections, (first, second), strict=False):
            node._put_back(connection)
            assert waiting.result(PATIENCE) is connection
    assert not node._turns
    for connection in connections:
        node._put_back(connection)


def test_at_the_threads_that_wait_for_one_of_several_servers() -> None:
    waiters = ServerThreads(1, "test")
    begun, go_on = threading.Event(), threading.Event()
    order: list[Hashable] = []

    def first() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    tasks = [waiters.start(first)]
    assert begun.wait(PATIENCE)
    for who in ("flood", "flood", "flood", "own"):
        token = READER.set(who)
        tasks.append(waiters.start(lambda: order.append(READER.get())))
        READER.reset(token)
    go_on.set()
    for task in tasks:
        task.end(time.monotonic() + PATIENCE)
    waiters.close()
    assert order == ["flood", "own", "flood", "flood"]
