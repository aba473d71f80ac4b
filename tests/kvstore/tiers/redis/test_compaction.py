import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash
from made_pages import read_pages

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.tier import PageBytes

MIB = 1 << 20
LIMIT = 256 * MIB
LENGTH = 200_000  # ten to a row
Open = Callable[..., RedisTier]


class Linked(NamedTuple):
    """A page that says which one is before it."""

    key: bytes
    checksum: int
    payload: PageBytes
    parent: bytes


def chain(name: int, pages: range, shared: int = 0) -> list[Linked]:
    """Pages of a prompt; the first ``shared`` are those of prompt 0."""

    def key(number: int) -> bytes:
        return bytes(32) + (0 if number < shared else name).to_bytes(16, "big") + number.to_bytes(16, "big")

    out = []
    for number in pages:
        payload = np.random.default_rng([name if number >= shared else 0, number]).integers(0, 256, LENGTH, np.uint8)
        parent = key(number - 1) if number else b""
        out.append(Linked(key(number), xxhash.xxh3_64_intdigest(payload.data), payload, parent))
    return out


def budget(cluster: Any) -> int:
    return LIMIT // int(cluster.client.get("kvstore:buckets"))


@pytest.mark.parametrize(
    "turns", [[4, 10], [1, 2, 3, 10], [13, 15, 20], [9, 10, 11, 20], [7, 27], [10, 20, 30], [3, 30]]
)
def test_a_row_that_is_filled_in_turns_is_one_chunk(
    cluster: Any, open_redis: Open, recount: Any, eventually: Any, turns: list[int]
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


def test_a_branch_does_not_take_the_trunk_away(cluster: Any, open_redis: Open, recount: Any) -> None:
    tier = open_redis(cluster.url, LIMIT)
    assert all(tier.write(chain(0, range(8))))
    assert all(tier.write(chain(1, range(5, 10), shared=5)))  # goes on in the middle of a chunk
    assert all(read_pages(tier, chain(0, range(8)) + chain(1, range(10), shared=5)))
    found = recount(*cluster.primaries(), budget=budget(cluster))
    found.check_entries()
    assert sorted(found.chunks.values()) == [5, 8]


def test_a_tail_that_was_removed_stays_removed(cluster: Any, open_redis: Open, recount: Any) -> None:
    tier = open_redis(cluster.url, LIMIT)
    assert all(tier.write(chain(1, range(4))))
    assert tier.remove([page.key for page in chain(1, range(1, 3))]) == 2
    assert all(tier.write(chain(1, range(4, 10))))
    assert read_pages(tier, chain(1, range(10))) == [True, False, False] + [True] * 7
    recount(*cluster.primaries(), budget=budget(cluster)).check_entries()


def test_a_damaged_tail_is_not_merged(server: Any, open_redis: Open, recount: Any) -> None:
    tier = open_redis(server.url, LIMIT)
    assert all(tier.write(chain(1, range(4))))
    [name] = server.client.scan_iter(match="kvstore:{*}:chunk:*:0")
    value = bytearray(server.client.get(name))
    value[-1] ^= 1
    server.client.set(name, bytes(value))
    assert all(tier.write(chain(1, range(4, 10))))
    assert read_pages(tier, chain(1, range(10))) == [True] * 3 + [False] + [True] * 6
    recount(server, budget=LIMIT).check_entries()


def test_a_tail_is_merged_while_others_read_it(cluster: Any, open_redis: Open, recount: Any) -> None:
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


def test_two_nodes_fill_the_same_row_at_once(cluster: Any, open_redis: Open, recount: Any) -> None:
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


def test_a_row_that_is_merged_while_another_node_writes_it(
    cluster: Any, open_redis: Open, recount: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node saw of entries is old when it replaces them: who points a page elsewhere meanwhile keeps it."""
    quick, slow = open_redis(cluster.url, LIMIT), open_redis(cluster.url, LIMIT)
    assert all(quick.write(chain(1, range(6))))
    assert all(quick.write(chain(1, range(6, 9))))
    real = slow._topology.exchange
    calls = [0]

    def exchange(requests: Any, deadline: float, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:  # it has the entries of pages 6 to 8; now the row becomes one chunk elsewhere
            assert all(quick.write(chain(1, range(6, 10))))
        return real(requests, deadline, **options)

    monkeypatch.setattr(slow._topology, "exchange", exchange)
    assert all(slow.write(chain(1, range(6, 10))))
    for node in (quick, slow):
        assert all(read_pages(node, chain(1, range(10))))
    found = recount(*cluster.primaries(), budget=budget(cluster))
    found.check_entries()
    assert list(found.chunks.values()) == [10]


def test_merging_in_a_bucket_that_is_full(server: Any, open_redis: Open, recount: Any) -> None:
    tier = open_redis(server.url, 9 * MIB)
    for prompt in range(12):
        for at in range(0, 10, 2):
            pages = chain(prompt, range(at, at + 2))
            answers = tier.write(pages)
            assert answers == read_pages(tier, pages)
            recount(server, budget=9 * MIB).check_entries()
