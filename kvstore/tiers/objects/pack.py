"""A pack: pages in one immutable object, in the format of a segment (:mod:`kvstore.segments`), to bytes and back.

A pack is a sealed segment of one chunk: segment header, chunk header, payloads padded to blocks, footer, trailer. Its
id is the pack's number. So ``kvstore.segments`` can read a pack that lies in a file, and what is said there of formats,
versions and encryption holds here. No I/O.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.segments import record
from kvstore.segments.cipher import TAG_BYTES, Cipher
from kvstore.segments.record import BLOCK, ChunkHeader, ChunkSize, SegmentHeader, Trailer
from kvstore.segments.segment import Entry
from kvstore.tiers.objects.names import PackName

Records = npt.NDArray[np.void]
"""A table of records (``record.RECORDS``)."""


class Pack(NamedTuple):
    """What is known of a pack, but for its pages."""

    name: PackName
    size: int
    """Of the object, in bytes."""
    stamp: bytes
    """16 random bytes, from which its key is derived."""
    codec: int
    """Of its pages: ``record.RAW`` or ``record.AES_GCM``."""
    key_check: bytes
    """By which the key is known that they are encrypted with; zeros when they are not."""

    @property
    def overhead(self) -> int:
        """How much longer a page is in it than in memory."""
        return TAG_BYTES if self.codec == record.AES_GCM else 0


def pack_bytes(lengths: Sequence[int], overhead: int = 0) -> int:
    """The size of a pack of pages of these lengths, each ``overhead`` longer there."""
    size = ChunkSize.of([length + overhead for length in lengths])
    return BLOCK + size.bytes + record.footer_bytes(size.records)


def encode_pack(name: PackName, entries: Sequence[Entry], cipher: Cipher | None) -> tuple[Pack, Records, bytearray]:
    """A new pack of these pages, in this order, each with a payload.

    Returns:
        What is known of it, its records, and the object's bytes.
    """
    stamp = secrets.token_bytes(record.STAMP_BYTES)
    codec, check = (
        (record.RAW, bytes(16)) if cipher is None else (record.AES_GCM, cipher.check_value(name.number, stamp))
    )
    overhead = 0 if cipher is None else TAG_BYTES
    lengths = [entry.length + overhead for entry in entries]
    size = ChunkSize.of(lengths)
    first = BLOCK + record.chunk_header_bytes(size.records)
    records = np.zeros(len(entries), record.RECORDS)
    records["key"] = np.frombuffer(b"".join(entry.key for entry in entries), f"V{record.KEY_BYTES}")
    ends = first + np.cumsum([record.padded(length) for length in lengths])
    records["offset"][0] = first
    records["offset"][1:] = ends[:-1]
    records["length"] = lengths
    records["codec"] = codec
    body = bytearray(BLOCK + size.bytes + record.footer_bytes(size.records))
    memory = np.frombuffer(body, np.uint8)
    encrypting = cipher.for_segment(name.number, stamp) if cipher is not None else None
    for entry, offset, length, at in zip(
        entries, records["offset"].tolist(), lengths, range(len(entries)), strict=True
    ):
        assert entry.payload is not None, "a pack holds no tombstone"
        stored = memory[offset : offset + length]
        if encrypting is None:
            stored[:] = entry.payload
            records["checksum"][at] = entry.checksum
        else:
            encrypting.encrypt(offset, entry.key, entry.payload, stored)
            records["checksum"][at] = xxhash.xxh3_64_intdigest(stored.data)
    del memory
    table = records.tobytes()
    version = 1 if cipher is None else record.FORMAT_VERSION
    body[:BLOCK] = record.encode_segment_header(SegmentHeader(name.number, stamp, version, codec, check))
    body[BLOCK:first] = record.encode_chunk_header(ChunkHeader(name.number, stamp, 0, size.payload_bytes, table))
    footer = first + size.payload_bytes
    body[footer : footer + len(table)] = table
    body[-BLOCK:] = record.encode_trailer(
        Trailer(name.number, stamp, footer, size.records, record.table_checksum(table))
    )
    return Pack(name, len(body), stamp, codec, check), records, body


def are_sound(pack: Pack, records: Records) -> bool:
    """Whether records can be those of a pack's pages: each lies inside, behind the header, in whole blocks."""
    offsets, lengths = records["offset"], records["length"].astype(np.uint64)
    return bool(
        len(records)
        and (records["codec"] == pack.codec).all()
        and (lengths > pack.overhead).all()
        and (offsets % np.uint64(BLOCK) == 0).all()
        and (offsets >= BLOCK).all()
        and (offsets < pack.size).all()
        and (offsets + lengths <= np.uint64(pack.size)).all()
    )
