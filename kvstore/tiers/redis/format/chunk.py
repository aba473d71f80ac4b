"""A chunk's bytes: a header that describes its pages, then their payloads, one behind the other.

::

    magic "kvch" · version u16 · codec u16 · length of the header u32 · xxh3_64 of the header but for itself u64
    msgpack map: namespace, nonce, hashes, lengths, stored, checksums, position, parent
    payload of page 0, payload of page 1, …

Integers are big-endian. ``hashes`` and ``checksums`` are joined, 32 and 8 bytes a page; ``lengths`` and ``stored``
count a page's bytes before and after its codec; a checksum is the xxh3_64 of the page itself. Payloads beyond
``VALUE_BYTES`` go on in further values of as many each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import msgpack
import xxhash

from kvstore.errors import FormatError

VERSION = 1
CHUNK_BYTES = 2 << 20
"""Most payload of a chunk, unless it is one page."""
VALUE_BYTES = CHUNK_BYTES - (64 << 10)
"""Most payload of one value. With header and all it just fits the allocator's class of 2 MiB: a little more would take
2.5. The rest of a full chunk goes into a second, small value: 4 % of waste instead of 25 %."""
MOST_PAGES = 1024
"""Most pages of a chunk."""
MOST_HEADER_BYTES = CHUNK_BYTES - VALUE_BYTES
"""Longest header. What is written has up to 50 bytes a page and a few more: it always fits."""
MOST_POSITION = 1 << 31
"""Beyond it the places in a chain begin anew."""
_MAGIC = b"kvch"
_PREFIX = struct.Struct(">4sHHI")
_CHECKSUM = struct.Struct(">Q")
LEAST_HEADER_BYTES = _BODY = _PREFIX.size + _CHECKSUM.size
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk says of itself."""

    codec: int
    namespace: bytes
    """The fingerprint that its pages' keys begin with."""
    nonce: bytes
    hashes: tuple[bytes, ...]
    lengths: tuple[int, ...]
    stored: tuple[int, ...]
    checksums: tuple[int, ...]
    position: int
    """The first page's place in its chain, as far as that is known."""
    parent: bytes = b""
    """The hash of the page before its first; empty where there is none, or none is known."""

    def key(self, index: int) -> bytes:
        """The key of one of its pages."""
        return self.namespace + self.hashes[index]

    @property
    def offsets(self) -> list[int]:
        """Where each page's payload begins behind the header."""
        return [0, *accumulate(self.stored)][:-1]

    def encode(self) -> bytes:
        """The header's bytes."""
        body: bytes = msgpack.packb(
            {
                "namespace": self.namespace,
                "nonce": self.nonce,
                "hashes": b"".join(self.hashes),
                "lengths": self.lengths,
                "stored": self.stored,
                "checksums": struct.pack(f">{len(self.checksums)}Q", *self.checksums),
                "position": self.position,
                "parent": self.parent,
            }
        )
        prefix = _PREFIX.pack(_MAGIC, VERSION, self.codec, _BODY + len(body))
        return prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix + body)) + body


def decode_header(data: bytes | bytearray | memoryview) -> ChunkHeader:
    """Read a header; ``data`` may go on behind it.

    Raises:
        FormatError: these are no header, or that of another version.
    """
    if len(data) < _BODY:
        raise FormatError("too short for a chunk's header")
    magic, version, codec, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise FormatError("not a chunk")
    if version != VERSION:
        raise FormatError(f"a chunk of format {version}, this version reads {VERSION}")
    (checksum,) = _CHECKSUM.unpack_from(data, _PREFIX.size)
    body = bytes(data[_BODY:length])
    if len(body) != length - _BODY or xxhash.xxh3_64_intdigest(bytes(data[: _PREFIX.size]) + body) != checksum:
        raise FormatError("a chunk's header is damaged")
    try:
        return _read(codec, msgpack.unpackb(body))
    except (KeyError, TypeError, ValueError, struct.error, msgpack.UnpackException) as error:
        raise FormatError("a chunk's header makes no sense") from error


def _read(codec: int, fields: dict[str, Any]) -> ChunkHeader:
    hashes, checksums = fields["hashes"], fields["checksums"]
    pages = len(hashes) // _HASH_BYTES
    header = ChunkHeader(
        codec,
        fields["namespace"],
        fields["nonce"],
        tuple(hashes[at : at + _HASH_BYTES] for at in range(0, len(hashes), _HASH_BYTES)),
        tuple(fields["lengths"]),
        tuple(fields["stored"]),
        struct.unpack(f">{pages}Q", checksums),
        fields["position"],
        fields["parent"],
    )
    if not len(header.lengths) == len(header.stored) == pages or len(hashes) % _HASH_BYTES:
        raise ValueError
    return header


class Extent(NamedTuple):
    """A run of bytes in one of a chunk's values."""

    part: int
    start: int
    length: int


def extents(header_bytes: int, offset: int, length: int) -> Iterator[Extent]:
    """Where the payload bytes from ``offset`` on lie: cut at the ends of values."""
    while length:
        part = offset // VALUE_BYTES
        count = min(length, (part + 1) * VALUE_BYTES - offset)
        yield Extent(part, offset - part * VALUE_BYTES + (header_bytes if part == 0 else 0), count)
        offset += count
        length -= count


def part_sizes(header_bytes: int, payload_bytes: int) -> list[int]:
    """How long each of a chunk's values is."""
    sizes = [header_bytes]
    for extent in extents(header_bytes, 0, payload_bytes):
        if extent.part == len(sizes):
            sizes.append(0)
        sizes[extent.part] += extent.length
    return sizes


CHUNK_OVERHEAD = 1024
"""Charged for a chunk's names, its places in two orders and among the chunks, and its namespace's order and sum."""
PAGE_OVERHEAD = 320
"""Charged for a page's entry."""


def charge(sizes: Iterable[int], pages: int) -> int:
    """What a chunk counts against the budget: the memory that the server takes for it, its pages' entries included."""
    return sum(allocated(size + 32) + 160 for size in sizes) + CHUNK_OVERHEAD + PAGE_OVERHEAD * pages


def allocated(size: int) -> int:
    """What jemalloc, the server's allocator, takes for ``size`` bytes: its next size class, four to each doubling."""
    if size <= 128:
        return (size + 15) & ~15
    step = 1 << ((size - 1).bit_length() - 3)
    return (size + step - 1) & -step


@lru_cache(64)
def pages_per_chunk(page_bytes: int) -> int:
    """How many pages of this size go into one chunk."""
    return max(1, min(MOST_PAGES, CHUNK_BYTES // page_bytes))
