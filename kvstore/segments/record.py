"""Headers, records and checksums to bytes and back. No files here; the package's docstring draws the layout."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

ByteArray = npt.NDArray[np.uint8]
"""A contiguous one-dimensional array of bytes."""

BLOCK = 4096
"""Everything starts at and is padded to a multiple of this: what O_DIRECT asks of any disk."""

FORMAT_VERSION = 2
"""The newest that is read. A segment says the oldest that suffices for it: 2 if it is encrypted, else 1."""
KEY_BYTES = 64
FINGERPRINT_BYTES = 32
"""A page key begins with the fingerprint of its namespace."""
STAMP_BYTES = 16

RAW = 0
"""Codec of a payload that is stored as it is."""
AES_GCM = 1
"""Codec of a payload that is encrypted: 16 bytes longer than the page (:mod:`kvstore.segments.cipher`)."""
TOMBSTONE = 255
"""Codec of a record without payload: from here on there is no page of this key."""

MAX_PAYLOAD_BYTES = (1 << 32) - 1

_SEGMENT_MAGIC = b"KVSEGMNT"
_CHUNK_MAGIC = b"KVCHUNK1"
_TRAILER_MAGIC = b"KVTRAIL1"

_ENVELOPE = struct.Struct("<8sQ")  # magic, xxh3_64 of what follows
_SEGMENT = struct.Struct("<II Q16s16s")  # version, codec of its pages, id, stamp, check of the key
_CHUNK = struct.Struct("<Q16sIIQ8x")  # id, stamp, sequence, records, payload bytes
_TRAILER = struct.Struct("<Q16sQIIQ")  # id, stamp, footer's offset, records, 0, checksum of the table

_TABLE_AT = _ENVELOPE.size + _CHUNK.size

RECORDS = np.dtype(
    [("key", "V64"), ("offset", "<u8"), ("checksum", "<u8"), ("length", "<u4"), ("codec", "u1"), ("zero", "V3")]
)
"""A table of records as an array. A record says where one page lies, or (codec ``TOMBSTONE``) that it is gone: offset
of its payload in the file, xxh3_64 of the payload as it is stored, and its length in bytes without padding."""
_RECORD_BYTES = RECORDS.itemsize


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first block of a segment."""

    id: int
    stamp: bytes
    version: int = 1
    codec: int = RAW
    """Of its pages: ``RAW``, or ``AES_GCM`` (from version 2 on)."""
    key_check: bytes = bytes(16)
    """By which the key is known that they are encrypted with; zeros when they are not."""


class ChunkSize(NamedTuple):
    """What a chunk takes of a file."""

    records: int
    payload_bytes: int
    """Length of all payloads with their padding."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> ChunkSize:
        """The size of a chunk whose payloads have these lengths (0 for a tombstone)."""
        return cls(len(lengths), padded_in_all(lengths))

    @property
    def bytes(self) -> int:
        """Length of the whole chunk: header and payloads."""
        return chunk_header_bytes(self.records) + self.payload_bytes


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What stands before the payloads of one append."""

    segment: int
    stamp: bytes
    sequence: int
    """The chunk's number in its segment; grows from chunk to chunk."""
    payload_bytes: int
    """Length of all payloads with their padding."""
    table: bytes
    """Its records, 88 bytes each."""

    @property
    def size(self) -> ChunkSize:
        """How much of the file it takes."""
        return ChunkSize(len(self.table) // _RECORD_BYTES, self.payload_bytes)


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last block of a sealed segment."""

    segment: int
    stamp: bytes
    footer: int
    """Where the table of all records starts, in bytes from the start of the file."""
    records: int
    checksum: int
    """xxh3_64 of the table, without padding."""


def padded(length: int) -> int:
    """``length`` rounded up to whole blocks."""
    return -(-length // BLOCK) * BLOCK


def padded_in_all(lengths: Iterable[int]) -> int:
    """The sum of the lengths, each rounded up to whole blocks."""
    return -BLOCK * sum([-length // BLOCK for length in lengths])


def chunk_header_bytes(records: int) -> int:
    """Length of the header of a chunk of so many records."""
    return padded(_TABLE_AT + records * _RECORD_BYTES)


def footer_bytes(records: int) -> int:
    """Length of table and trailer of a segment of so many records."""
    return padded(records * _RECORD_BYTES) + BLOCK


def page_footprints(lengths: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """What pages of these lengths take on disk: whole blocks, and a record each in header and footer."""
    return -(-lengths.astype(np.int64) // BLOCK) * BLOCK + np.where(lengths > 0, 2 * _RECORD_BYTES, 0)


def table_checksum(table: bytes) -> int:
    """xxh3_64 of a footer's table."""
    return xxhash.xxh3_64_intdigest(table)


def encode_segment_header(header: SegmentHeader) -> bytes:
    """One block."""
    return _close(
        _SEGMENT_MAGIC, _SEGMENT.pack(header.version, header.codec, header.id, header.stamp, header.key_check), BLOCK
    )


def decode_segment_header(block: bytes) -> SegmentHeader | None:
    """The header in the first block of a file; None when it is damaged or something else. Any version passes."""
    body = _open(_SEGMENT_MAGIC, block)
    if body is None or len(block) != BLOCK:
        return None
    version, codec, id_, stamp, key_check = _SEGMENT.unpack_from(body)
    return SegmentHeader(id_, stamp, version, codec, key_check)


def encode_chunk_header(header: ChunkHeader) -> bytes:
    """One or more blocks."""
    records = header.size.records
    body = _CHUNK.pack(header.segment, header.stamp, header.sequence, records, header.payload_bytes)
    return _close(_CHUNK_MAGIC, body + header.table, chunk_header_bytes(records))


def announced_chunk_header_bytes(block: bytes) -> int | None:
    """How long the chunk header is that starts with this block, by its own word; None when none starts here."""
    if len(block) < _TABLE_AT or not block.startswith(_CHUNK_MAGIC):
        return None
    records: int = _CHUNK.unpack_from(block, _ENVELOPE.size)[3]
    return chunk_header_bytes(records)


def decode_chunk_header(blocks: bytes) -> ChunkHeader | None:
    """The chunk header in all its blocks; None when it is damaged."""
    body = _open(_CHUNK_MAGIC, blocks)
    if body is None:
        return None
    segment, stamp, sequence, count, payload_bytes = _CHUNK.unpack_from(body)
    table = body[_CHUNK.size : _CHUNK.size + count * _RECORD_BYTES]
    return ChunkHeader(segment, stamp, sequence, payload_bytes, table)


def encode_trailer(trailer: Trailer) -> bytes:
    """One block."""
    body = _TRAILER.pack(trailer.segment, trailer.stamp, trailer.footer, trailer.records, 0, trailer.checksum)
    return _close(_TRAILER_MAGIC, body, BLOCK)


def decode_trailer(block: bytes) -> Trailer | None:
    """The trailer in the last block of a file; None when it is damaged or there is none."""
    body = _open(_TRAILER_MAGIC, block)
    if body is None or len(block) != BLOCK:
        return None
    segment, stamp, footer, records, _, checksum = _TRAILER.unpack_from(body)
    return Trailer(segment, stamp, footer, records, checksum)


def record_table_bytes(records: int) -> int:
    """Length of a table of so many records, without padding."""
    return records * _RECORD_BYTES


def _close(magic: bytes, body: bytes, size: int) -> bytes:
    """Magic, the checksum of the padded body, the padded body: ``size`` bytes in all."""
    body = body.ljust(size - _ENVELOPE.size, b"\0")
    return _ENVELOPE.pack(magic, xxhash.xxh3_64_intdigest(body)) + body


def _open(magic: bytes, blocks: bytes) -> bytes | None:
    """The padded body of what ``_close`` made; None when anything of it differs."""
    if len(blocks) < BLOCK or not blocks.startswith(magic):
        return None
    body = blocks[_ENVELOPE.size :]
    checksum: int = _ENVELOPE.unpack_from(blocks)[1]
    return body if xxhash.xxh3_64_intdigest(body) == checksum else None
