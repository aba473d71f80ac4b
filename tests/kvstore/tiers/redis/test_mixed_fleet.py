"""Nodes that know claims beside nodes of before, on one Redis: every answer is right, and the sums are.

A node of before is made of a tier of today: it runs the script without its lines about claims, and ends none.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from made_pages import make_page, read_pages
from redis_recount import Recount
from redis_servers import RedisServer

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.server import Request
from kvstore.tiers.tier import PageWrite

ServersAt = Callable[[str], tuple[list[RedisServer], str]]
Open = Callable[..., RedisTier]
MIB = 1 << 20
LIMIT = 80 * MIB
BUDGET = LIMIT // 2
EACH = 4
"""Nodes of either kind."""


def admit_of_before() -> str:
    """The script of before claims."""
    lines = scripts._ADMIT.splitlines(keepends=True)
    kept = [line for line in lines if "claim" not in line and "holder" not in line]
    assert len(lines) - len(kept) == 5
    return "".join(kept)


def make_old(tier: RedisTier, servers: Sequence[RedisServer]) -> RedisTier:
    """Let a tier write as nodes of before do."""
    script = admit_of_before()
    for server in servers:
        server.client.script_load(script)
    digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest().encode()
    buckets = tier._buckets
    admission = buckets.admission

    def without_claim(chunk: NewChunk, *, again: bool = False) -> Request:
        request = admission(chunk, again=again)
        command = list(request.arguments)
        assert command[1] == scripts.ADMIT
        command[1] = digest
        return Request(request.slot, command[:-3])

    buckets.admission = without_claim  # type: ignore[method-assign]
    buckets.end_claims = lambda chunks: []  # type: ignore[method-assign]
    return tier


def prompt(number: int, pages: int) -> list[PageWrite]:
    """A chain of its own, of eight pages a full chunk."""
    made = [make_page(1000 * number + place, 256 << 10) for place in range(pages)]
    return [page._replace(parent=made[at - 1].key if at else b"") for at, page in enumerate(made)]


@pytest.mark.parametrize("kind", ["single", "cluster"])
def test_old_and_new_nodes_store_the_same_at_once(
    servers_at: ServersAt, open_redis: Open, recount: Callable[..., Recount], seed: int, kind: str
) -> None:
    """Round by round the same new prompt, of which each has another part; then more than fits."""
    servers, url = servers_at(kind)
    new = [open_redis(url, LIMIT, refresh=1000.0) for _ in range(EACH)]
    old = [make_old(open_redis(url, LIMIT, refresh=1000.0), servers) for _ in range(EACH)]
    tiers = [tier for pair in zip(new, old, strict=True) for tier in pair]
    together = threading.Barrier(len(tiers))
    rounds = count()

    def store(at: int, pages: Sequence[PageWrite]) -> list[bool]:
        part = pages[: 1 + (seed + 7 * at + 3 * len(pages)) % len(pages)] if at else pages
        together.wait(60.0)
        return tiers[at].write(part)

    def everybody(threads: ThreadPoolExecutor, pages: Sequence[PageWrite]) -> Any:
        return threads.map(store, range(len(tiers)), [pages] * len(tiers))

    with ThreadPoolExecutor(len(tiers)) as threads:
        for pages in (prompt(next(rounds), 5 + 4 * size) for size in range(4)):
            assert all(map(all, everybody(threads, pages)))
            assert all(map(all, threads.map(read_pages, tiers, [pages] * len(tiers))))
            recount(*servers, budget=BUDGET).check_entries()
        for _ in range(12):  # each is 5 MiB, and some of the first ones have to leave
            pages = prompt(next(rounds), 20)
            for _ in everybody(threads, pages):
                pass
            read_pages(new[0], pages)  # what is there is right
    there = recount(*servers, budget=BUDGET)
    there.check_entries()
    assert there.pages > 0
    assert sum(tier.statistics().evicted for tier in tiers) > 0
    assert sum(tier.statistics().corrupt for tier in tiers) == 0
