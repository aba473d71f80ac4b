"""What calls cost, as ``kvstore plan --fleet`` counts them, held against real servers: a round trip more is seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from counted_redis import CountedRedis
from made_pages import make_page, read_pages
from redis_servers import RedisServer

from kvstore.cli.plan import costs
from kvstore.cli.plan.costs import Cost
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.tier import PageWrite

ServersAt = Callable[[str], tuple[list[RedisServer], str]]
Open = Callable[..., RedisTier]
LIMIT = 640 << 20
BUCKETS = 16
SIZES = [(64 << 10, 80), (512 << 10, 10), (2 << 20, 4)]
"""Bytes of a page, and pages of a call."""


def prompt(pages: int, length: int) -> list[PageWrite]:
    """Pages of one chain, with the hashes of a real one: they lie anywhere in a Cluster."""
    made = [make_page(number, length) for number in range(pages)]
    made = [page._replace(key=bytes(32) + hashlib.sha256(page.key).digest()) for page in made]
    return [page._replace(parent=made[at - 1].key if at else b"") for at, page in enumerate(made)]


def quiet(tier: RedisTier) -> RedisTier:
    """A tier that asks nothing by itself, with its connections open and its codec chosen."""
    tier._refresher.close()
    warm = [make_page(1000 + number, 64 << 10) for number in range(400)]
    for _ in range(4):
        assert all(tier.write(warm))
        assert all(read_pages(tier, warm))
    assert tier.remove([page.key for page in warm]) == len(warm)
    return tier


def hold(expected: Cost, found: Cost) -> None:
    """Counts are the same; bytes are nearly."""
    assert (found.round_trips, found.commands, found.scripts) == (
        expected.round_trips,
        expected.commands,
        expected.scripts,
    )
    assert found.sent_bytes == pytest.approx(expected.sent_bytes, rel=0.03, abs=128)
    assert found.received_bytes == pytest.approx(expected.received_bytes, rel=0.03, abs=128)


@pytest.mark.parametrize(("length", "pages"), SIZES)
@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_the_counts_of_calls(
    servers_at: ServersAt,
    monkeypatch: pytest.MonkeyPatch,
    open_redis: Open,
    kind: str,
    length: int,
    pages: int,
) -> None:
    servers, url = servers_at(kind)
    tier = quiet(open_redis(url, LIMIT, refresh=1000.0))
    chain = prompt(pages, length)
    keys = [page.key for page in chain]
    shape = costs.shape_of(keys, length, BUCKETS, cluster=kind == "cluster")
    counted = CountedRedis(monkeypatch, servers)

    hold(costs.lookup(shape, 0), counted.cost(lambda: tier.contains(keys)))
    hold(costs.store(shape), counted.cost(lambda: tier.write(chain)))
    hold(costs.lookup(shape, pages), counted.cost(lambda: tier.contains(keys)))
    hold(costs.load(shape), counted.cost(lambda: read_pages(tier, chain)))
    hold(costs.touch(shape), counted.cost(lambda: tier.touch(keys)))


@pytest.mark.parametrize(("length", "pages"), SIZES)
def test_the_counts_of_pages_that_others_are_sending(
    monkeypatch: pytest.MonkeyPatch, server: RedisServer, open_redis: Open, length: int, pages: int
) -> None:
    sender, other = (quiet(open_redis(server.url, LIMIT, refresh=1000.0)) for _ in range(2))
    chain = prompt(pages, length)
    shape = costs.shape_of([page.key for page in chain], length, BUCKETS, cluster=False)
    sender._writer._chunks._send = killed  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        sender.write(chain)
    counted = CountedRedis(monkeypatch, [server])
    claims: list[bytes] = []
    told = costs.lookup(shape, 0) + sum(costs.agreement(), costs.claimed(shape))
    hold(told, counted.cost(lambda: claims.extend(claim.name for claim in other.offer(chain).claims)))
    assert len(claims) == len(shape.chunks)
    hold(costs.look_at_claims(shape), counted.cost(lambda: other.ended(claims)))


def killed(*_: object) -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize("nodes", [1, 5])
def test_the_counts_of_what_nodes_ask_by_themselves(
    monkeypatch: pytest.MonkeyPatch, server: RedisServer, open_redis: Open, nodes: int
) -> None:
    """Of 16 buckets one node asks all, and the others their summary."""
    writer = quiet(open_redis(server.url, LIMIT, refresh=1000.0))
    for number in range(100):  # chunks of their own: all buckets have some
        assert writer.write([make_page(number, 50_000)]) == [True]
    tiers = [quiet(open_redis(server.url, LIMIT, refresh=1000.0)) for _ in range(nodes)]
    for name in server.client.scan_iter(match="kvstore:summary:*"):
        server.client.delete(name)
    counted = CountedRedis(monkeypatch, [server])
    found = [counted.cost(tier._refresh) for tier in tiers]
    one = costs.refresh(BUCKETS)
    assert (found[0].round_trips, found[0].commands) == (one.round_trips, one.commands)
    every = sum(found, Cost())
    expected = costs.refresh(BUCKETS, nodes) * nodes
    assert every.scripts == expected.scripts == 0
    assert every.commands == pytest.approx(expected.commands, abs=nodes)  # a node's part of what one does is rounded
    assert every.sent_bytes == pytest.approx(expected.sent_bytes, rel=0.03, abs=128)
    assert every.received_bytes == pytest.approx(expected.received_bytes, rel=0.03, abs=128)
