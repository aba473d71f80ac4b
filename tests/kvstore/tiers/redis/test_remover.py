"""What is removed is gone for everybody, and what could not be removed is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from faulty_proxy import Proxy
from made_pages import make_page, read_pages
from redis_recount import Recount
from redis_servers import Cluster, RedisServer, hurry, servers_of

from kvstore.errors import ResourceError, UnavailableError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.net.server import Request

LIMIT = 256 << 20
Open = Callable[..., RedisTier]


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_any_number_of_pages_is_removed(request: pytest.FixtureRequest, open_redis: Open, kind: str) -> None:
    tier = open_redis(request.getfixturevalue(kind).url, LIMIT)
    pages = [make_page(number, 100) for number in range(3000)]
    keys = [page.key for page in pages]
    assert all(tier.write(pages))
    assert tier.remove([*keys[:2500], *keys[:10], *[bytes(60) + b"none"] * 2000]) == 2500
    assert tier.contains(keys) == [False] * 2500 + [True] * 500
    assert tier.remove(keys) == 500
    assert tier.remove(keys) == 0


def test_what_is_late_in_one_piece_is_told_and_the_others_are_gone(
    server: RedisServer, open_redis: Open, start_proxy: Callable[[int], Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis hangs in the second thousand, for a while."""
    proxy = start_proxy(server.port)
    tier, other = open_redis(proxy.url, LIMIT, refresh=1000.0), open_redis(server.url, LIMIT)
    pages = [make_page(number, 100) for number in range(3000)]
    keys = [page.key for page in pages]
    assert all(other.write(pages))
    real = tier._entries.seen

    def seen(some: Any, deadline: float, **options: Any) -> Any:
        proxy.drop = keys[1024] in some
        return real(some, min(deadline, time.monotonic() + 0.3) if proxy.drop else deadline, **options)

    monkeypatch.setattr(tier._entries, "seen", seen)
    with pytest.raises(ResourceError, match=r"1976 of 3000 pages may still be there.*\(1024 were removed\)"):
        tier.remove(keys)
    proxy.heal()
    assert other.contains(keys) == [False] * 1024 + [True] * 1976


def test_what_the_servers_that_answer_have_is_removed(steady_cluster: Cluster, open_redis: Open) -> None:
    tier = open_redis(steady_cluster.url, LIMIT, pause=1000.0)
    pages = [make_page(number, 100) for number in range(300)]
    keys = [page.key for page in pages]
    assert all(tier.write(pages))
    victim, *others = steady_cluster.primaries()
    victim.pause()
    found = True
    try:
        for seconds in (0.5, 3.0, 20.0):  # as long as the other servers need on a busy machine
            hurry(tier, seconds)
            with pytest.raises(ResourceError, match="of 300 pages may still be there"):
                tier.remove(keys)
            found = any(name for one in others for name in one.client.scan_iter(match="kvstore:page:*"))
            if not found:
                break
    finally:
        victim.resume()
    assert not found


def test_a_page_that_is_merged_at_that_moment_is_removed(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch, recount: Callable[..., Recount]
) -> None:
    """Somebody points it to another chunk between the look and the deletion."""
    tier, other = open_redis(server.url, LIMIT), open_redis(server.url, LIMIT)
    prompt = [make_page(number, 200_000) for number in range(10)]  # ten to a full chunk
    prompt = [page._replace(parent=prompt[at - 1].key if at else b"") for at, page in enumerate(prompt)]
    assert all(tier.write(prompt[:6]))
    real = tier._entries.forget
    merged: list[list[bool]] = []

    def forget(*arguments: Any) -> int:
        if not merged:
            merged.append(other.write(prompt[6:]))
        return real(*arguments)

    monkeypatch.setattr(tier._entries, "forget", forget)
    assert tier.remove([page.key for page in prompt[:6]]) == 6
    assert merged == [[True] * 4]
    assert read_pages(other, prompt) == [False] * 6 + [True] * 4
    found = recount(server, budget=LIMIT)
    found.check_entries()
    assert len(found.chunks) == 1, "it was merged"


def test_servers_are_walked_over_side_by_side(
    cluster: Cluster, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is asked behind another one."""
    tier = open_redis(cluster.url, LIMIT)
    pages = [make_page(number, 1000) for number in range(100)]
    assert all(tier.write(pages))
    together = threading.Barrier(3)
    for server in servers_of(tier):
        monkeypatch.setattr(server, "exchange", met(server.exchange, together))
    assert sorted(tier.keys(bytes(32))) == sorted(page.key for page in pages)


def met(exchange: Callable[..., Any], together: threading.Barrier) -> Callable[..., Any]:
    """Its first SCAN begins when those of all servers do."""
    first = iter([True])

    def waiting(requests: Sequence[Request], *arguments: Any, **options: Any) -> Any:
        if requests[0].arguments[0] == b"SCAN" and next(first, False):
            together.wait(60.0)
        return exchange(requests, *arguments, **options)

    return waiting


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_a_server_that_can_not_be_walked_over_is_told(
    request: pytest.FixtureRequest, open_redis: Open, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One that is away, at first or in the middle, would keep pages that nobody removes."""
    tier = open_redis(request.getfixturevalue(kind).url, LIMIT)
    assert all(tier.write([make_page(number, 100) for number in range(5000)]))
    server = servers_of(tier)[0]
    real = server.exchange
    for walked in range(2):
        left = iter(range(walked))

        def exchange(requests: Sequence[Request], *more: Any, left: Any = left, **options: Any) -> Any:
            if requests[0].arguments[0] == b"SCAN" and next(left, None) is None:
                raise UnavailableError("it is away")
            return real(requests, *more, **options)

        monkeypatch.setattr(server, "exchange", exchange)
        with pytest.raises(ResourceError, match="not every server"):
            tier.keys(bytes(32))
