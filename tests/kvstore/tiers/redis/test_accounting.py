import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash
from faulty_proxy import Proxy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from made_pages import make_page, read_pages
from redis_recount import Recount
from redis_servers import Cluster, RedisServer

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20


def chain(name: int, pages: range, length: int = 200_000) -> list[PageWrite]:
    """Pages of one prompt; prompts share what has the same numbers below a hundred."""
    out = []
    for number in pages:
        seed = number if number < 100 else name * 1000 + number
        payload = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
        key = bytes(31) + b"n" + seed.to_bytes(32, "big")
        out.append(PageWrite(key, xxhash.xxh3_64_intdigest(payload.data), payload))
    return out


def test_the_memory_that_the_server_takes_is_within_what_is_charged(
    server: RedisServer, open_redis: Callable[..., RedisTier], recount: Callable[..., Recount]
) -> None:
    tier = open_redis(server.url, 256 * MIB)
    for number, length in enumerate([1, 100, 5000, 65_536, 200_000, MIB, 1_124_352, 2 * MIB, 3 * MIB + 1, 8 * MIB]):
        assert all(tier.write([make_page(number * 100 + n, length) for n in range(6)]))
        found = recount(server, budget=256 * MIB)
        assert found.memory <= found.used_bytes == tier.statistics().used_bytes, f"pages of {length} bytes"
        found.check_entries()


@pytest.mark.parametrize("page_bytes", [65_536, 200_000, 2 * MIB])
def test_a_full_chunk_wastes_little(
    server: RedisServer, open_redis: Callable[..., RedisTier], recount: Callable[..., Recount], page_bytes: int
) -> None:
    tier = open_redis(server.url, 256 * MIB)
    pages = [make_page(n, page_bytes) for n in range(16 * MIB // page_bytes)]
    assert all(tier.write(pages))
    payload = len(pages) * page_bytes
    assert payload < recount(server, budget=256 * MIB).used_bytes < 1.13 * payload


def test_overlapping_prompts_share_their_pages(
    server: RedisServer, open_redis: Callable[..., RedisTier], recount: Callable[..., Recount]
) -> None:
    tier, other = open_redis(server.url), open_redis(server.url)
    assert all(tier.write(chain(1, range(20))))
    before = recount(server, budget=64 * MIB)
    assert all(other.write(chain(2, range(20))))
    assert recount(server, budget=64 * MIB).chunks == before.chunks
    assert all(other.write(chain(2, range(90, 110))))
    assert all(read_pages(tier, chain(2, range(20)) + chain(2, range(90, 110))))
    found = recount(server, budget=64 * MIB)
    assert found.pages == 40
    found.check_entries()


def test_two_nodes_that_store_overlapping_prompts_at_once(
    cluster: Cluster, open_redis: Callable[..., RedisTier], recount: Callable[..., Recount]
) -> None:
    tiers = [open_redis(cluster.url, 256 * MIB) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        for start in range(0, 40, 8):
            barrier = threading.Barrier(4)

            def store(number: int, start: int = start, barrier: threading.Barrier = barrier) -> list[bool]:
                prompt = chain(number, range(start, start + 12 + number))
                barrier.wait()
                return tiers[number % 2].write(prompt)

            assert all(all(answers) for answers in threads.map(store, range(4)))
    every = [page for number in range(4) for page in chain(number, range(44 + number))]
    for tier in tiers:
        assert all(read_pages(tier, every))
    found = recount(*cluster.primaries(), budget=256 * MIB // 8)
    found.check_entries()
    assert found.pages == len(found.entries) == 47
    assert sum(tier.statistics().stored for tier in tiers) == 47, "a page is stored once"


def test_eviction_while_others_load(
    cluster: Cluster, open_redis: Callable[..., RedisTier], recount: Callable[..., Recount]
) -> None:
    budget = 40 * MIB
    writer, reader = open_redis(cluster.url, budget), open_redis(cluster.url, budget)
    pages = [make_page(n, 300_000) for n in range(400)]
    done = threading.Event()
    found = [0, 0]

    def load() -> None:
        at = 0
        while not done.is_set():
            some = pages[at % 400 : at % 400 + 20]
            answers = read_pages(reader, some)  # compares all bytes
            found[0] += sum(answers)
            found[1] += len(answers)
            at += 20

    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load) for _ in range(2)]
        try:
            for at in range(0, 400, 10):
                writer.write(pages[at : at + 10])
                assert writer.statistics().used_bytes <= budget
        finally:
            done.set()
        for future in loads:
            future.result()
    assert 0 < found[0] < found[1]
    assert reader.statistics().corrupt == 0
    recount(*cluster.primaries(), budget=budget)
    assert 0 < writer.statistics().evicted < 400


def test_the_least_recently_read_leave_first(server: RedisServer, open_redis: Callable[..., RedisTier]) -> None:
    tier = open_redis(server.url, 16 * MIB)
    old, hot = make_page(1, MIB), make_page(2, MIB)
    tier.write([old])
    tier.write([hot])
    for number in range(10, 30):
        assert read_pages(tier, [hot]) == [True]
        tier.write([make_page(number, MIB)])
    assert read_pages(tier, [hot, old]) == [True, False]


def test_the_head_of_a_prefix_outlives_its_tail(server: RedisServer, open_redis: Callable[..., RedisTier]) -> None:
    tier = open_redis(server.url, 16 * MIB)
    prompt = [make_page(n, 2 * MIB) for n in range(6)]
    tier.write(prompt[:3])
    tier.write(prompt[3:])
    assert all(read_pages(tier, prompt))
    tier.write([make_page(n, 2 * MIB) for n in range(100, 103)])
    found = read_pages(tier, prompt)
    assert found == sorted(found, reverse=True)
    assert True in found
    assert False in found


def test_the_number_of_buckets_is_what_the_first_node_said(
    cluster: Cluster,
    open_redis: Callable[..., RedisTier],
    recount: Callable[..., Recount],
    eventually: Callable[..., None],
) -> None:
    first, second = open_redis(cluster.url, 160 * MIB), open_redis(cluster.url, 16 * MIB)
    assert all(first.write([make_page(n, 100_000) for n in range(40)]))
    number = int(cluster.client.get("kvstore:buckets"))
    assert number > 1
    assert all(read_pages(second, [make_page(n, 100_000) for n in range(40)]))
    eventually(lambda: second.statistics().pages == 40)
    second.write([make_page(n, 100_000) for n in range(40, 90)])
    assert int(cluster.client.get("kvstore:buckets")) == number
    recount(*cluster.primaries(), budget=160 * MIB // number)


def test_a_writer_that_dies_leaves_nothing_uncounted(
    server: RedisServer,
    open_redis: Callable[..., RedisTier],
    recount: Callable[..., Recount],
    start_proxy: Callable[[int], Proxy],
) -> None:
    """Cut at every stage of a store: before, between and behind its requests."""
    tier = open_redis(server.url, 16 * MIB)
    for cut in [10, 500, 1500, 3000, 10_000, 200_000, 599_000, 601_000, 602_000, 700_000]:
        proxy = start_proxy(server.port)
        victim = open_redis(proxy.url, 16 * MIB)
        assert victim.contains([make_page(1, 1).key]) == [False]
        proxy.cut_up_after = cut
        page = [make_page(cut * 10 + n, 200_000) for n in range(3)]
        answers = victim.write(page)
        assert answers == read_pages(tier, page)
        recount(server, budget=16 * MIB)
    for number in range(20):
        assert all(tier.write([make_page(number, MIB)]))
    recount(server, budget=16 * MIB).check_entries()


def test_a_chunk_that_leaves_before_its_bytes_come_does_not_come_back(
    server: RedisServer,
    open_redis: Callable[..., RedisTier],
    recount: Callable[..., Recount],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A writer sleeps between admission and bytes; others fill its bucket meanwhile."""
    sleeper, other = open_redis(server.url, 9 * MIB), open_redis(server.url, 9 * MIB)
    real = sleeper._topology.exchange

    def exchange(requests: Any, deadline: float, **options: Any) -> Any:
        if any(request.payload_bytes for request in requests):
            assert all(other.write([make_page(n, MIB)])[0] for n in range(100, 112))
        return real(requests, deadline, **options)

    monkeypatch.setattr(sleeper._topology, "exchange", exchange)
    assert sleeper.write([make_page(1, 300_000)]) == [False]
    recount(server, budget=9 * MIB).check_entries()


def test_what_the_server_drops_by_itself_leaves_the_sums(
    server: RedisServer, open_redis: Callable[..., RedisTier], recount: Callable[..., Recount]
) -> None:
    tier = open_redis(server.url, 16 * MIB)
    pages = [make_page(n, 500_000) for n in range(8)]
    assert all(tier.write(pages))
    values = list(server.client.scan_iter(match="kvstore:{0}:chunk:*:0"))
    server.client.delete(values[0])
    found = read_pages(tier, pages)
    assert 0 < found.count(False) <= 4
    assert tier.contains([page.key for page in pages]) == found
    left = [name for name in server.client.scan_iter(match="kvstore:{0}:chunk:*") if name[:-1] == values[0][:-1]]
    for name in left:  # the chunk's other part expires at the same moment
        server.client.delete(name)
    assert all(tier.write(pages))
    assert all(read_pages(tier, pages))
    recount(server, budget=16 * MIB).check_entries()


class Operations(RuleBasedStateMachine):
    """Two nodes on a small Redis, in any order, against a dictionary that may only know too much."""

    server: RedisServer
    tiers: list[RedisTier]
    recount: Callable[..., Recount]
    eventually: Callable[..., None]
    limit = 9 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.server.client.flushall()
        self.stored: set[int] = set()
        self.removed: set[int] = set()

    @staticmethod
    @functools.cache
    def page(number: int) -> PageWrite:
        return make_page(number, [1000, 70_000, 300_000, MIB, 2_500_000][number % 5])

    @rule(node=st.integers(0, 1), numbers=st.lists(st.integers(0, 24), max_size=8))
    def write(self, node: int, numbers: list[int]) -> None:
        answers = self.tiers[node].write([self.page(number) for number in numbers])
        here = {number for number, answer in zip(numbers, answers, strict=True) if answer}
        found = read_pages(self.tiers[1 - node], [self.page(number) for number in here])
        assert all(found), "answered as stored, and not there"
        self.stored |= here
        self.removed -= set(numbers)

    @rule(node=st.integers(0, 1), numbers=st.lists(st.integers(0, 24), max_size=8))
    def read(self, node: int, numbers: list[int]) -> None:
        pages = [self.page(number) for number in numbers]
        found = read_pages(self.tiers[node], pages)
        assert {number for number, answer in zip(numbers, found, strict=True) if answer} <= self.stored - self.removed
        assert self.tiers[node].contains([page.key for page in pages]) == found

    @rule(node=st.integers(0, 1), numbers=st.lists(st.integers(0, 24), max_size=5))
    def remove(self, node: int, numbers: list[int]) -> None:
        self.tiers[node].remove([self.page(number).key for number in numbers])
        self.removed |= set(numbers)

    @rule(number=st.integers(0, 30))
    def server_drops_a_value(self, number: int) -> None:
        names = sorted(self.server.client.scan_iter(match="kvstore:{*}:chunk:*:0"))
        if not names:
            return
        base = names[number % len(names)][:-1]
        self.server.client.delete(*[base + b"%d" % part for part in range(3)])
        for tier in self.tiers:
            read_pages(tier, [self.page(number) for number in range(25)])

    @invariant()
    def the_sums_are_exact(self) -> None:
        found = self.recount(self.server, budget=self.limit)
        found.check_entries()
        assert found.used_bytes <= self.limit
        self.eventually(lambda: self.tiers[0].statistics().used_bytes == found.used_bytes)


@pytest.mark.hypothesis
def test_any_order_of_operations(
    server: RedisServer,
    open_redis: Callable[..., RedisTier],
    recount: Callable[..., Recount],
    eventually: Callable[..., None],
) -> None:
    tiers = [open_redis(server.url, Operations.limit, refresh=0.01) for _ in range(2)]

    class Machine(Operations):
        pass

    Machine.server, Machine.tiers, Machine.recount = server, tiers, staticmethod(recount)
    Machine.eventually = staticmethod(eventually)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
