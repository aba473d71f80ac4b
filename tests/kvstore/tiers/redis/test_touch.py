"""Pages that are used in faster tiers count as used here, and what has gone is told."""

from __future__ import annotations

from collections.abc import Callable

from made_pages import make_page, read_pages
from redis_servers import Cluster, RedisServer

from kvstore.tiers.redis import RedisTier

MIB = 1 << 20
Open = Callable[..., RedisTier]


def test_what_is_touched_outlives_what_is_not(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, 16 * MIB)
    old, hot = make_page(1, MIB), make_page(2, MIB)
    tier.write([old])
    tier.write([hot])
    for number in range(10, 30):
        assert tier.touch([hot.key]) == [True]
        tier.write([make_page(number, MIB)])
    assert read_pages(tier, [hot, old]) == [True, False]


def test_the_head_of_what_is_touched_outlives_its_tail(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, 16 * MIB)
    prompt = [make_page(n, 2 * MIB) for n in range(6)]
    assert all(tier.write(prompt))
    assert all(tier.touch([page.key for page in prompt]))
    tier.write([make_page(n, 2 * MIB) for n in range(100, 103)])
    found = read_pages(tier, prompt)
    assert found == sorted(found, reverse=True)
    assert True in found
    assert False in found


def test_what_is_gone_is_told(cluster: Cluster, open_redis: Open) -> None:
    tier = open_redis(cluster.url, 64 * MIB)
    pages = [make_page(n, 50_000) for n in range(20)]
    keys = [page.key for page in pages]
    assert tier.touch(keys) == [False] * 20
    assert all(tier.write(pages[:10]))
    assert tier.touch(keys) == [True] * 10 + [False] * 10
    assert tier.remove(keys[3:5]) == 2
    assert tier.touch(keys) == [True] * 3 + [False] * 2 + [True] * 5 + [False] * 10
    for name in cluster.client.scan_iter(match="kvstore:{*}:chunk:*"):
        cluster.client.delete(name)
    assert tier.touch(keys) == [False] * 20, "their chunks have gone"
    assert all(tier.write(pages))
    assert tier.touch(keys) == [True] * 20
    assert tier.touch([]) == []


def test_what_nobody_can_tell_of_counts_as_here(start_server: Callable[..., RedisServer], open_redis: Open) -> None:
    server = start_server()
    tier = open_redis(server.url, 64 * MIB)
    pages = [make_page(n, 50_000) for n in range(4)]
    assert all(tier.write(pages))
    server.kill()
    assert tier.touch([page.key for page in pages]) == [True] * 4


def test_what_is_touched_lives_on(cluster: Cluster, open_redis: Open) -> None:
    tier = open_redis(cluster.url, 64 * MIB, time_to_live=1000.0)
    pages = [make_page(n, 900_000) for n in range(4)]
    assert all(tier.write(pages))
    names = [*cluster.client.scan_iter(match="kvstore:page:*"), *cluster.client.scan_iter(match="kvstore:{*}:chunk:*")]
    for name in names:
        assert cluster.client.pttl(name) > 0
        cluster.client.pexpire(name, 500_000)
    assert all(tier.touch([page.key for page in pages]))
    for name in names:
        assert cluster.client.pttl(name) > 900_000
