"""Which pages a namespace has in Redis is told by its chunks; where these are silent, by a walk over all keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from made_pages import make_page, read_pages
from redis_servers import PATIENCE, Cluster, RedisServer, servers_of

from kvstore.errors import ResourceError, UnavailableError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.topology import Topology
from kvstore.tiers.tier import PageWrite

ServersAt = Callable[[str], tuple[list[RedisServer], str]]
Open = Callable[..., RedisTier]
LIMIT = 256 << 20
ONE, OTHER = bytes([1]) * 32, bytes([2]) * 32


def pages_of(namespace: bytes, numbers: Sequence[int], length: int = 1000) -> list[PageWrite]:
    made = [make_page(number, length) for number in numbers]
    return [page._replace(key=namespace + page.key[32:]) for page in made]


def prompt_of(namespace: bytes, pages: int, length: int) -> list[PageWrite]:
    """Each page is the next one's parent."""
    made = pages_of(namespace, range(pages), length)
    return [page._replace(parent=made[at - 1].key if at else b"") for at, page in enumerate(made)]


def keys_of(pages: Sequence[PageWrite]) -> list[bytes]:
    return sorted(page.key for page in pages)


class Asked:
    """The commands that all servers are asked from now on, and what is done before some exchange."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[bytes] = []
        real, walk = Topology.exchange, Topology.exchange_each

        def exchange(topology: Topology, requests: Sequence[Request], *more: Any, **options: Any) -> Any:
            self.commands += [bytes(request.arguments[0]) for request in requests]
            return real(topology, requests, *more, **options)

        def exchange_each(topology: Topology, arguments: Sequence[bytes], *more: Any) -> Any:
            self.commands.append(arguments[0])
            return walk(topology, arguments, *more)

        monkeypatch.setattr(Topology, "exchange", exchange)
        monkeypatch.setattr(Topology, "exchange_each", exchange_each)


@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_what_others_have_costs_nothing(
    servers_at: ServersAt, open_redis: Open, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each bucket is looked at twice, and then each chunk of the namespace; removed pages are not named."""
    _, url = servers_at(kind)
    tier = open_redis(url, LIMIT, refresh=1000.0)
    mine = pages_of(ONE, range(50))
    assert all(tier.write(mine))
    assert tier.remove([page.key for page in mine[:10]]) == 10
    tier._refresher.close()
    asked = Asked(monkeypatch)
    assert sorted(tier.keys(ONE)) == keys_of(mine[10:])
    alone = sorted(asked.commands)
    monkeypatch.undo()
    for first in range(0, 3000, 500):
        assert all(tier.write(pages_of(OTHER, range(first, first + 500))))
    asked = Asked(monkeypatch)
    assert sorted(tier.keys(ONE)) == keys_of(mine[10:])
    assert sorted(asked.commands) == alone
    assert asked.commands.count(b"ZRANGE") == 2 * tier._buckets._number
    assert b"SCAN" not in asked.commands
    assert len(tier.keys(OTHER)) == 3000


def break_header(server: RedisServer, part: bytes) -> None:
    server.client.setrange(part, 20, b"\xff\xff\xff\xff")


def take_bytes(server: RedisServer, part: bytes) -> None:
    server.client.delete(part)


def take_charge(server: RedisServer, part: bytes) -> None:
    bucket, nonce = part.split(b":chunk:")
    server.client.hdel(bucket + b":chunks", nonce[:-2])


def take_number(server: RedisServer, part: bytes) -> None:
    server.client.delete(key_names.BUCKETS)


def another_order(server: RedisServer, part: bytes) -> None:
    [name, *_] = server.client.scan_iter(match=b"kvstore:{*}:order:" + ONE)
    server.client.delete(name)
    server.client.set(name, b"somebody's")


@pytest.mark.parametrize("damage", [break_header, take_bytes, take_charge, take_number, another_order])
def test_where_chunks_are_silent_all_keys_are_walked_over(
    server: RedisServer,
    open_redis: Open,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[RedisServer, bytes], None],
) -> None:
    tier = open_redis(server.url, LIMIT, refresh=1000.0)
    mine = pages_of(ONE, range(50))
    assert all(tier.write(mine))
    tier._refresher.close()
    [part, *_] = server.client.scan_iter(match="kvstore:{*}:chunk:*:0")
    damage(server, part)
    asked = Asked(monkeypatch)
    assert sorted(tier.keys(ONE)) == keys_of(mine)
    assert b"SCAN" in asked.commands


def test_pages_that_move_between_two_looks_are_found(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fragments are merged in the bucket of the first one, behind the look at that, and before those of the others."""
    length = 100_000
    tier, other = (open_redis(server.url, LIMIT, refresh=1000.0) for _ in range(2))
    for each in (tier, other):
        each._refresher.close()
    whole = 20  # of pages of this length in 2 MiB
    prompt = prompt_of(ONE, whole, length)
    fragments = [prompt[at : at + 5] for at in range(0, 15, 5)]
    for fragment in fragments:
        assert all(other.write(fragment))
    names = list(server.client.scan_iter(match=b"kvstore:{*}:order:" + ONE))
    assert len(names) > 1, "they lie in several buckets"
    looked: list[bytes] = []
    real = Topology.exchange

    def exchange(topology: Topology, requests: Sequence[Request], *more: Any, **options: Any) -> Any:
        """One bucket at a time: that of the first fragment first, whatever its number; then the prompt's rest comes."""
        if topology is not tier._topology or requests[0].arguments[0] != b"ZRANGE":
            return real(topology, requests, *more, **options)
        first = key_names.bucket_names(bucket)[0] + b":" + ONE
        mine = [place for place, request in enumerate(requests) if request.arguments[1] == first]
        replies: list[Any] = [None] * len(requests)
        for place in [*mine, *(place for place in range(len(requests)) if place not in mine)]:
            [replies[place]] = real(topology, [requests[place]], *more, **options)
            if place in mine and not looked:
                looked.append(first)
                assert all(other.write(prompt[15:]))
                assert len(list(server.client.scan_iter(match=b"kvstore:{*}:order:" + ONE))) == 1, "they were merged"
        return replies

    bucket = other._buckets.share_of(ONE).bucket_of(prompt[0].key)
    monkeypatch.setattr(Topology, "exchange", exchange)
    assert sorted(tier.keys(ONE)) == keys_of(prompt)
    assert looked
    assert tier.remove(tier.keys(ONE)) == whole
    assert not any(read_pages(other, prompt))


@pytest.mark.parametrize("kind", ["single", "cluster"])
@pytest.mark.parametrize("late", [False, True])
def test_a_chunk_that_is_being_written_is_no_reason_to_walk_over_all_keys(
    servers_at: ServersAt, open_redis: Open, monkeypatch: pytest.MonkeyPatch, kind: str, late: bool
) -> None:
    """It has a place, and no bytes: until they come behind the first look, or (``late``) all the while."""
    _, url = servers_at(kind)
    tier, other = (open_redis(url, LIMIT, refresh=1000.0) for _ in range(2))
    mine, new = pages_of(ONE, range(50)), pages_of(ONE, range(50, 55))
    assert all(tier.write(mine))
    for each in (tier, other):
        each._refresher.close()
    asked = Asked(monkeypatch)
    real = Topology.exchange
    admitted, sent = threading.Event(), threading.Event()
    stored: list[bool] = []
    writer = threading.Thread(target=lambda: stored.extend(other.write(new)))

    def exchange(topology: Topology, requests: Sequence[Request], *more: Any, **options: Any) -> Any:
        if topology is other._topology and any(request.payload_bytes for request in requests):
            admitted.set()
            assert sent.wait(PATIENCE)
        replies = real(topology, requests, *more, **options)
        if topology is tier._topology and requests and requests[0].arguments[0] == b"GETRANGE" and not late:
            sent.set()
            writer.join(PATIENCE)
        return replies

    monkeypatch.setattr(Topology, "exchange", exchange)
    writer.start()
    assert admitted.wait(PATIENCE)
    found = tier.keys(ONE)
    sent.set()
    writer.join(PATIENCE)
    assert stored == [True] * 5
    assert b"SCAN" not in asked.commands
    assert sorted(found) == keys_of(mine if late else mine + new)
    assert tier.remove(found) == len(found)
    assert read_pages(other, mine) == [False] * 50
    assert read_pages(other, new) == [late] * 5


@pytest.mark.parametrize("leaves", [False, True])
def test_somebody_who_stores_all_the_time_is_no_reason_to_walk_over_all_keys(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Each look shows a new chunk; which is there when its header is asked for, or has left by then."""
    tier, other = (open_redis(server.url, LIMIT, refresh=1000.0) for _ in range(2))
    mine, new = pages_of(ONE, range(50)), pages_of(ONE, range(50, 100))
    assert all(tier.write(mine))
    for each in (tier, other):
        each._refresher.close()
    asked = Asked(monkeypatch)
    real = Topology.exchange
    came: list[PageWrite] = []

    def exchange(topology: Topology, requests: Sequence[Request], *more: Any, **options: Any) -> Any:
        command = requests[0].arguments[0] if requests and topology is tier._topology else b""
        if command == b"ZRANGE":
            came.append(new[len(came)])
            assert other.write(came[-1:]) == [True]
        if command == b"HMGET" and leaves:
            assert other.remove([came[-1].key]) == 1
        return real(topology, requests, *more, **options)

    with monkeypatch.context() as storing:
        storing.setattr(Topology, "exchange", exchange)
        found = tier.keys(ONE)
    assert b"SCAN" not in asked.commands
    assert len(came) > 1
    assert {page.key for page in mine} <= set(found) <= {page.key for page in mine + came}
    assert asked.commands.count(b"ZRANGE") == len(came) * tier._buckets._number
    tier.remove(found)
    assert read_pages(other, mine) == [False] * 50


@pytest.mark.parametrize("kind", ["single", "cluster"])
@pytest.mark.parametrize("command", [b"ZRANGE", b"HMGET", b"GETRANGE", b"MGET"])
def test_a_server_that_does_not_answer_is_told(
    servers_at: ServersAt, open_redis: Open, monkeypatch: pytest.MonkeyPatch, kind: str, command: bytes
) -> None:
    """It would keep pages that nobody removes, wherever in the call it is away."""
    _, url = servers_at(kind)
    tier = open_redis(url, LIMIT)
    for first in range(0, 300, 5):  # chunks of their own: all buckets have some
        assert all(tier.write(pages_of(ONE, range(first, first + 5))))
    for server in servers_of(tier):
        real = server.exchange

        def exchange(requests: Sequence[Request], *more: Any, real: Any = real, **options: Any) -> Any:
            if any(request.arguments[0] == command for request in requests):
                raise UnavailableError("it is away")
            return real(requests, *more, **options)

        monkeypatch.setattr(server, "exchange", exchange)
        with pytest.raises(ResourceError, match="not every server"):
            tier.keys(ONE)
        monkeypatch.setattr(server, "exchange", real)
    assert len(tier.keys(ONE)) == 300


def test_pages_of_a_cluster_are_cleared_whole(cluster: Cluster, open_redis: Open) -> None:
    """What is named is what can be removed, and nothing of others."""
    tier = open_redis(cluster.url, LIMIT)
    assert all(tier.write([*pages_of(ONE, range(200)), *pages_of(OTHER, range(200))]))
    assert tier.remove(tier.keys(ONE)) == 200
    assert tier.keys(ONE) == []
    assert sorted(tier.keys(OTHER)) == keys_of(pages_of(OTHER, range(200)))
