"""Many nodes that store the same new pages at once: who begins sends them, and the others wait for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from made_pages import make_page, make_page_of, read_pages
from redis_recount import Recount
from redis_servers import RedisServer, wait_until

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.net.server import Request
from kvstore.tiers.tier import PageWrite

ServersAt = Callable[[str], tuple[list[RedisServer], str]]
Open = Callable[..., RedisTier]
MIB = 1 << 20
NODES = 24
LIMIT = 640 * MIB
BUDGET = LIMIT // 16


def prompt(pages: int, length: int = 256 << 10) -> list[PageWrite]:
    """Pages of one chain: eight to a full chunk."""
    made = [make_page(number, length) for number in range(pages)]
    return [page._replace(parent=made[at - 1].key if at else b"") for at, page in enumerate(made)]


def sent_bytes(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of pages, by each request of this tier from now on."""
    found: list[int] = []
    real = tier._topology.exchange

    def exchange(requests: Sequence[Request], deadline: float, **options: Any) -> Any:
        found.extend(request.payload_bytes for request in requests if request.payload_bytes)
        return real(requests, deadline, **options)

    monkeypatch.setattr(tier._topology, "exchange", exchange)
    return found


def once_together(look: Callable[..., Any], together: threading.Barrier) -> Callable[..., Any]:
    """The first look of each ends when all have looked."""
    looks = iter([True])

    def waiting(wanted: Sequence[PageWrite]) -> Any:
        found = look(wanted)
        if next(looks, False):
            together.wait(60.0)
        return found

    return waiting


@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_what_a_herd_stores_at_once_is_sent_once(
    servers_at: ServersAt,
    open_redis: Open,
    recount: Callable[..., Recount],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """All have looked before anyone has stored: each would send all of it."""
    servers, url = servers_at(kind)
    monkeypatch.setattr("kvstore.tiers.redis.buckets.JUST_PLACED_MS", b"60000")  # however slow the machine is
    pages = prompt(20)
    together = threading.Barrier(NODES)
    tiers = [open_redis(url, LIMIT, refresh=1000.0) for _ in range(NODES)]
    sent = [sent_bytes(tier, monkeypatch) for tier in tiers]
    for tier in tiers:
        monkeypatch.setattr(tier._writer, "_look", once_together(tier._writer._look, together))
    with ThreadPoolExecutor(NODES) as threads:
        assert list(threads.map(lambda tier: tier.write(pages), tiers)) == [[True] * 20] * NODES
    payload = sum(len(page.payload) for page in pages)
    everything = sum(map(sum, sent))
    assert payload < everything < 1.01 * payload, f"{everything / payload:.2f} times what was stored"
    assert read_pages(tiers[0], pages) == [True] * 20
    assert sum(tier.statistics().stored for tier in tiers) == 20
    assert sum(tier.statistics().refused for tier in tiers) == 0
    recount(*servers, budget=BUDGET).check_entries()
    claims = [each.client.get(name) for each in servers for name in each.client.scan_iter(match="kvstore:*:claim:*")]
    assert claims == [b""] * 3, "a claim that nobody ended"


def test_what_a_writer_claimed_and_never_sent_is_sent_by_the_next_one(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the claim's time, by the server's clock, and nothing else."""
    dead, alive = open_redis(server.url, LIMIT, refresh=1000.0), open_redis(server.url, LIMIT, refresh=1000.0)
    pages = prompt(8)
    server.client.config_resetstat()
    monkeypatch.setattr(dead._writer._chunks, "_send", _die)
    monkeypatch.setattr(dead._buckets, "_claim_ms", b"1500")
    with pytest.raises(RuntimeError, match="killed"):
        dead.write(pages)
    [claim] = server.client.scan_iter(match="kvstore:*:claim:*")
    assert 0 < server.client.pttl(claim) <= 1500
    assert alive.write(pages) == [True] * 8
    assert read_pages(alive, pages) == [True] * 8


def test_a_longer_run_from_the_same_page_is_completed(server: RedisServer, open_redis: Open) -> None:
    """Who waits for another's chunk sends what that did not have, and no more."""
    one, two = open_redis(server.url, LIMIT, refresh=1000.0), open_redis(server.url, LIMIT, refresh=1000.0)
    pages = prompt(8)
    server.client.config_resetstat()
    in_between = threading.Event()
    send = one._writer._chunks._send

    def slowly(*arguments: Any) -> Any:
        in_between.wait(60.0)
        return send(*arguments)

    one._writer._chunks._send = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.write, pages[:3])
        wait_until(lambda: list(server.client.scan_iter(match="kvstore:*:claim:*")))
        second = threads.submit(two.write, pages)
        wait_until(lambda: server.client.info("commandstats").get("cmdstat_pttl"))
        in_between.set()
        assert first.result(60.0) == [True] * 3
        assert second.result(60.0) == [True] * 8
    assert (one.statistics().stored, two.statistics().stored) == (3, 5)
    assert read_pages(one, pages) == [True] * 8


def test_a_refused_chunk_gives_its_claim_back(server: RedisServer, open_redis: Open) -> None:
    """A chunk that lost its place is nobody's: whoever comes next sends it at once."""
    tier = open_redis(server.url, LIMIT, refresh=1000.0)
    pages = prompt(8)
    chunks = tier._writer._chunks
    send = chunks._send

    def evicted_meanwhile(some: Any, deadline: float) -> Any:
        for chunk in some:
            server.client.delete(*chunk.names)
        return send(some, deadline)

    chunks._send = evicted_meanwhile  # type: ignore[method-assign]
    assert tier.write(pages) == [False] * 8
    chunks._send = send  # type: ignore[method-assign]
    server.client.config_resetstat()
    assert tier.write(pages) == [True] * 8
    assert "cmdstat_pttl" not in server.client.info("commandstats"), "it waited"


def test_equal_hashes_of_two_namespaces_are_two_claims(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, 40 * MIB, refresh=1000.0)  # one bucket
    server.client.config_resetstat()
    assert tier.write([make_page_of(namespace, 1, 100_000) for namespace in (1, 2, 3)]) == [True] * 3
    assert "cmdstat_pttl" not in server.client.info("commandstats"), "it waited for itself"


def _die(*_: Any) -> Any:
    raise RuntimeError("killed")
