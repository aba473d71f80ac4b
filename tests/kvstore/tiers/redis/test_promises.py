"""What only a look at the wire or into the server shows: asking ahead, trimming, no I/O, lives that are renewed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from made_pages import make_page, read_pages
from redis_recount import Recount
from redis_servers import Cluster, RedisServer, servers_of

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.connection import Request, ServerConnection
from kvstore.tiers.redis.net.resp import RespSocket
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
LIMIT = 64 * MIB
ONE = b"1" * 32
Open = Callable[..., RedisTier]


def make(number: int, length: int = 300_000) -> PageWrite:
    payload = np.random.default_rng(number).integers(0, 256, length, np.uint8)
    return PageWrite(ONE + number.to_bytes(32, "big"), xxhash.xxh3_64_intdigest(payload.data), payload)


class Watched(RespSocket):
    """A socket that counts the bytes of replies that were asked for and have not come."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.ahead = self.most_ahead = self.sends = 0

    def send(self, buffers: Any, deadline: float) -> None:
        self.ahead += b"".join(buffers).count(b"GETRANGE") * MIB
        self.most_ahead = max(self.most_ahead, self.ahead)
        self.sends += 1
        super().send(buffers, deadline)

    def receive(self, deadline: float, into: Any = (), *, depth: int = 0) -> Any:
        reply = super().receive(deadline, into, depth=depth)
        self.ahead -= MIB if len(into) else 0
        return reply


def test_a_write_is_one_batch_whose_first_chunk_leaves_before_the_last_is_encoded(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_redis(server.url, 640 * MIB)
    assert tier.contains([bytes(64)]) == [False]
    tier._refresher.close()  # it sends as well
    sent: list[int] = []
    real = RespSocket.send

    def send(self: RespSocket, buffers: Any, deadline: float) -> None:
        sent.append(sum(map(len, buffers)))
        real(self, buffers, deadline)

    monkeypatch.setattr(RespSocket, "send", send)
    assert all(tier.write([make(number, 64 << 10) for number in range(512)]))
    chunks = [size for size in sent if size > MIB]
    assert len(chunks) == 16
    assert max(chunks) < 3 * MIB
    assert sum(chunks) > 31 * MIB
    behind = len(sent) - sent.index(chunks[0]) - 16
    assert behind == 3, "the last chunk's second part, all entries, and the ends of claims"


def test_replies_are_asked_for_four_mebibytes_ahead(server: RedisServer, open_redis: Open) -> None:
    """The server keeps every reply in memory until it is sent."""
    tier = open_redis(server.url, LIMIT)
    assert tier.contains([bytes(64)]) == [False]
    tier._refresher.close()  # it would use the same connection
    [node] = servers_of(tier)
    connection: ServerConnection = node._idle[-1]
    connection._resp = watched = Watched(connection._socket)
    server.client.set("kvstore:value", bytes(range(256)) * (MIB // 256))
    into = [bytearray(MIB) for _ in range(24)]
    get = [b"GETRANGE", b"kvstore:value", b"0", b"%d" % (MIB - 1)]
    requests = [Request(0, get, [memoryview(one)]) for one in into]
    assert connection.roundtrip(requests, 1e12) == [MIB] * 24
    assert all(one == into[0] for one in into)
    assert watched.most_ahead == 4 * MIB
    assert watched.ahead == 0
    assert watched.sends > 4


def test_a_quota_that_shrank_is_kept_in_a_bucket_that_no_write_goes_to(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TRIM: admission sees to its own bucket only."""
    tier = open_redis(cluster.url, 640 * MIB)
    pages = [make(number) for number in range(80)]
    assert all(tier.write(pages))
    before = recount(*cluster.primaries(), budget=640 * MIB).by_namespace[ONE]
    tier.set_quota(ONE, 10 * MIB)
    kinds: list[Any] = []
    real = tier._topology.exchange

    def exchange(requests: Any, deadline: float, **options: Any) -> Any:
        kinds.extend(request.arguments[1] for request in requests if request.arguments[0] == b"EVALSHA")
        return real(requests, deadline, **options)

    monkeypatch.setattr(tier._topology, "exchange", exchange)
    assert tier.write([make(100)]) == [True]
    assert kinds.count(scripts.TRIM) > 1
    assert before > 20 * MIB > 10 * MIB >= recount(*cluster.primaries(), budget=640 * MIB).by_namespace[ONE]


def test_statistics_and_quotas_answer_while_the_server_hangs(
    start_server: Callable[..., RedisServer], open_redis: Open, eventually: Callable[..., None]
) -> None:
    """From memory: not one byte is sent, and nobody waits."""
    server = start_server()
    tier = open_redis(server.url, LIMIT, timeout=1000.0, refresh=1000.0)
    assert all(tier.write([make(number) for number in range(4)]))
    tier._refresher.close()  # it has asked for the sums by now, and does not again
    [node] = servers_of(tier)
    eventually(lambda: not node._opening)  # the look and the write may have wanted a connection each
    expected = tier.statistics(), tier.used_by(ONE)
    assert expected[0].pages == 4
    commands = server.client.info("stats")["total_commands_processed"]
    server.pause()
    assert (tier.statistics(), tier.used_by(ONE)) == expected
    server.resume()
    assert server.client.info("stats")["total_commands_processed"] == commands + 1, "only INFO"


def test_what_is_read_or_written_again_lives_on(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, LIMIT, time_to_live=1000.0)
    pages = [make_page(number, 900_000) for number in range(4)]

    def chunks() -> list[bytes]:
        return list(server.client.scan_iter(match="kvstore:{*}:chunk:*"))

    for use in (lambda: read_pages(tier, pages), lambda: tier.write(pages)):
        assert all(tier.write(pages))
        for name in chunks():
            server.client.pexpire(name, 500_000)
        assert all(use())
        assert len(chunks()) >= 2
        assert all(server.client.pttl(name) > 900_000 for name in chunks())


def test_what_nobody_uses_is_dropped_by_the_server(
    server: RedisServer, open_redis: Open, eventually: Callable[..., None]
) -> None:
    tier = open_redis(server.url, LIMIT, time_to_live=0.2)
    tier.write([make_page(1, 900_000)])
    eventually(lambda: not list(server.client.scan_iter(match="kvstore:page:*")))
    eventually(lambda: not list(server.client.scan_iter(match="kvstore:{*}:chunk:*")))
    assert tier.contains([make_page(1, 1).key]) == [False]
