"""Calls that hang at one server, and a machine that has no threads to spare, cost nothing elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from made_pages import make_page, read_pages
from redis_servers import Cluster, servers_of, set_timeout

from kvstore.breaker import State
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format import key_names as names
from kvstore.tiers.redis.net.threads import ServerThreads

LIMIT = 256 << 20
Open = Callable[..., RedisTier]


class OneHangs:
    """A Cluster with pages on all servers, of which one is stopped, with more calls waiting for it than it has threads.

    Each of them has a part for every server, and waits far longer than the tier's own calls do.
    """

    def __init__(self, cluster: Cluster, tier: RedisTier) -> None:
        self.tier = tier
        self._cluster = cluster
        self.pages = [make_page(number, 100) for number in range(60)]
        assert all(tier.write(self.pages))
        self._victim = cluster.primaries()[0]
        self.name = f"127.0.0.1:{self._victim.port}"
        entries, _ = tier._entries.find(self.keys, time.monotonic() + 20)
        self._chunks = {
            key: names.part_name(entry.bucket, entry.nonce, 0)
            for key, entry in zip(self.keys, entries, strict=True)
            if entry is not None
        }
        # A call asks the first server that it needs itself: one that is well.
        self.pages.sort(key=lambda page: self.finds(page.key), reverse=True)

    @property
    def keys(self) -> list[bytes]:
        return [page.key for page in self.pages]

    def _is_well(self, name: bytes) -> bool:
        return self.tier._topology._table[self._cluster.client.keyslot(name)].name != self.name

    def finds(self, key: bytes) -> bool:
        """Whether the page's entry is on a server that is well."""
        return self._is_well(names.page_name(key))

    def reads(self, key: bytes) -> bool:
        """Whether its chunk is, too."""
        return self.finds(key) and self._is_well(self._chunks[key])

    @contextmanager
    def hanging(self, eventually: Callable[..., None]) -> Iterator[None]:
        """While the server is stopped, and calls wait for it."""
        self._victim.pause()
        with ThreadPoolExecutor(24) as threads:
            try:
                later = time.monotonic() + 60
                calls = [threads.submit(self.tier._entries.find, self.keys, later) for _ in range(24)]
                queues = [node.threads._threads._queue for node in servers_of(self.tier)]
                eventually(lambda: any(queue.qsize() for queue in queues))
                yield
            finally:
                self._victim.resume()
        for call in calls:
            call.result()


@pytest.fixture
def one_hangs(steady_cluster: Cluster, open_redis: Open) -> OneHangs:
    # Connections to the stopped server are waited for as long as the calls that hang there.
    tier = open_redis(steady_cluster.url, LIMIT, timeout=30.0, refresh=1000.0)
    return OneHangs(steady_cluster, tier)


def test_calls_that_hang_at_one_server_let_others_be_reached(
    one_hangs: OneHangs, eventually: Callable[..., None]
) -> None:
    expected = list(map(one_hangs.finds, one_hangs.keys))
    assert 0 < expected.count(True) < 60
    with one_hangs.hanging(eventually):
        for seconds in (2.0, 10.0):  # the second one on a machine that is too busy for the first
            one_hangs.tier._lookup_timeout = seconds
            found = one_hangs.tier.contains(one_hangs.keys)
            if found == expected:
                break
        assert found == expected
    others = [node for node in servers_of(one_hangs.tier) if node.name != one_hangs.name]
    assert all(node.breaker.state is State.CLOSED for node in others)


def test_pages_of_the_other_servers_are_read_while_one_hangs(
    one_hangs: OneHangs, eventually: Callable[..., None]
) -> None:
    expected = list(map(one_hangs.reads, one_hangs.keys))
    assert 0 < expected.count(True) < 60
    with one_hangs.hanging(eventually):
        for seconds in (2.0, 10.0):
            set_timeout(one_hangs.tier, seconds)
            found = read_pages(one_hangs.tier, one_hangs.pages)
            if found == expected:
                break
        assert found == expected


def test_work_that_nobody_began_by_its_deadline_is_given_up() -> None:
    waiters = ServerThreads(1, "test")
    begun, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        assert go_on.wait(60)
        done.append(1)

    one = waiters.start(first)
    assert begun.wait(60)
    two = waiters.start(lambda: done.append(2))
    two.end(time.monotonic())
    go_on.set()
    one.end(time.monotonic())  # what has begun is waited for: it may write into the caller's memory
    assert done == [1]
    waiters.start(lambda: done.append(3)).end(time.monotonic() + 20)
    assert done == [1, 3]
    waiters.close()
    waiters.start(lambda: done.append(4)).end(time.monotonic() + 20)
    assert done == [1, 3, 4], "threads that were let go leave the work to its callers"


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_a_machine_without_threads_recovers(
    request: pytest.FixtureRequest,
    open_redis: Open,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    kind: str,
) -> None:
    tier = open_redis(request.getfixturevalue(kind).url, LIMIT, refresh=1000.0, timeout=2.0, lookup_timeout=0.5)
    pages = [make_page(number, 100) for number in range(30)]
    keys = [page.key for page in pages]
    tier._refresher.close()
    eventually(lambda: tier._topology.primaries(time.monotonic() + 20))
    eventually(lambda: not tier._topology._refreshing)
    eventually(lambda: not any(node._opening for node in servers_of(tier)))
    for node in servers_of(tier):
        node._drop_idle()
    if kind == "cluster":
        tier._topology._table = []  # as before the first call

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(5):
            assert not any(tier.contains(keys))
    eventually(lambda: all(tier.write(pages)))
    eventually(lambda: all(tier.contains(keys)))
