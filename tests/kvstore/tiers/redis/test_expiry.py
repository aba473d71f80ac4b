"""A namespace leaves Redis when no node has used it for long, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from faulty_proxy import Proxy
from made_pages import make_page_of, read_pages
from redis_recount import Recount
from redis_servers import Cluster, RedisServer
from tiny_stores import found_pages, kill_store, layout_of, load_pages, page_hashes, put_pages

import kvstore.namespaces.registry
import kvstore.store.orphans
from kvstore.arena.arena import Arena
from kvstore.errors import ResourceError
from kvstore.events.ring import EventRing
from kvstore.store.store import Store
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.buckets import CLOCKS
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.clocks import Clocks
from kvstore.tiers.redis.net.topology import NO_ANSWER

LIMIT = 128 << 20
DAY = 86400.0
FRAME = 4096
NEVER = threading.Event()
Open = Callable[..., RedisTier]
KINDS = pytest.mark.parametrize("kind", ["server", "cluster"])


@pytest.fixture
def servers(request: pytest.FixtureRequest, kind: str) -> tuple[str, list[Any]]:
    """Where Redis is, and the servers that have slots."""
    one = request.getfixturevalue(kind)
    return one.url, one.primaries() if kind == "cluster" else [one]


def age(servers: list[Any], seconds: float) -> None:
    """Whatever is in Redis was used so much longer ago."""
    for server in servers:
        for order in server.client.scan_iter(match="kvstore:{*}:order*"):
            for chunk, _ in server.client.zscan_iter(order):
                server.client.zincrby(order, -seconds * 1e6, chunk)


@KINDS
def test_what_any_node_has_used_stays_and_the_rest_leaves_whole(
    servers: Any, open_redis: Open, recount: Callable[..., Recount], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.redis.buckets.EXPIRED_AT_ONCE", 2)
    url, primaries = servers
    idle, busy = open_redis(url, LIMIT), open_redis(url, LIMIT)
    old = [make_page_of(1, number, 700_000) for number in range(40)]
    other = [make_page_of(2, number, 300_000) for number in range(4)]
    assert all(idle.write(old + other))
    namespace = old[0].key[:32]
    assert idle.expire(namespace, DAY, NEVER) is None
    age(primaries, 2 * DAY)
    busy.touch([old[7].key])
    assert idle.expire(namespace, DAY, NEVER) is None
    assert idle.contains([page.key for page in old]) == [True] * 40, "one that is used keeps all of them"
    age(primaries, 2 * DAY)
    assert idle.expire(namespace, DAY, NEVER) == 40
    assert busy.contains([page.key for page in old + other]) == [False] * 40 + [True] * 4
    counted = recount(*primaries, budget=LIMIT)
    counted.check_entries()
    assert set(counted.by_namespace) == {other[0].key[:32]}
    assert not [name for one in primaries for name in one.client.scan_iter(match=b"kvstore:{*}:order:" + namespace)]
    assert idle.expire(namespace, DAY, NEVER) == 0
    assert all(busy.write(old[:3]))
    assert all(read_pages(idle, old[:3]))


def test_a_look_at_what_others_use_asks_few_buckets(server: RedisServer, open_redis: Open) -> None:
    """Every node looks each minute at what it has not used itself: of 16,384 buckets it need not ask all."""
    tier = open_redis(server.url, 64 << 30, refresh=1000.0)
    tier._refresher.close()
    buckets = tier._buckets._own_number
    assert buckets > 1500
    for number in range(1000):  # a chunk for each
        assert tier.write([make_page_of(1, number, 100)]) == [True]
    namespace = make_page_of(1, 0, 100).key[:32]
    server.client.config_resetstat()
    assert tier.expire(namespace, DAY, NEVER) is None
    asked = server.client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert 0 < asked <= 2 * CLOCKS
    age([server], 2 * DAY)
    server.client.config_resetstat()
    assert tier.expire(namespace, DAY, NEVER) == 1000
    assert server.client.info("commandstats")["cmdstat_evalsha"]["calls"] >= buckets, "before it goes, all are asked"


class Asked:
    """How many scripts a server runs for some look of a node whether a namespace is in use."""

    def __init__(self, server: RedisServer, tier: RedisTier, namespace: bytes) -> None:
        self.server = server
        self.tier = tier
        self.namespace = namespace
        self.left: int | None = None
        """What the last look dropped."""

    def look(self) -> int:
        self.server.client.config_resetstat()
        self.left = self.tier.expire(self.namespace, DAY, NEVER)
        return int(self.server.client.info("commandstats")["cmdstat_evalsha"]["calls"])


def open_large(server: RedisServer, open_redis: Open) -> RedisTier:
    """A tier of many buckets that looks only when it is told to."""
    tier = open_redis(server.url, 64 << 30, refresh=1000.0)
    tier._refresher.close()
    assert tier._buckets._own_number > 1500
    return tier


def learn(server: RedisServer, tier: RedisTier) -> None:
    """What all nodes have there, as a node asks for it every few seconds."""
    for name in server.client.scan_iter(match="kvstore:summary:*"):
        server.client.delete(name)
    assert tier._buckets.refresh(20.0)


@pytest.mark.parametrize("knows", [True, False])
def test_a_look_at_a_namespace_of_one_chunk_asks_few_buckets(
    server: RedisServer, open_redis: Open, knows: bool
) -> None:
    """Summaries tell a node where others have it; and where it was in use once it is asked first from then on."""
    busy, idle = open_large(server, open_redis), open_large(server, open_redis)
    buckets = busy._buckets._own_number
    few = range(0, buckets, buckets // CLOCKS)
    pages = (make_page_of(1, number, 100) for number in range(100))
    page = next(page for page in pages if busy._buckets.share_of(page.key[:32]).bucket_of(page.key) not in few)
    assert busy.write([page]) == [True]
    if knows:
        learn(server, idle)
    asked = Asked(server, idle, page.key[:32])
    first = asked.look()
    assert asked.left is None
    assert first == 1 if knows else first > CLOCKS, "where nothing is known, all may have to be asked"
    assert asked.look() == 1
    assert asked.left is None
    age([server], 2 * DAY)
    assert asked.look() >= buckets, "before it goes, all are asked"
    assert asked.left == 1


def test_one_chunk_in_use_among_many_that_are_not_is_looked_for_once(server: RedisServer, open_redis: Open) -> None:
    busy, idle = open_large(server, open_redis), open_large(server, open_redis)
    parent = make_page_of(1, 1000, 100).key  # is not there: so each is a chunk by itself
    pages = [make_page_of(1, number, 100)._replace(parent=parent) for number in range(200)]
    assert all(busy.write(pages))
    age([server], 2 * DAY)
    busy.touch([pages[77].key])
    learn(server, idle)
    asked = Asked(server, idle, pages[0].key[:32])
    holding = len(idle._buckets.accounting.buckets_of(asked.namespace))
    assert holding > 100
    assert 1 < asked.look() <= holding
    assert asked.left is None
    assert asked.look() == 1
    assert asked.left is None
    age([server], 2 * DAY)
    busy.touch([pages[150].key])
    assert 1 < asked.look() <= holding
    assert asked.left is None
    assert asked.look() == 1
    assert asked.left is None


def test_behind_a_jump_of_clocks_few_buckets_are_asked(server: RedisServer, open_redis: Open) -> None:
    """All looks unused, and stays, until it has been so for long since: each minute."""
    tier = open_large(server, open_redis)
    assert tier.write([make_page_of(1, 0, 100)]) == [True]
    tier._expirer.look_at_clocks()
    age([server], 2 * DAY)
    for each in tier._expirer._clocks._ahead:
        tier._expirer._clocks._ahead[each] -= 2 * DAY
    tier._expirer.look_at_clocks()
    asked = Asked(server, tier, make_page_of(1, 0, 100).key[:32])
    assert asked.look() == 1
    assert asked.left is None


def test_what_others_use_where_this_node_knows_of_nothing_stays(server: RedisServer, open_redis: Open) -> None:
    """What is known of buckets may be old: it says where to ask first, never that nobody uses anything elsewhere."""
    busy, idle = open_large(server, open_redis), open_large(server, open_redis)
    old, new = make_page_of(1, 1, 100), make_page_of(1, 2, 100)
    assert busy.write([old]) == [True]
    age([server], 2 * DAY)
    learn(server, idle)
    assert busy.write([new]) == [True]
    assert len(idle._buckets.accounting.buckets_of(old.key[:32])) == 1
    assert idle.expire(old.key[:32], DAY, NEVER) is None
    assert busy.contains([old.key, new.key]) == [True, True]


@KINDS
def test_what_is_used_while_the_rest_leaves_stays(
    servers: Any, open_redis: Open, recount: Callable[..., Recount], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, primaries = servers
    idle, busy = open_redis(url, LIMIT), open_redis(url, LIMIT)
    pages = [make_page_of(1, number, 900_000) for number in range(40)]
    assert all(idle.write(pages))
    age(primaries, 2 * DAY)
    real = idle._buckets.expiry

    def expiry(*arguments: Any) -> Any:
        busy.touch([page.key for page in pages[:2]])
        return real(*arguments)

    monkeypatch.setattr(idle._buckets, "expiry", expiry)
    gone = idle.expire(pages[0].key[:32], DAY, NEVER)
    assert gone is not None
    assert gone >= 36
    assert read_pages(busy, pages[:2]) == [True] * 2
    assert sum(busy.contains([page.key for page in pages])) == 40 - gone
    recount(*primaries, budget=LIMIT).check_entries()


@pytest.mark.parametrize(("script", "left"), [(scripts.IDLE, 40), (scripts.EXPIRE, 0)])
def test_silence_of_one_server_is_told_and_the_next_time_finds_what_is_left(
    cluster: Cluster,
    open_redis: Open,
    recount: Callable[..., Recount],
    monkeypatch: pytest.MonkeyPatch,
    script: bytes,
    left: int,
) -> None:
    tier, other = open_redis(cluster.url, LIMIT), open_redis(cluster.url, LIMIT)
    pages = [make_page_of(1, number, 700_000) for number in range(40)]
    assert all(tier.write(pages))
    age(cluster.primaries(), 2 * DAY)
    real = tier._topology.exchange

    def exchange(requests: Any, deadline: float, **options: Any) -> Any:
        replies = real(requests, deadline, **options)
        return [
            NO_ANSWER if script in request.arguments[1:2] and place == 0 else reply
            for place, (request, reply) in enumerate(zip(requests, replies, strict=True))
        ]

    with monkeypatch.context() as silence:
        silence.setattr(tier._topology, "exchange", exchange)
        with pytest.raises(ResourceError, match="not every server"):
            tier.expire(pages[0].key[:32], DAY, NEVER)
    if script == scripts.IDLE:
        assert other.contains([page.key for page in pages]) == [True] * 40, "nobody knows, so nothing leaves"
    assert tier.expire(pages[0].key[:32], DAY, NEVER) == left
    assert not recount(*cluster.primaries(), budget=LIMIT).chunks


def test_a_node_that_stops_does_not_wait_until_all_of_it_has_left(
    server: RedisServer, open_redis: Open, recount: Callable[..., Recount], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.redis.buckets.EXPIRED_AT_ONCE", 1)
    tier = open_redis(server.url, LIMIT)
    pages = [make_page_of(1, number, 700_000) for number in range(40)]
    assert all(tier.write(pages))
    age([server], 2 * DAY)
    real, stop = tier._buckets.expiry, threading.Event()

    def expiry(*arguments: Any) -> Any:
        stop.set()
        return real(*arguments)

    monkeypatch.setattr(tier._buckets, "expiry", expiry)
    events = EventRing()
    reader = events.reader()
    tier.tell(events)
    with pytest.raises(ResourceError, match="still"):
        tier.expire(pages[0].key[:32], DAY, stop)
    here = tier.contains([page.key for page in pages])
    assert any(here)
    told, _ = reader.read(100, 0.0)
    gone = {page.key[32:] for page, there in zip(pages, here, strict=True) if not there}
    assert {block_hash for event in told for block_hash in event.hashes} == gone != set(), "also what left before"
    reader.close()
    recount(server, budget=LIMIT).check_entries()
    assert tier.expire(pages[0].key[:32], DAY, NEVER)
    assert not recount(server, budget=LIMIT).chunks


@KINDS
def test_a_clock_that_jumps_ahead_makes_nothing_old(
    servers: Any, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    url, primaries = servers
    tier = open_redis(url, LIMIT)
    pages = [make_page_of(1, number, 700_000) for number in range(20)]
    assert all(tier.write(pages))
    namespace, clocks = pages[0].key[:32], tier._expirer._clocks
    assert tier.expire(namespace, DAY, NEVER) is None
    age(primaries, 2 * DAY)
    with tier._expirer._looking:
        for server in clocks._ahead:
            clocks._ahead[server] -= 2 * DAY
    assert tier.expire(namespace, DAY, NEVER) is None
    assert tier.contains([page.key for page in pages]) == [True] * 20
    assert caplog.text.count("Redis' clock went ahead by ") == 1
    assert clocks._jumped is not None
    clocks._jumped -= 2 * DAY
    assert tier.expire(namespace, DAY, NEVER) == 20


def test_what_nobody_may_have_used_counts_from_a_jump_on(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    clocks.saw(0, 5000.0, 10.0)
    clocks.saw(1, 9000.0, 10.0)
    clocks.saw(0, 5107.0, 110.0)
    clocks.saw(1, 2000.0, 111.0)
    assert clocks.idle(400.0, 111.0) == 400.0, "neither late answers, nor a clock that goes back"
    clocks.saw(1, 2000.0 + 100.0 + 61.0, 211.0)
    assert [clocks.idle(said, 251.0) for said in (39.0, 400.0)] == [39.0, 40.0]
    clocks.saw(0, 9000.0, 212.0)
    assert clocks.idle(400.0, 251.0) == 39.0
    assert len(caplog.records) == 1, "of two servers at once it is told once"


@pytest.fixture
def open_nodes(shm: Path, open_redis: Open) -> Iterator[Callable[[str], list[Store]]]:
    """Two nodes' stores with a shared tier each."""
    stores: list[Store] = []

    def start(url: str) -> list[Store]:
        for name in ("a", "b"):
            arena = Arena(shm / name, 64 * FRAME)
            stores.append(Store(arena, [], [shm / name], shared=open_redis(url, LIMIT, timeout=5.0), life=DAY))
        return stores

    yield start
    for store in stores:
        store.arena.close()


@KINDS
def test_a_node_that_is_idle_leaves_to_others_what_they_use(
    servers: Any, open_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, primaries = servers
    clock = FakeClock()
    monkeypatch.setattr(kvstore.namespaces.registry, "time", clock)
    a, b = open_nodes(url)
    known, _ = [store.open_namespace(layout_of("old", FRAME)) for store in (a, b)]
    put_pages(a, known, range(8))
    while a.write_back.share():
        pass
    assert load_pages(b, known, range(8)) == 8

    def days(number: float) -> None:
        clock.now += number * DAY
        age(primaries, number * DAY)

    days(2)
    assert load_pages(b, known, [0]) == 1  # in its arena: Redis learns of it behind that
    b.write_back.tell_shared()
    assert a.expiry.expire(NEVER) == 8, "what is its own goes"
    assert b.expiry.expire(NEVER) == 0
    assert found_pages(b, known, range(8)) == list(range(8))
    assert len(a.namespaces.known()) == 1, "or it could not look again"
    assert b.lower_tiers.shared.contains([known.fingerprint + each for each in page_hashes(range(8))]) == [True] * 8
    days(0.9)
    assert a.expiry.expire(NEVER) == 0
    assert len(a.namespaces.known()) == 1
    days(0.2)
    assert a.expiry.expire(NEVER) == 0
    assert a.namespaces.known() == []
    assert b.lower_tiers.shared.contains([known.fingerprint + each for each in page_hashes(range(8))]) == [False] * 8
    assert b.expiry.expire(NEVER) == 8
    assert b.namespaces.known() == []


def test_months_without_redis_leave_room_for_new_namespaces(
    server: RedisServer,
    start_proxy: Callable[[int], Proxy],
    open_nodes: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(kvstore.namespaces.registry, "time", clock)
    monkeypatch.setattr(kvstore.namespaces.registry, "MOST_NAMESPACES", 8)
    proxy = start_proxy(server.port)
    store, _ = open_nodes(proxy.url)
    proxy.refuse, proxy.cut_after = True, 0
    for number in range(20):
        known = store.open_namespace(layout_of(str(number), FRAME))
        put_pages(store, known, range(2))
        clock.now += DAY / 4
        store.expiry.expire(NEVER)
    assert [each.layout.model for each in store.namespaces.known()] == ["15", "16", "17", "18", "19"]
    forgotten = [record.message for record in caplog.records if "is overdue and forgotten" in record.message]
    assert len(forgotten) == 15
    assert "stays until nobody has used it there for a week (redis: " in forgotten[0]
    store.check_integrity()


def test_what_could_not_be_asked_is_asked_again(
    server: RedisServer,
    start_proxy: Callable[[int], Proxy],
    open_nodes: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(kvstore.namespaces.registry, "time", clock)
    proxy = start_proxy(server.port)
    store, _ = open_nodes(proxy.url)
    known = store.open_namespace(layout_of("old", FRAME))
    put_pages(store, known, range(4))
    while store.write_back.share():
        pass
    clock.now += 2 * DAY
    age([server], 2 * DAY)
    proxy.refuse, proxy.cut_after = True, 0
    assert store.expiry.expire(NEVER) == 4, "disk and arena need no Redis"
    assert store.expiry.expire(NEVER) == 0
    assert store.namespaces.known() == [known]
    assert [record.levelname for record in caplog.records if "tried again" in record.message] == ["WARNING"], "once"
    proxy.heal()
    while store.namespaces.known():
        store.expiry.expire(NEVER)
    assert not list(server.client.scan_iter(match="kvstore:page:*"))


@KINDS
@pytest.mark.parametrize("used_since", [False, True])
def test_what_a_killed_node_was_clearing_leaves_unless_another_uses_it_since(
    servers: Any,
    open_nodes: Any,
    open_redis: Open,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    used_since: bool,
) -> None:
    url, primaries = servers
    clock = FakeClock()
    monkeypatch.setattr(kvstore.store.orphans, "time", clock)
    a, b = open_nodes(url)
    known, _ = [store.open_namespace(layout_of("a", FRAME)) for store in (a, b)]
    put_pages(a, known, range(8))
    while a.write_back.share():
        pass
    assert load_pages(b, known, range(8)) == 8
    b.write_back.tell_shared()
    a.namespaces.forget(known, shared=True)  # the first step of clear
    kill_store(a)
    with Store(Arena(shm / "a", 64 * FRAME), [], [shm / "a"], shared=open_redis(url, LIMIT, timeout=5.0)) as again:
        clock.now += 60
        age(primaries, 61)
        if used_since:
            load_pages(b, known, [0])
            b.write_back.tell_shared()
        again.orphans.drop(NEVER)
        assert again.namespaces.leaving() == []
        keys = [known.fingerprint + each for each in page_hashes(range(8))]
        assert b.lower_tiers.shared.contains(keys) == [used_since] * 8
