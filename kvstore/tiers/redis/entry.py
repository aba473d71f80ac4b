"""A page's entry: in which chunk it is, and where there. Written when the chunk is whole; replaced, never changed."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvstore.tiers.redis.names import NONCE_BYTES

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
    """The entry in these bytes; None for anything else, other versions included."""
    if not isinstance(data, bytes) or len(data) != _FORMAT.size or data[0] != VERSION:
        return None
    return PageEntry(*_FORMAT.unpack(data)[1:])
