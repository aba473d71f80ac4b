"""Compaction: fragments of a chain become one chunk, whoever writes, reads or removes them meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash
from made_pages import read_pages
from redis_recount import Recount
from redis_servers import Cluster, RedisServer

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.compaction import begins_at_boundary, completes, precedes
from kvstore.tiers.redis.format.chunk import ChunkHeader
from kvstore.tiers.redis.format.new_chunk import entries_of
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
LIMIT = 256 * MIB
LENGTH = 200_000  # ten to a full chunk
Open = Callable[..., RedisTier]


def chain(name: int, pages: range, shared: int = 0) -> list[PageWrite]:
    """Pages of a prompt; the first ``shared`` are those of prompt 0."""

    def key(number: int) -> bytes:
        return bytes(32) + (0 if number < shared else name).to_bytes(16, "big") + number.to_bytes(16, "big")

    out = []
    for number in pages:
        payload = np.random.default_rng([name if number >= shared else 0, number]).integers(0, 256, LENGTH, np.uint8)
        parent = key(number - 1) if number else b""
        out.append(PageWrite(key(number), xxhash.xxh3_64_intdigest(payload.data), payload, parent))
    return out


def fragment(first: int, count: int, name: int = 1, length: int = LENGTH, parent: bytes = b"p" * 32) -> ChunkHeader:
    """The header of a chunk of some pages of a prompt, from the ``first`` on."""
    lengths = (length,) * count
    hashes = tuple(bytes([name]) * 16 + number.to_bytes(16, "big") for number in range(first, first + count))
    nonce = bytes([name]) * 8 + first.to_bytes(8, "big")
    return ChunkHeader(0, bytes(32), nonce, hashes, lengths, lengths, (0,) * count, first, parent)


def test_a_fragment_that_ends_at_a_boundary_completes_a_chunk() -> None:
    assert [completes(fragment(3, count)) for count in (1, 6, 7, 8)] == [False, False, True, False]
    assert not completes(fragment(0, 10)), "it is whole"
    assert completes(fragment(19, 1))
    assert [begins_at_boundary(fragment(first, 1)) for first in (0, 9, 10, 11)] == [True, False, True, False]
    assert begins_at_boundary(fragment(3, 1, parent=b"")), "nobody knows what comes before it"


def test_a_fragment_precedes_another_only_if_nothing_else_lies_between() -> None:
    def preceded_by(header: ChunkHeader, entry_of: ChunkHeader | None = None) -> bool:
        entry = entries_of(entry_of or header, 0, 100)[-1]
        return precedes(header, entry, fragment(4, 6))

    assert preceded_by(fragment(1, 3))
    assert not preceded_by(fragment(1, 4)), "another prompt goes on there"
    assert not preceded_by(fragment(1, 2))
    assert not preceded_by(fragment(1, 3, length=LENGTH + 1))
    assert not preceded_by(fragment(1, 3), entry_of=fragment(1, 3, name=2)), "not the chunk that was asked for"


def budget(cluster: Cluster) -> int:
    return LIMIT // int(cluster.client.get("kvstore:buckets"))


@pytest.mark.parametrize(
    "turns", [[4, 10], [1, 2, 3, 10], [13, 15, 20], [9, 10, 11, 20], [7, 27], [10, 20, 30], [3, 30]]
)
def test_fragments_that_are_written_in_turns_become_one_chunk(
    cluster: Cluster,
    open_redis: Open,
    recount: Callable[..., Recount],
    eventually: Callable[..., None],
    turns: list[int],
) -> None:
    nodes = [open_redis(cluster.url, LIMIT) for _ in range(2)]
    start = 0
    for turn, end in enumerate(turns):
        assert all(nodes[turn % 2].write(chain(1, range(start, end))))
        start = end
        for node in nodes:
            assert all(read_pages(node, chain(1, range(end))))
    found = recount(*cluster.primaries(), budget=budget(cluster))
    found.check_entries()
    assert sorted(found.chunks.values()) == sorted([10] * (turns[-1] // 10) + [turns[-1] % 10] * (turns[-1] % 10 > 0))
    eventually(lambda: nodes[0].statistics().pages == turns[-1])


def test_a_branch_does_not_take_the_trunk_away(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    tier = open_redis(cluster.url, LIMIT)
    assert all(tier.write(chain(0, range(8))))
    assert all(tier.write(chain(1, range(5, 10), shared=5)))  # goes on in the middle of a chunk
    assert all(read_pages(tier, chain(0, range(8)) + chain(1, range(10), shared=5)))
    found = recount(*cluster.primaries(), budget=budget(cluster))
    found.check_entries()
    assert sorted(found.chunks.values()) == [5, 8]


def test_a_page_of_a_fragment_that_was_removed_stays_removed(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    tier = open_redis(cluster.url, LIMIT)
    assert all(tier.write(chain(1, range(4))))
    assert tier.remove([page.key for page in chain(1, range(1, 3))]) == 2
    assert all(tier.write(chain(1, range(4, 10))))
    assert read_pages(tier, chain(1, range(10))) == [True, False, False] + [True] * 7
    recount(*cluster.primaries(), budget=budget(cluster)).check_entries()


def test_a_damaged_fragment_is_not_merged(
    server: RedisServer, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(chain(1, range(4))))
    [name] = server.client.scan_iter(match="kvstore:{*}:chunk:*:0")
    value = bytearray(server.client.get(name))
    value[-1] ^= 1
    server.client.set(name, bytes(value))
    assert all(tier.write(chain(1, range(4, 10))))
    assert read_pages(tier, chain(1, range(10))) == [True] * 3 + [False] + [True] * 6
    recount(server, budget=LIMIT).check_entries()


def test_fragments_are_merged_while_others_read_them(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    """No reader ever has a wrong byte, nor a miss: what moved is found where it went."""
    writer, reader = open_redis(cluster.url, LIMIT), open_redis(cluster.url, LIMIT)
    stored = [0] * 4
    done = threading.Event()
    reads = [0]

    def load() -> None:
        while not done.is_set():
            for prompt in range(4):
                some = chain(prompt + 1, range(stored[prompt]))
                assert all(read_pages(reader, some)), "a page was lost on its way"
                reads[0] += len(some)

    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load) for _ in range(2)]
        try:
            for end in range(1, 21):
                for prompt in range(4):
                    assert all(writer.write(chain(prompt + 1, range(end - 1, end))))
                    stored[prompt] = end
        finally:
            done.set()
        for future in loads:
            future.result()
    assert reads[0] > 100
    found = recount(*cluster.primaries(), budget=budget(cluster))
    found.check_entries()
    assert len(found.chunks) < 20


def test_two_nodes_complete_the_same_chunk_at_once(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    nodes = [open_redis(cluster.url, LIMIT) for _ in range(2)]
    for prompt in range(6):
        assert all(nodes[0].write(chain(prompt, range(6))))
        barrier = threading.Barrier(2)

        def store(node: RedisTier, prompt: int = prompt, barrier: threading.Barrier = barrier) -> list[bool]:
            pages = chain(prompt, range(6, 10))
            barrier.wait()
            return node.write(pages)

        with ThreadPoolExecutor(2) as threads:
            assert all(all(answers) for answers in threads.map(store, nodes))
        for node in nodes:
            assert all(read_pages(node, chain(prompt, range(10))))
    recount(*cluster.primaries(), budget=budget(cluster)).check_entries()


def test_fragments_that_are_merged_while_another_node_writes_one(
    cluster: Cluster, open_redis: Open, recount: Callable[..., Recount], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node saw of entries is old when it replaces them: who points a page elsewhere meanwhile keeps it."""
    quick, slow = open_redis(cluster.url, LIMIT), open_redis(cluster.url, LIMIT)
    assert all(quick.write(chain(1, range(6))))
    assert all(quick.write(chain(1, range(6, 9))))
    real = slow._topology.exchange
    calls = [0]

    def exchange(requests: Any, deadline: float, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:  # it has the entries of pages 6 to 8; now these become one chunk elsewhere
            assert all(quick.write(chain(1, range(6, 10))))
        return real(requests, deadline, **options)

    monkeypatch.setattr(slow._topology, "exchange", exchange)
    assert all(slow.write(chain(1, range(6, 10))))
    for node in (quick, slow):
        assert all(read_pages(node, chain(1, range(10))))
    found = recount(*cluster.primaries(), budget=budget(cluster))
    found.check_entries()
    assert list(found.chunks.values()) == [10]


def test_merging_in_a_bucket_that_is_full(
    server: RedisServer, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    tier = open_redis(server.url, 9 * MIB)
    for prompt in range(12):
        for at in range(0, 10, 2):
            pages = chain(prompt, range(at, at + 2))
            answers = tier.write(pages)
            assert answers == read_pages(tier, pages)
            recount(server, budget=9 * MIB).check_entries()
