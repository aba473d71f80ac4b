from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.segments import record
from kvstore.segments.record import BLOCK, ChunkHeader, SegmentHeader, Trailer

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
stamps = st.binary(min_size=16, max_size=16)
keys = st.binary(min_size=64, max_size=64)
records = st.tuples(keys, u64, u64, u32, st.sampled_from([record.RAW, record.TOMBSTONE]), st.just(b""))


def table_of(records: Iterable[tuple[bytes, int, int, int, int, bytes]]) -> bytes:
    return np.array(list(records), record.RECORDS).tobytes()


@given(st.builds(SegmentHeader, id=u64, stamp=stamps, version=u32))
def test_segment_header_round_trip(header: SegmentHeader) -> None:
    block = record.encode_segment_header(header)
    assert len(block) == BLOCK
    assert record.decode_segment_header(block) == header


@given(
    st.builds(
        ChunkHeader,
        segment=u64,
        stamp=stamps,
        sequence=u32,
        payload_bytes=u64,
        table=st.lists(records, max_size=100).map(table_of),
    )
)
def test_chunk_header_round_trip(header: ChunkHeader) -> None:
    blocks = record.encode_chunk_header(header)
    assert len(blocks) == record.chunk_header_bytes(header.size.records)
    assert record.announced_chunk_header_bytes(blocks[:BLOCK]) == len(blocks)
    assert record.decode_chunk_header(blocks) == header


@given(st.builds(Trailer, segment=u64, stamp=stamps, footer=u64, records=u32, checksum=u64))
def test_trailer_round_trip(trailer: Trailer) -> None:
    block = record.encode_trailer(trailer)
    assert len(block) == BLOCK
    assert record.decode_trailer(block) == trailer


def entry(number: int) -> tuple[bytes, int, int, int, int, bytes]:
    return bytes([number]) * 64, number * BLOCK, number, 100, record.RAW, b""


@pytest.mark.parametrize(
    ("blocks", "decode"),
    [
        (record.encode_segment_header(SegmentHeader(7, b"s" * 16)), record.decode_segment_header),
        (
            record.encode_chunk_header(ChunkHeader(7, b"s" * 16, 3, BLOCK, table_of(map(entry, range(60))))),
            record.decode_chunk_header,
        ),
        (record.encode_trailer(Trailer(7, b"s" * 16, BLOCK, 9, 5)), record.decode_trailer),
    ],
    ids=["segment header", "chunk header", "trailer"],
)
def test_any_flipped_byte_is_noticed(blocks, decode) -> None:
    assert decode(blocks) is not None
    for at in range(len(blocks)):
        for mask in (0x01, 0x80):
            damaged = bytearray(blocks)
            damaged[at] ^= mask
            assert decode(bytes(damaged)) is None
    for length in (0, 1, 16, 100, BLOCK - 1, len(blocks) - 1):
        assert decode(blocks[:length]) is None


def test_headers_never_pass_for_each_other() -> None:
    block = record.encode_trailer(Trailer(7, b"s" * 16, BLOCK, 9, 5))
    assert record.decode_segment_header(block) is None
    assert record.decode_chunk_header(block) is None
    assert record.announced_chunk_header_bytes(block) is None


def test_sizes_follow_from_the_layout() -> None:
    # 64 bytes of header and 88 a record: 45 records fit into the first block.
    assert [record.chunk_header_bytes(n) for n in (0, 1, 45, 46)] == [BLOCK, BLOCK, BLOCK, 2 * BLOCK]
    assert record.ChunkSize.of([1, 0, BLOCK + 1]) == (3, 3 * BLOCK)
    assert record.ChunkSize.of([1, 0, BLOCK + 1]).bytes == BLOCK + 3 * BLOCK
    assert record.footer_bytes(0) == BLOCK
    assert record.footer_bytes(1) == 2 * BLOCK
