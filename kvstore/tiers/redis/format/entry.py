"""A page's entry: in which chunk it is, and where there. Written when the chunk is whole; replaced, never changed."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvstore.tiers.redis.format.chunk import (
    CHUNK_BYTES,
    LEAST_HEADER_BYTES,
    MOST_HEADER_BYTES,
    MOST_PAGES,
    MOST_POSITION,
)
from kvstore.tiers.redis.format.key_names import MOST_BUCKETS, NONCE_BYTES

VERSION = 1
_FORMAT = struct.Struct(f">BI{NONCE_BYTES}sIIIIII")
_REFERENCE = struct.Struct(f">BI{NONCE_BYTES}s")


class PageEntry(NamedTuple):
    """Where a page is."""

    bucket: int
    nonce: bytes
    """The chunk's name: 16 random bytes, never used twice."""
    header_bytes: int
    """How long the chunk's header is; payloads begin behind it."""
    number: int
    """Which of the chunk's pages it is."""
    offset: int
    """Where its payload begins, counted from the end of the header."""
    stored_bytes: int
    """How long it is in the chunk, there compressed or not."""
    length: int
    """How long the page is."""
    position: int
    """Which page of its chain it is, as far as that is known."""

    @property
    def reference(self) -> bytes:
        """What all entries of its chunk begin with."""
        return reference(self.bucket, self.nonce)

    def encode(self) -> bytes:
        """The entry's bytes."""
        return _FORMAT.pack(VERSION, *self)


def reference(bucket: int, nonce: bytes) -> bytes:
    """What all entries of one chunk begin with."""
    return _REFERENCE.pack(VERSION, bucket, nonce)


def decode(data: object) -> PageEntry | None:
    """The entry in these bytes; None for anything else, other versions included.

    An entry has no checksum, since a page's bytes, key and length are checked in its chunk. But what it says is asked
    for before that, and memory made for it: so none is believed that names what no chunk can have.
    """
    if not isinstance(data, bytes) or len(data) != _FORMAT.size or data[0] != VERSION:
        return None
    entry = PageEntry(*_FORMAT.unpack(data)[1:])
    return entry if _makes_sense(entry) else None


def _makes_sense(entry: PageEntry) -> bool:
    alone = entry.number == 0 and entry.offset == 0  # only then may a page be longer than a chunk
    return (
        entry.bucket < MOST_BUCKETS
        and LEAST_HEADER_BYTES < entry.header_bytes <= MOST_HEADER_BYTES
        and entry.number < MOST_PAGES
        and 0 < entry.stored_bytes <= entry.length
        and (alone or entry.offset + entry.length <= CHUNK_BYTES)
        and entry.position < MOST_POSITION + MOST_PAGES
    )
