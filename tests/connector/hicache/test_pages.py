"""The three calls that carry pages, at real nodes: what was stored is found, held, and loaded as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from faulty_files import FaultyFiles
from host_pool import HostPool

import kvstore
from kvstore.client.paths.results import Lookup, StoreResult
from kvstore.connector.health import BACKOFF
from kvstore.connector.hicache.found_pages import FoundPart
from kvstore.connector.hicache.pages import CALL_SECONDS, HELD_SHARE, HiCachePages
from kvstore.errors import UnavailableError

PART = 4096
LAYOUT = kvstore.Layout(model="m", dtype="float32", block_size=16, page_bytes=2 * PART)
PAGES = 40


def hashes_of(name: str, count: int = PAGES) -> list[bytes]:
    return kvstore.hash_blocks([name.encode()[0], *range(16 * count)], 16)[:count]


@pytest.fixture
def rank() -> Iterator[Callable[..., HiCachePages]]:
    """Make the pages of one rank at a node."""
    made: list[HiCachePages] = []

    def make(url: str, **options: Any) -> HiCachePages:
        client = kvstore.connect(url)
        pages = HiCachePages(client, **options)
        pages.open(client.namespace(LAYOUT, lazy=True))
        made.append(pages)
        return pages

    yield make
    for pages in made:
        pages.close()


@pytest.fixture
def pool() -> HostPool:
    pool = HostPool(PAGES, PART)
    pool.fill(1)
    return pool


@pytest.fixture(params=["unix", "kv"])
def url(request: pytest.FixtureRequest, start_node: Callable[..., Any]) -> str:
    node = start_node()
    return f"unix://{node.config.socket}" if request.param == "unix" else f"kv://127.0.0.1:{node.port}"


def everything(pool: HostPool) -> Any:
    return pool.pages(list(range(PAGES)))


def test_what_one_rank_stored_another_finds_and_loads(url: str, rank: Callable[..., Any], pool: HostPool) -> None:
    hashes = hashes_of("a")
    first, second = rank(url), rank(url)
    assert first.exists(hashes) == 0
    assert first.store(hashes, everything(pool)) == [True] * PAGES
    assert second.exists(hashes + hashes_of("b")) == PAGES
    other = HostPool(PAGES, PART)
    assert second.load(hashes[:30], other.pages(list(range(30)))) == 30
    assert second.load(hashes[30:], other.pages(list(range(30, 40)))) == 10
    assert (other.planes == pool.planes).all()
    loads, stores = second.rates.take()
    assert (loads.pages, stores.pages) == ([30, 10], [])
    assert second.rates.take()[0].pages == []


def test_pages_that_are_known_cost_no_bytes(url: str, rank: Callable[..., Any], pool: HostPool) -> None:
    hashes = hashes_of("a")
    pages = rank(url)
    assert pages.store(hashes[:30], pool.pages(list(range(30)))) == [True] * 30
    before = pool.planes.copy()
    pool.planes[:, :30] = 0  # would be read now
    assert pages.store(hashes, everything(pool), b"") == [True] * PAGES
    assert pages.rates.take()[1].pages == [30, 10]
    other = HostPool(PAGES, PART)
    assert pages.load(hashes, everything(other)) == PAGES
    assert (other.planes == before).all()


def test_a_page_that_is_missing_cuts_the_prefix(url: str, rank: Callable[..., Any], pool: HostPool) -> None:
    hashes = hashes_of("a")
    pages = rank(url)
    pages.store(hashes, everything(pool))
    with kvstore.connect(url) as client:
        assert client.namespace(LAYOUT).evict([hashes[25]]) == 1
    assert pages.exists(hashes) == 25
    other = HostPool(PAGES, PART)
    assert pages.load(hashes, everything(other)) == 25
    assert (other.planes[:, :25] == pool.planes[:, :25]).all()
    assert pages.store(hashes, everything(pool)) == [True] * PAGES, "one page is stored again"
    assert pages.rates.take()[1].pages == [40, 1]


def test_what_was_found_stays_until_it_is_read(
    start_node: Callable[..., Any], rank: Callable[..., Any], pool: HostPool
) -> None:
    node = start_node(arena=4 << 20, disk_limit=0)
    url = f"unix://{node.config.socket}"
    hashes = hashes_of("a")
    pages = rank(url)
    pages.store(hashes, everything(pool))
    assert pages.exists(hashes) == PAGES

    def press(client: kvstore.Client) -> None:
        others = client.namespace(LAYOUT)
        for number in range(40):  # three times what the arena holds
            fresh = kvstore.hash_blocks([1000 + number, *range(16 * PAGES)], 16)[:PAGES]
            others.store(fresh, bytes(PAGES * 2 * PART))

    with kvstore.connect(url) as client:
        press(client)
        other = HostPool(PAGES, PART)
        assert pages.load(hashes, everything(other)) == PAGES
        assert (other.planes == pool.planes).all()
        press(client)  # now nothing holds them
        assert pages.exists(hashes) == 0


def test_an_engine_holds_its_share_at_most(
    start_node: Callable[..., Any], rank: Callable[..., Any], pool: HostPool
) -> None:
    node = start_node(arena=4 << 20)
    clock = FakeClock()
    pages = rank(f"unix://{node.config.socket}", clock=clock.monotonic, holders=2)
    prompts = [hashes_of(name) for name in "abcd"]
    for hashes in prompts:
        pages.store(hashes, everything(pool))
    share = (4 << 20) // HELD_SHARE // 2
    for hashes in prompts:
        assert pages.exists(hashes) == PAGES
    assert share - 2 * PART < pages._found.held_bytes <= share
    clock.now += CALL_SECONDS
    assert pages._found.held_bytes == 0
    assert pages.exists(prompts[3]) == PAGES
    assert 0 < pages._found.held_bytes <= share
    other = HostPool(PAGES, PART)
    for hashes in prompts:
        assert pages.load(hashes, everything(other)) == PAGES, "what is not held is there all the same"
        assert (other.planes == pool.planes).all()


def test_pages_on_disk_come_back(start_node: Callable[..., Any], rank: Callable[..., Any], pool: HostPool) -> None:
    node = start_node(arena=4 << 20)
    url = f"unix://{node.config.socket}"
    pages = rank(url)
    prompts = [hashes_of(chr(97 + number)) for number in range(20)]  # more than the arena holds
    for hashes in prompts:
        assert pages.store(hashes, everything(pool)) == [True] * PAGES
        with kvstore.connect(url) as client:
            client.flush()
    for hashes in prompts[:3]:
        other = HostPool(PAGES, PART)
        assert pages.exists(hashes) == PAGES
        assert pages.load(hashes, everything(other)) == PAGES
        assert (other.planes == pool.planes).all()


def test_until_it_is_known_what_pages_mean_everything_is_a_miss(url: str, pool: HostPool) -> None:
    client = kvstore.connect(url)
    pages = HiCachePages(client)
    hashes = hashes_of("a")
    assert not pages.is_open
    assert pages.exists(hashes) == pages.load(hashes, everything(pool)) == pages.clear() == 0
    assert pages.store(hashes, everything(pool)) == [False] * PAGES
    pages.open(client.namespace(LAYOUT, lazy=True))
    assert pages.store(hashes, everything(pool)) == [True] * PAGES
    assert pages.clear() == PAGES
    assert pages.exists(hashes) == 0
    pages.close()
    pages.close()
    assert pages.exists(hashes) == 0


def test_a_node_that_is_gone_is_a_miss_and_one_that_comes_back_is_found(
    node_process: Callable[..., Any],
    rank: Callable[..., Any],
    pool: HostPool,
    eventually: Callable[..., None],
) -> None:
    node = node_process()
    clock = FakeClock()
    pages = rank(node.url, clock=clock.monotonic)
    hashes = hashes_of("a")
    assert pages.store(hashes, everything(pool)) == [True] * PAGES
    assert pages.exists(hashes) == PAGES
    node.kill()
    other = HostPool(PAGES, PART)
    loaded = pages.load(hashes, everything(other))  # the mapping may still have them
    assert (other.planes[:, :loaded] == pool.planes[:, :loaded]).all()
    fresh = hashes_of("z")
    assert pages.store(fresh, everything(pool)) == [False] * PAGES
    assert pages.load(fresh, everything(other)) == 0
    node.start()

    def found() -> bool:
        clock.now += BACKOFF
        return pages.exists(hashes) == PAGES

    eventually(found)
    assert pages.load(hashes, everything(other)) == PAGES
    assert (other.planes == pool.planes).all()
    assert pages.store(fresh, everything(pool)) == [True] * PAGES


def test_pages_of_other_weights_are_neither_found_nor_stored(
    start_node: Callable[..., Any], rank: Callable[..., Any], pool: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"unix://{start_node().config.socket}"
    weights = "default"
    changing, other = rank(url, weights=lambda: weights), rank(url)
    assert all(changing.store(hashes_of("a"), everything(pool)))
    weights = "step 2"
    assert changing.exists(hashes_of("a")) == 0
    assert changing.load(hashes_of("a"), everything(pool)) == 0
    assert not any(changing.store(hashes_of("b"), everything(pool)))
    weights = "default"  # whoever names them so again may mean others
    assert changing.exists(hashes_of("a")) == 0
    assert other.load(hashes_of("a"), everything(pool)) == PAGES
    assert other.exists(hashes_of("b")) == 0
    [said] = [each.message for each in caplog.records if "weights" in each.message]
    assert "the engine's weights are 'step 2' now, those of its pages are 'default'; restart it" in said


class FullNamespace:
    """One with room for two more pages, and some that are there already."""

    layout = LAYOUT
    batch_pages = 4

    def __init__(self, present: set[bytes]) -> None:
        self.present = present
        self.batches: list[list[bytes]] = []

    def lookup(self, hashes: list[bytes], *, counts: bool = True) -> Lookup:
        there = tuple(each in self.present for each in hashes)
        return Lookup(there.index(False) if False in there else len(there), there, (None,) * len(there))

    def prepare_store(self, hashes: list[bytes], *, parent: bytes = b"") -> Any:
        self.batches.append(hashes)
        self.present.update(hashes[:2])

        def finish(publish: bool) -> StoreResult:
            return StoreResult(stored=2 * publish)

        return kvstore.PendingStore([None] * len(hashes), bytes([2] * (len(hashes) - 2)), finish)


def test_of_a_full_node_only_what_it_has_not_is_refused(pool: HostPool) -> None:
    hashes = hashes_of("a", 12)
    namespace = FullNamespace({hashes[0], hashes[10]})
    client: Any = None
    pages = HiCachePages(client)
    pages.open(namespace)  # type: ignore[arg-type]
    there = pages.store(hashes, pool.pages(list(range(12))))
    assert namespace.batches == [hashes[1:5]], "what comes behind a page that was refused is of no use"
    assert [place for place, present in enumerate(there) if present] == [0, 1, 2, 10]


class FailingNamespace(FullNamespace):
    """A node that goes in the middle of a call."""

    def prepare_store(self, hashes: list[bytes], *, parent: bytes = b"") -> Any:
        if self.batches:
            raise UnavailableError("the node went")
        self.batches.append(hashes)
        return kvstore.PendingStore([None] * len(hashes), bytes(4), lambda publish: StoreResult(stored=4 * publish))


def test_what_was_stored_before_the_node_went_counts(pool: HostPool) -> None:
    hashes = hashes_of("a", 12)
    client: Any = None
    pages = HiCachePages(client)
    pages.open(FailingNamespace({hashes[11]}))  # type: ignore[arg-type]
    there = pages.store(hashes, pool.pages(list(range(12))))
    assert [place for place, present in enumerate(there) if present] == [0, 1, 2, 3, 11]


def test_what_was_copied_behind_the_end_of_a_lease_is_copied_anew(
    url: str, rank: Callable[..., Any], pool: HostPool
) -> None:
    hashes = hashes_of("a")
    pages = rank(url)
    pages.store(hashes, everything(pool))
    others = [np.zeros(2 * PART, np.uint8) for _ in hashes]  # what somebody else has written into the slots since
    lost = kvstore.PendingLoad(others, ["arena"] * PAGES, lambda: 0)
    pages._found.add(FoundPart(tuple(hashes), lost, 1, time.monotonic() + 60))
    into = HostPool(PAGES, PART)
    assert pages.load(hashes, everything(into)) == PAGES
    assert (into.planes == pool.planes).all()


class ChangingNamespace(FullNamespace):
    """One in which pages leave while they are copied."""

    batch_pages = 128

    def borrow(self, hashes: list[bytes], *, counts: bool = True) -> kvstore.PendingLoad:
        self.batches.append(hashes)
        return kvstore.PendingLoad([np.ones(2 * PART, np.uint8)] * len(hashes), ["arena"] * len(hashes), lambda: 25)


def test_a_page_that_goes_while_it_is_copied_cuts_the_prefix(pool: HostPool) -> None:
    hashes = hashes_of("a")
    client: Any = None
    pages = HiCachePages(client)
    namespace = ChangingNamespace(set())
    pages.open(namespace)  # type: ignore[arg-type]
    assert pages.load(hashes, everything(pool)) == 25
    assert namespace.batches == [hashes], "nothing behind it is read"


def test_of_an_arena_that_is_too_small_nothing_is_said_to_be_there_that_is_not(
    start_node: Callable[..., Any], rank: Callable[..., Any], pool: HostPool
) -> None:
    node = start_node(arena=1 << 20, disk_limit=0)
    pages = rank(f"unix://{node.config.socket}")
    for name in "abcdefgh":  # each is a third of the arena
        hashes = hashes_of(name)
        there = pages.store(hashes, everything(pool))
        found = pages.exists(hashes)
        assert found >= there.index(False) if False in there else found == PAGES
        into = HostPool(PAGES, PART)
        loaded = pages.load(hashes, everything(into))
        assert loaded == found
        assert (into.planes[:, :loaded] == pool.planes[:, :loaded]).all()


def test_pages_on_a_disk_that_hangs_are_a_miss(
    start_node: Callable[..., Any],
    rank: Callable[..., Any],
    pool: HostPool,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
) -> None:
    faulty = FaultyFiles(monkeypatch)
    node = start_node(arena=1 << 20)
    url = f"unix://{node.config.socket}"
    clock = FakeClock()
    pages = rank(url, clock=clock.monotonic)
    for name in "abcdef":
        assert pages.store(hashes_of(name), everything(pool)) == [True] * PAGES
        with kvstore.connect(url) as client:
            client.flush()
    faulty.fail("hang", "read")
    into = HostPool(PAGES, PART)
    try:
        assert pages.load(hashes_of("a"), everything(into)) == 0
    finally:
        faulty.let_go()

    def loaded() -> bool:
        clock.now += BACKOFF
        return pages.load(hashes_of("a"), everything(into)) == PAGES

    eventually(loaded)
    assert (into.planes == pool.planes).all()
