"""What many nodes ask of one Redis by themselves: that grows as nodes and as buckets, never as their product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from made_pages import make_page, read_pages
from redis_servers import RedisServer, servers_of, wait_until

from kvstore.errors import FormatError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format.summary import Usage, decode, encode

Open = Callable[..., RedisTier]
LIMIT = 640 << 20
BUCKETS = 16
NODES = 12


def calls(server: RedisServer, command: str) -> int:
    found = server.client.info("commandstats").get(f"cmdstat_{command}")
    return int(found["calls"]) if found else 0


def knows_all(tier: RedisTier) -> bool:
    return all(tier._buckets.accounting.knows(bucket) for bucket in range(BUCKETS))


def test_one_of_many_nodes_asks_the_buckets_and_all_know(server: RedisServer, open_redis: Open) -> None:
    writer = open_redis(server.url, LIMIT, refresh=1000.0)
    pages = [make_page(number, 200_000) for number in range(30)]
    assert all(writer.write(pages))
    wait_until(lambda: knows_all(writer))
    writer._refresher.close()
    for name in server.client.scan_iter(match="kvstore:summary:*"):
        server.client.delete(name)
    server.client.config_resetstat()
    tiers = [open_redis(server.url, LIMIT, refresh=1000.0) for _ in range(NODES)]
    wait_until(lambda: all(map(knows_all, tiers)))
    assert calls(server, "hgetall") == BUCKETS
    said = {(tier.statistics().used_bytes, tier.statistics().pages, tier.used_by(pages[0].key[:32])) for tier in tiers}
    assert said == {(writer.statistics().used_bytes, 30, writer.statistics().used_bytes)}


def test_who_died_while_he_asked_is_followed_by_the_next(server: RedisServer, open_redis: Open) -> None:
    writer = open_redis(server.url, LIMIT, refresh=1000.0)
    assert writer.write([make_page(1, 200_000)]) == [True]
    wait_until(lambda: knows_all(writer))
    writer._refresher.close()
    server.client.set(f"kvstore:summary:{BUCKETS}:0", b"", px=300)
    tier = open_redis(server.url, LIMIT, refresh=1000.0)
    wait_until(lambda: knows_all(tier))
    assert tier.statistics().pages == 1


@pytest.mark.parametrize("value", [b"hello", b"\x02\x00\x00", b"\x01\x00\x00", b"\x01\xff\xff" + bytes(99)])
def test_a_foreign_summary_says_nothing_and_leaves(server: RedisServer, open_redis: Open, value: bytes) -> None:
    with pytest.raises(FormatError, match="summary"):
        decode(value, BUCKETS)
    server.client.set(f"kvstore:summary:{BUCKETS}:0", value, px=300)
    tier = open_redis(server.url, LIMIT, refresh=0.2)
    wait_until(lambda: knows_all(tier))


def test_a_summary_says_what_was_put_in() -> None:
    usages = [Usage(5, 2, {b"a" * 32: 3, b"b" * 32: 2}), Usage(), Usage(1 << 40, 1 << 20, {b"b" * 32: 1 << 40})]
    assert decode(encode(usages), 3) == usages


def test_what_this_node_changed_is_newer_than_a_summary(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, LIMIT, refresh=1000.0)
    wait_until(lambda: knows_all(tier))
    assert tier.write([make_page(1, 200_000)]) == [True]
    used = tier.statistics().used_bytes
    assert used > 0
    tier._buckets.refresh(20.0)  # the summary is of before
    assert tier.statistics().used_bytes == used


def test_scripts_are_loaded_once_a_server(server: RedisServer, open_redis: Open) -> None:
    server.client.script_flush()
    server.client.config_resetstat()
    page = make_page(1, 200_000)
    for _ in range(NODES):
        tier = open_redis(server.url, LIMIT, refresh=1000.0)
        assert tier.write([page]) == [True]
        wait_until(lambda tier=tier: knows_all(tier))
    assert calls(server, "script|load") == 10
    assert calls(server, "script|exists") == NODES
    server.client.script_flush()
    tier.write([page])  # what was asked of a server that lost them is lost
    assert read_pages(tier, [page]) == [True]
    assert calls(server, "script|load") == 20


def test_nodes_that_lost_a_server_come_back_at_times_of_their_own(server: RedisServer, open_redis: Open) -> None:
    tiers = [open_redis(server.url, LIMIT, refresh=1000.0, pause=1.0) for _ in range(NODES)]
    pauses = {each.breaker._first_pause for tier in tiers for each in servers_of(tier)}
    assert len(pauses) == NODES
    assert all(0.5 <= pause <= 1.0 for pause in pauses)
