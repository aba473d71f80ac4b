"""An entry has no checksum: whatever its bits say, it costs no memory, and never leads to a wrong page."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from made_pages import make_page, read_pages
from redis_recount import Recount
from redis_servers import RedisServer

from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis.format.chunk import ChunkHeader, pages_per_chunk
from kvstore.tiers.redis.format.entry import PageEntry, decode
from kvstore.tiers.redis.format.new_chunk import entries_of
from kvstore.tiers.redis.reader import ChunkRead
from kvstore.tiers.tier import PageWrite

MIB = 1 << 20
LIMIT = 64 * MIB
ENTRY_BYTES = 45
Open = Callable[..., RedisTier]


@st.composite
def real_entries(draw: st.DrawFn) -> PageEntry:
    """As a chunk of pages of any length has them."""
    length = draw(st.integers(1, 1 << 25))
    pages = draw(st.integers(1, pages_per_chunk(length)))
    stored = tuple(draw(st.sampled_from([length, max(1, length // 2)])) for _ in range(min(pages, 3)))
    stored += (length,) * (pages - len(stored))
    position = draw(st.integers(0, 1 << 31))
    hashes = (bytes(32),) * pages
    header = ChunkHeader(1, bytes(32), bytes(range(16)), hashes, (length,) * pages, stored, (0,) * pages, position)
    return draw(st.sampled_from(entries_of(header, draw(st.integers(0, (1 << 14) - 1)), len(header.encode()))))


@given(real_entries())
def test_an_entry_comes_back(entry: PageEntry) -> None:
    data = entry.encode()
    assert decode(data) == entry
    assert data.startswith(entry.reference)
    assert decode(data[:-1]) is None
    assert decode(b"\x02" + data[1:]) is None


@given(
    real_entries(),
    st.lists(st.integers(8, 8 * ENTRY_BYTES - 1), min_size=1, max_size=4)
    | st.builds(lambda field, bits: [8 * field + bit for bit in bits], st.integers(5, 41), st.sets(st.integers(0, 31))),
)
def test_no_flipped_bits_ask_for_more_than_a_chunk_has(entry: PageEntry, flips: list[int]) -> None:
    data = bytearray(entry.encode())
    assert len(data) == ENTRY_BYTES
    for bit in flips:
        data[bit // 8 % ENTRY_BYTES] ^= 0x80 >> bit % 8
    found = decode(bytes(data))
    if found is None:
        return
    read = ChunkRead(found)
    read.add(0, bytes(64), found, np.empty(min(found.length, 64 * MIB), np.uint8))
    assert read.ranges()
    assert len(read._header) <= 64 << 10
    assert read.stored_bytes <= found.length
    assert found.offset + found.stored_bytes <= 2 * MIB or found.offset == 0


def test_a_flipped_bit_of_any_field_is_a_miss_or_the_page(
    server: RedisServer, open_redis: Open, recount: Callable[..., Recount]
) -> None:
    """Without memory for what it says, and what it names can be stored again."""
    tier = open_redis(server.url, LIMIT, refresh=1000.0)
    before, page, after = (make_page(number, 50_000) for number in range(3))
    after = after._replace(parent=page.key)
    assert all(tier.write([before, page, make_page(7, 50_000)]))
    name = b"kvstore:page:" + page.key
    read_pages(tier, [before, page])
    wrong = []
    tracemalloc.start()
    try:
        for bit in range(0, 8 * ENTRY_BYTES, 5):
            entry = bytearray(server.client.get(name))
            entry[bit // 8] ^= 0x80 >> bit % 8
            server.client.set(name, bytes(entry))
            tracemalloc.reset_peak()
            found = read_pages(tier, [page])  # compares the bytes
            if tracemalloc.get_traced_memory()[1] > 4 * MIB:
                wrong.append((bit, "memory"))
            if not found[0] and not all(tier.write([page])):
                wrong.append((bit, "can't be stored again"))
            if tier.write([page, after]) != [True, True] or read_pages(tier, [page, after]) != [True, True]:
                wrong.append((bit, "what follows it"))
            tier.remove([after.key])
            if not found[0] and read_pages(tier, [page]) != [True]:
                wrong.append((bit, "not found again"))
            server.client.delete(name)
            assert tier.write([page]) == [True]
    finally:
        tracemalloc.stop()
    assert not wrong
    recount(server, budget=LIMIT)


def test_a_page_behind_one_at_a_place_beyond_all_is_found(server: RedisServer, open_redis: Open) -> None:
    tier = open_redis(server.url, LIMIT)
    page, following = make_page(1, 50_000), make_page(2, 50_000)
    assert tier.write([page]) == [True]
    name = b"kvstore:page:" + page.key
    entry = server.client.get(name)
    for position in ((1 << 31) - 1, 1 << 31, (1 << 31) + 1023, (1 << 32) - 1):
        server.client.set(name, entry[:-4] + position.to_bytes(4, "big"))
        child: PageWrite = following._replace(parent=page.key)
        assert tier.write([child]) == [True]
        assert read_pages(tier, [child]) == [True]
        assert tier.remove([child.key]) == 1
