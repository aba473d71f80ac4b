"""Large calls are cut to fit their deadlines, and a deadline that passed elsewhere is not the server's failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from made_pages import make_page
from redis_servers import Cluster, RedisServer, servers_of, set_timeout

from kvstore.breaker import State
from kvstore.errors import DeadlineError, UnavailableError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.server import MOST_CONNECTIONS, Server
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
LIMIT = 256 * MIB
PING = [Request(0, [b"PING"])]
Open = Callable[..., RedisTier]


def pages(count: int, length: int = 100) -> list[PageWrite]:
    return [make_page(number, length) for number in range(count)]


def absent(count: int) -> list[bytes]:
    return [bytes(32) + b"absent--" + number.to_bytes(24, "big") for number in range(count)]


def node_of(tier: RedisTier) -> Server:
    [node] = servers_of(tier)
    return node


def soon() -> float:
    return time.monotonic() + 60


@contextmanager
def all_links_in_use(node: Server, server: RedisServer) -> Iterator[None]:
    """All connections are open, and each waits for a reply."""
    asleep = [Request(0, [b"BLPOP", b"kvstore:nothing", b"0"])]
    with ThreadPoolExecutor(MOST_CONNECTIONS) as threads:
        calls = [threads.submit(node.exchange, asleep, soon(), writing=False) for _ in range(MOST_CONNECTIONS)]
        try:
            end = soon()
            while server.client.info("clients")["blocked_clients"] < MOST_CONNECTIONS:
                assert time.monotonic() < end
            yield
        finally:
            server.client.rpush("kvstore:nothing", *[b"x"] * MOST_CONNECTIONS)
            for call in calls:
                call.result()


def test_a_lookup_that_has_no_time_for_all_keeps_its_head(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large, and again and again: what was told in time counts, and the server is not to blame."""
    tier = open_redis(server.url, LIMIT)
    stored = pages(3000)
    assert all(tier.write(stored))
    keys = [page.key for page in stored] + absent(40_000)
    assert tier.contains(keys) == [True] * 3000 + [False] * 40_000
    real = tier._entries.find
    asked = [0]
    shift = [0.0]

    def find(batch: Any, deadline: float) -> Any:
        """The second batch takes all the time but a little, by the tier's clock; the server has as much as it needs."""
        asked[0] += 1
        answer = real(batch, soon())
        if asked[0] == 2:
            shift[0] += deadline - clock.monotonic() - 1.0
        return answer

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + shift[0])
    monkeypatch.setattr("kvstore.tiers.redis.tier.time", clock)
    monkeypatch.setattr(tier._entries, "find", find)
    tier._lookup_timeout = 1000.0
    for _ in range(4):
        asked[0] = 0
        found = tier.contains(keys)
        assert found[:2048] == [True] * 2048
        assert not any(found[2048:])
        assert asked[0] == 2, "a third batch would be late"
    assert tier.statistics().late == 4 * (43_000 - 2048)
    assert node_of(tier).breaker.state is State.CLOSED
    assert tier.write(pages(4)) == [True] * 4


def test_a_lookup_in_a_real_deadline_harms_nobody(server: RedisServer, open_redis: Open) -> None:
    """In half of the time that it needs: whatever of a huge lookup is told, others go on as before."""
    tier = open_redis(server.url, LIMIT, pause=1000.0)
    stored = pages(2000)
    assert all(tier.write(stored))
    keys = [page.key for page in stored] + absent(100_000)
    began = time.monotonic()
    assert tier.contains(keys)[:2000] == [True] * 2000
    tier._lookup_timeout = (time.monotonic() - began) / 2
    for _ in range(5):
        found = tier.contains(keys)
        told = found.count(True)
        assert found == [True] * told + [False] * (len(keys) - told)
    tier._lookup_timeout = 20.0
    assert tier.contains([page.key for page in stored[:5]]) == [True] * 5
    assert tier.write(pages(3)) == [True] * 3


def test_a_large_touch_reaches_every_page(cluster: Cluster, open_redis: Open) -> None:
    tier = open_redis(cluster.url, LIMIT, lookup_timeout=0.001, pause=1000.0)
    stored = pages(5000)
    assert all(tier.write(stored))
    names = [*cluster.client.scan_iter(match="kvstore:page:*")]
    assert len(names) == 5000
    for name in names[::100]:
        cluster.client.pexpire(name, 1000_000)
    keys = [page.key for page in stored]
    assert tier.touch(keys[:2500] + absent(2000) + keys[2500:]) == [True] * 2500 + [False] * 2000 + [True] * 2500
    assert all(cluster.client.pttl(name) > 1000_000 for name in names[::100])


def test_the_head_of_a_large_touch_outlives_its_tail(server: RedisServer, open_redis: Open) -> None:
    """Though it goes in several requests."""
    tier = open_redis(server.url, 9 * MIB)
    first, last = make_page(1, MIB), make_page(2, MIB)
    assert tier.write([first]) == tier.write([last]) == [True]
    assert tier.touch([first.key, *absent(5000), last.key]) == [True] + [False] * 5000 + [True]
    nonces = server.client.zrange("kvstore:{0}:order", 0, -1)
    entry = server.client.get(b"kvstore:page:" + first.key)
    assert nonces[-1] == entry[5:21]


def test_a_touch_of_a_server_that_is_away_ends_soon(
    start_server: Callable[..., RedisServer], open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    tier = open_redis(server.url, LIMIT, pause=1000.0)
    assert tier.touch(absent(1)) == [False]
    server.pause()
    set_timeout(tier, 0.1)
    real = tier._entries.seen
    calls = []

    def seen(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(tier._entries, "seen", seen)
    assert tier.touch(absent(60_000)) == [True] * 60_000
    assert len(calls) == 1
    server.resume()


def test_a_deadline_that_is_over_is_not_the_servers_failure(server: RedisServer, open_redis: Open) -> None:
    node = node_of(open_redis(server.url, LIMIT, pause=1000.0))
    assert node.exchange(PING, soon(), writing=False) == [b"PONG"]
    clients = {client["id"] for client in server.client.client_list()}
    for _ in range(10):
        with pytest.raises(DeadlineError, match="not asked"):
            node.exchange(PING, time.monotonic() - 1, writing=False)
    assert node.exchange(PING, soon(), writing=False) == [b"PONG"]
    assert clients <= {client["id"] for client in server.client.client_list()}, "a good connection was dropped"


def test_a_wait_for_our_own_connections_is_not_the_servers_failure(server: RedisServer, open_redis: Open) -> None:
    node = node_of(open_redis(server.url, LIMIT, pause=1000.0, refresh=1000.0))
    assert node.exchange(PING, soon(), writing=False) == [b"PONG"]
    with all_links_in_use(node, server):
        for _ in range(10):
            with pytest.raises(DeadlineError, match="in use"):
                node.exchange(PING, time.monotonic() + 0.05, writing=False)
        assert node.breaker.state is State.CLOSED
    assert node.exchange(PING, soon(), writing=False) == [b"PONG"]


def test_a_server_that_had_no_time_is_not_blamed_and_one_that_had_is(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    server = start_server()
    node = node_of(open_redis(server.url, LIMIT, pause=1000.0, refresh=1000.0))
    assert node.exchange(PING, soon(), writing=False) == [b"PONG"]
    server.pause()
    for _ in range(10):
        with pytest.raises(DeadlineError):
            node.exchange(PING, time.monotonic() + 0.001, writing=False)
    assert node.breaker.state is State.CLOSED

    def blamed() -> bool:
        with pytest.raises((DeadlineError, UnavailableError)):  # or it is left alone already
            node.exchange(PING, time.monotonic() + 0.05, writing=False)
        return node.breaker.state is not State.CLOSED

    eventually(blamed)
    server.resume()
