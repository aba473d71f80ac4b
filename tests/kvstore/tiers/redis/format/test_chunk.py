"""A chunk's bytes: its header, where its payload lies, and what it is charged."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import FormatError
from kvstore.tiers.redis.format.chunk import (
    CHUNK_BYTES,
    MOST_HEADER_BYTES,
    MOST_PAGES,
    VALUE_BYTES,
    ChunkHeader,
    allocated,
    charge,
    decode_header,
    extents,
    pages_per_chunk,
    part_sizes,
)
from kvstore.tiers.redis.format.entry import decode

HEADER = ChunkHeader(0, bytes(32), bytes(16), (b"a" * 32, b"b" * 32), (10, 20), (10, 15), (1, 2**64 - 1), 7, b"p" * 32)


def test_a_header_comes_back() -> None:
    data = HEADER.encode()
    assert decode_header(data + b"payload") == HEADER
    assert HEADER.offsets == [0, 10]


@given(st.integers(0, len(HEADER.encode()) - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_noticed(at: int, change: int) -> None:
    data = bytearray(HEADER.encode())
    data[at] ^= change
    with pytest.raises(FormatError):
        decode_header(data)


@given(st.binary(max_size=200))
def test_anything_else_is_no_header_and_no_entry(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_header(b"kvch" + data)
    decode(data)
    assert decode(data[:40]) is None


def test_nonsense_with_a_right_checksum_is_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    for body in ([], {}, {"hashes": b"x" * 33}, {"namespace": 3, "hashes": 3}, 5, "text"):
        packed = msgpack.packb(body)
        monkeypatch.setattr(msgpack, "packb", lambda _, packed=packed: packed)
        data = HEADER.encode()
        monkeypatch.undo()
        with pytest.raises(FormatError):
            decode_header(data)


@given(st.integers(0, 10_000), st.integers(0, 3 * VALUE_BYTES), st.integers(1, 3 * VALUE_BYTES))
def test_extents_cover_a_range_once(header: int, offset: int, length: int) -> None:
    found = list(extents(header, offset, length))
    sizes = part_sizes(header, offset + length)
    assert sum(extent.length for extent in found) == length
    assert sum(sizes) == header + offset + length
    assert all(size <= VALUE_BYTES + (header if part == 0 else 0) for part, size in enumerate(sizes))
    at = offset
    for extent in found:
        assert extent.part * VALUE_BYTES + extent.start - (header if extent.part == 0 else 0) == at
        assert extent.start + extent.length <= sizes[extent.part]
        at += extent.length


@given(st.integers(1, 1 << 24))
def test_the_allocator_wastes_a_fifth_at_most(size: int) -> None:
    assert size <= allocated(size) <= max(size + 16, size * 1.25)
    assert charge([size], 1) > size


def test_a_chunk_of_any_page_size() -> None:
    assert pages_per_chunk(65_536) == 32
    assert pages_per_chunk(CHUNK_BYTES) == pages_per_chunk(8 * CHUNK_BYTES) == 1
    assert pages_per_chunk(1) == MOST_PAGES


@pytest.mark.parametrize("page_bytes", [1, 100, 2048, 2049, 65_536, CHUNK_BYTES - 1, CHUNK_BYTES, 2**32 - 1])
def test_no_header_is_longer_than_entries_may_say(page_bytes: int) -> None:
    pages = pages_per_chunk(page_bytes)
    hashes, lengths = (b"h" * 32,) * pages, (page_bytes,) * pages
    largest = ChunkHeader(1, bytes(32), bytes(16), hashes, lengths, lengths, (2**64 - 1,) * pages, 2**31, bytes(32))
    assert len(largest.encode()) <= MOST_HEADER_BYTES
