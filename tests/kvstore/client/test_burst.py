"""Far more pages than the arena holds, and pages of a size that divides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis_servers import RedisServer

import kvstore

MIB = 1 << 20
ARENA = 4 * MIB
PAGE_BYTES = 60_000
PROMPT = 8
PROMPTS = 4 * ARENA // (PROMPT * PAGE_BYTES) + 1
ODD_BYTES = 1_124_352


@pytest.fixture
def redis(short_folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(short_folder / "redis")
    yield server
    server.close()


def store_prompts(pages: kvstore.Namespace, hashes, payload) -> kvstore.StoreResult:
    """Four times what the arena holds, prompt after prompt."""
    result = kvstore.StoreResult()
    for number in range(PROMPTS):
        result += pages.store(hashes(PROMPT, number), payload(PROMPT, number, PAGE_BYTES))
    assert result.stored + result.present + result.refused == PROMPTS * PROMPT
    return result


def load_prompts(pages: kvstore.Namespace, hashes, payload) -> int:
    """Load every page that a lookup finds, alone. Returns how many, and all have their bytes."""
    loaded = 0
    into = np.zeros(PAGE_BYTES, np.uint8)
    for number in range(PROMPTS):
        found = pages.lookup(hashes(PROMPT, number)).present
        for block_hash, right, here in zip(
            hashes(PROMPT, number), payload(PROMPT, number, PAGE_BYTES), found, strict=True
        ):
            assert pages.load([block_hash], [into]) == here
            assert not here or np.array_equal(into, right)
            loaded += here
    return loaded


def check_newest(pages: kvstore.Namespace, hashes) -> None:
    """As many of the newest prompts as take half of the arena are whole."""
    newest = range(PROMPTS - ARENA // 2 // (PROMPT * PAGE_BYTES), PROMPTS)
    assert all(pages.lookup(hashes(PROMPT, number)).prefix == PROMPT for number in newest)


def test_a_burst_that_no_disk_keeps_up_with(make_place, hashes, payload):
    """Nothing is written below while it lasts: every page that leaves is overrun, and is not found any more."""
    place = make_place(arena=ARENA, disk_limit=64 * MIB)
    pages = place.connect().namespace(kvstore.Layout(model="burst", block_size=16, page_bytes=PAGE_BYTES))
    with place.store.write_back.writing:
        result = store_prompts(pages, hashes, payload)
        assert (result.present, result.refused) == (0, 0), "there is room to make, and it said that there was none"
        check_newest(pages, hashes)
        found = sum(sum(pages.lookup(hashes(PROMPT, number)).present) for number in range(PROMPTS))
        assert found == result.stored - place.counter("overrun") == place.store.statistics().arena_pages
        assert place.counter("evicted") == 0
    assert place.store.flush() <= found
    assert load_prompts(pages, hashes, payload) == found, "what was not overrun is there, in the arena or on disk"


def test_a_burst_with_a_disk_behind_it(make_place, hashes, payload):
    """What the disk got in time is found there; what it did not is counted, and is not found."""
    place = make_place(arena=ARENA, disk_limit=64 * MIB)
    pages = place.connect().namespace(kvstore.Layout(model="burst", block_size=16, page_bytes=PAGE_BYTES))
    result = store_prompts(pages, hashes, payload)
    assert (result.present, result.refused) == (0, 0)
    check_newest(pages, hashes)
    place.store.flush()
    overrun = place.counter("overrun")
    assert place.store.statistics().dirty_pages == 0
    assert load_prompts(pages, hashes, payload) == result.stored - overrun
    assert place.counter("overrun") == overrun, "loading pushed out only what is on disk"


def test_a_burst_without_a_disk(make_place, hashes, payload):
    place = make_place(arena=ARENA, disk_limit=0)
    pages = place.connect().namespace(kvstore.Layout(model="burst", block_size=16, page_bytes=PAGE_BYTES))
    result = store_prompts(pages, hashes, payload)
    assert (result.present, result.refused) == (0, 0)
    check_newest(pages, hashes)
    assert load_prompts(pages, hashes, payload) == result.stored - place.counter("evicted")
    assert place.counter("overrun") == 0, "there is no tier that should have had them"


def test_pages_of_1124352_bytes_through_arena_and_disk(make_place, hashes, payload):
    place = make_place(arena=8 * MIB)
    pages = place.connect().namespace(kvstore.Layout(model="odd", block_size=16, page_bytes=ODD_BYTES))
    right = payload(12, 3, ODD_BYTES)
    for at in range(0, 12, 2):
        assert pages.store(hashes(12)[at : at + 2], right[at : at + 2]).stored == 2
        place.store.flush()
    assert set(pages.lookup(hashes(12)).tiers) == {"arena", "disk"}
    for at in range(0, 12, 2):
        into = np.zeros((2, ODD_BYTES), np.uint8)
        assert pages.load(hashes(12)[at : at + 2], into) == 2
        assert np.array_equal(into, right[at : at + 2])
    assert place.counter("overrun") == 0


def test_pages_of_1124352_bytes_through_redis(make_place, hashes, payload, redis, eventually):
    """With no disk, what left the arena comes from Redis."""
    place = make_place(arena=8 * MIB, disk_limit=0, redis=redis.url, redis_limit=64 * MIB)
    pages = place.connect().namespace(kvstore.Layout(model="odd", block_size=16, page_bytes=ODD_BYTES))
    right = payload(12, 3, ODD_BYTES)
    for at in range(0, 12, 2):
        pages.store(hashes(12)[at : at + 2], right[at : at + 2])
        eventually(lambda: place.counter("shared") + place.counter("unshared") == place.counter("stored"))
    eventually(lambda: set(pages.lookup(hashes(12)).tiers) == {"arena", "redis"})
    into = np.zeros((12, ODD_BYTES), np.uint8)
    for at in range(12):
        # A server that is busy for a moment costs a miss.
        eventually(lambda at=at: pages.load(hashes(12)[at : at + 1], into[at : at + 1]) == 1)
    assert np.array_equal(into, right)
