"""Quotas of namespaces: divided over buckets, exact in each, and at nobody else's cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from made_pages import read_pages
from redis_recount import Recount
from redis_servers import Cluster, RedisServer

from kvstore.errors import InvalidRequestError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.quotas import FULL_CHUNK, QUOTA_CHUNKS, share_of
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
LIMIT = 640 * MIB
ONE, OTHER = b"1" * 32, b"2" * 32
Open = Callable[..., RedisTier]


def make(namespace: bytes, number: int, length: int = 300_000) -> PageWrite:
    payload = np.random.default_rng([namespace[0], number]).integers(0, 256, length, np.uint8)
    return PageWrite(namespace + number.to_bytes(32, "big"), xxhash.xxh3_64_intdigest(payload.data), payload)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 1 << 42), st.integers(1, 1 << 14), st.binary(min_size=64))
def test_the_shares_of_all_buckets_are_the_quota(namespace: bytes, quota: int, buckets: int, key: bytes) -> None:
    share = share_of(namespace, quota, buckets)
    bucket = share.bucket_of(key)
    assert 0 <= bucket < buckets
    assert share.limit_in(bucket) == share.limit_bytes
    assert share.limit_bytes * share.spread <= quota
    assert share.limit_bytes >= min(quota, QUOTA_CHUNKS * FULL_CHUNK)
    if buckets < 300:
        limits = [share.limit_in(number) or 0 for number in range(buckets)]
        assert sorted(limits) == [0] * (buckets - share.spread) + [share.limit_bytes] * share.spread


def test_without_a_quota_chunks_go_everywhere() -> None:
    share = share_of(ONE, 0, 7)
    assert {share.bucket_of(b"%d" % number) for number in range(200)} == set(range(7))
    assert {share.limit_in(bucket) for bucket in range(7)} == {None}
    assert share.pages_at_once(1) is None


@pytest.mark.parametrize("quota", [MIB, 4 * MIB, 60 * MIB])
def test_a_namespace_keeps_within_its_quota_at_its_own_cost(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount], quota: int
) -> None:
    """Two nodes; the other namespace is the older one, and would leave first."""
    nodes = [open_redis(cluster.url, LIMIT) for _ in range(2)]
    for node in nodes:
        node.set_quota(ONE, quota)
    others = [make(OTHER, number) for number in range(40)]
    assert all(nodes[0].write(others))
    pages = [make(ONE, number) for number in range(300)]
    for at in range(0, 300, 10):
        node = nodes[at // 10 % 2]
        answers = node.write(pages[at : at + 10])
        assert answers == read_pages(node, pages[at : at + 10])
        assert any(answers)
        assert recount(*cluster.primaries(), budget=LIMIT).by_namespace[ONE] <= quota
    assert all(read_pages(nodes[1], others))
    found = read_pages(nodes[0], pages)
    assert any(found[-10:])
    assert not any(found[:50])
    counted = recount(*cluster.primaries(), budget=LIMIT)
    counted.check_entries()
    assert counted.by_namespace[ONE] > quota / 2 or quota == 60 * MIB
    assert counted.by_namespace[OTHER] > 40 * 300_000


def test_what_was_read_lately_stays_within_the_quota(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, 64 * MIB)
    tier.set_quota(ONE, 4 * MIB)
    hot = make(ONE, 1)
    for number in range(1, 40):
        assert all(tier.write([make(ONE, number)]))
        assert read_pages(tier, [hot]) == [True]
    assert read_pages(tier, [make(ONE, 2)]) == [False]


def test_a_page_larger_than_the_quota_is_refused(
    server: RedisServer, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    tier = open_redis(server.url, 64 * MIB)
    tier.set_quota(ONE, 200_000)
    assert tier.write([make(ONE, 1), make(OTHER, 1)]) == [False, True]
    assert tier.statistics().refused == 1
    assert ONE not in recount(server, budget=64 * MIB).by_namespace


def test_a_quota_that_is_set_later_counts_from_the_next_write_on(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    """In all buckets, also in those that the write does not go to."""
    tier = open_redis(cluster.url, LIMIT)
    pages = [make(ONE, number) for number in range(80)]
    others = [make(OTHER, number) for number in range(20)]
    assert all(tier.write(others))
    assert all(tier.write(pages))
    tier.set_quota(ONE, 10 * MIB)
    assert all(read_pages(tier, pages))
    assert tier.write([make(ONE, 100)]) == [True]
    counted = recount(*cluster.primaries(), budget=LIMIT)
    assert counted.by_namespace[ONE] == tier.used_by(ONE) <= 10 * MIB
    counted.check_entries()
    found = read_pages(tier, pages)
    assert tier.contains([page.key for page in pages]) == found
    assert tier.statistics().evicted == found.count(False)
    assert all(read_pages(tier, others))
    tier.set_quota(ONE, 0)
    assert all(tier.write(pages))
    assert all(read_pages(tier, pages))


def test_what_a_namespace_takes_is_told(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount], eventually: Callable[..., None]
) -> None:
    tier, watcher = open_redis(cluster.url, LIMIT), open_redis(cluster.url, LIMIT)
    pages, others = [make(ONE, number) for number in range(30)], [make(OTHER, number) for number in range(10)]
    assert all(tier.write([*pages, *others]))
    counted = recount(*cluster.primaries(), budget=LIMIT)
    for namespace in (ONE, OTHER):
        assert tier.used_by(namespace) == counted.by_namespace[namespace] > 0
        eventually(lambda namespace=namespace: watcher.used_by(namespace) == counted.by_namespace[namespace])
    assert tier.remove([page.key for page in pages]) == 30
    assert tier.used_by(ONE) == 0
    assert tier.used_by(OTHER) == counted.by_namespace[OTHER]
    eventually(lambda: watcher.used_by(ONE) == 0)
    assert tier.used_by(b"3" * 32) == 0


def test_many_namespaces_take_no_more_than_is_charged(
    server: RedisServer, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    tier = open_redis(server.url, 64 * MIB)
    assert all(tier.write([make(bytes([number]) * 32, 1, 100) for number in range(200)]))
    counted = recount(server, budget=64 * MIB)
    assert counted.memory <= counted.used_bytes
    assert len(counted.by_namespace) == 200


@pytest.mark.parametrize(("prefix", "limit_bytes"), [(b"short", 1), (b"1" * 64, 1), (ONE, -1)])
def test_what_is_no_quota_is_refused(server: RedisServer, open_redis: Open, prefix: bytes, limit_bytes: int) -> None:
    with pytest.raises(InvalidRequestError):
        open_redis(server.url).set_quota(prefix, limit_bytes)
