"""Calls that hang at one server, and a machine that has no threads to spare, cost nothing elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvstore.testing import make_page
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.crew import Crew

LIMIT = 256 << 20
Open = Callable[..., RedisTier]


def test_calls_that_hang_at_one_server_let_others_be_reached(
    start_cluster: Any, open_redis: Open, eventually: Any
) -> None:
    """As many calls as there are threads for a server, and twice as many; each has a part for every server."""
    cluster = start_cluster()
    for one in cluster.servers:
        one.client.config_set("cluster-replica-no-failover", "yes")
        one.client.config_set("cluster-require-full-coverage", "no")
    tier = open_redis(cluster.url, LIMIT, timeout=3.0, lookup_timeout=2.0, refresh=1000.0)
    pages = [make_page(number, 100) for number in range(60)]
    keys = [page.key for page in pages]
    assert all(tier.write(pages))
    victim = cluster.primaries()[0]
    hangs = f"127.0.0.1:{victim.port}"

    def is_well(key: bytes) -> bool:
        return tier._servers._table[cluster.client.keyslot(b"kvstore:page:" + key)].name != hangs

    order = sorted(keys, key=is_well, reverse=True)  # the caller asks the first server itself
    expected = list(map(is_well, order))
    assert 0 < expected.count(True) < 60
    victim.pause()
    with ThreadPoolExecutor(24) as threads:
        try:
            later = time.monotonic() + 20
            hanging = [threads.submit(tier._entries.find, order, later) for _ in range(24)]
            crews = [node.crew for node in tier._servers._nodes.values()]
            eventually(lambda: any(crew._threads._work_queue.qsize() for crew in crews))
            assert tier.contains(order) == expected
        finally:
            victim.resume()
        for call in hanging:
            call.result()
    assert not any(node.breaker.is_open for name, node in tier._servers._nodes.items() if name != hangs)


def test_work_that_nobody_began_by_its_deadline_is_given_up() -> None:
    crew = Crew(1, "test")
    begun, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        assert go_on.wait(20)
        done.append(1)

    one = crew.start(first)
    assert begun.wait(20)
    two = crew.start(lambda: done.append(2))
    two.end(time.monotonic())
    go_on.set()
    one.end(time.monotonic())  # what has begun is waited for: it may write into the caller's memory
    assert done == [1]
    crew.start(lambda: done.append(3)).end(time.monotonic() + 20)
    assert done == [1, 3]
    crew.close()
    crew.start(lambda: done.append(4)).end(time.monotonic() + 20)
    assert done == [1, 3, 4], "a crew that was let go leaves the work to its callers"


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_a_machine_without_threads_recovers(
    request: pytest.FixtureRequest, open_redis: Open, monkeypatch: pytest.MonkeyPatch, eventually: Any, kind: str
) -> None:
    tier = open_redis(request.getfixturevalue(kind).url, LIMIT, refresh=1000.0, timeout=2.0, lookup_timeout=0.5)
    pages = [make_page(number, 100) for number in range(30)]
    keys = [page.key for page in pages]
    tier._look.close()
    eventually(lambda: tier._servers.primaries(time.monotonic() + 20))
    eventually(lambda: not tier._servers._refreshing)
    eventually(lambda: not any(node._opening for node in tier._servers._nodes.values()))
    for node in tier._servers._nodes.values():
        node._drop_idle()
    if kind == "cluster":
        tier._servers._table = []  # as before the first call

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(5):
            assert not any(tier.contains(keys))
    eventually(lambda: all(tier.write(pages)))
    eventually(lambda: all(tier.contains(keys)))
