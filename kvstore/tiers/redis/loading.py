"""Reading pages of one chunk: which ranges of its values are needed, and whether what came may be believed."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.errors import FormatError
from kvstore.tiers.redis.format.chunk import (
    VALUE_BYTES,
    ChunkHeader,
    decode_header,
    extents,
)
from kvstore.tiers.redis.format.codec import decompress
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.net.resp import Reply, ServerError
from kvstore.tiers.tier import PageBytes

_NO_CHECKSUM = -1


class Outcome(enum.Enum):
    """What became of one page's read."""

    FOUND = enum.auto()
    GONE = enum.auto()
    """Its chunk left, or the server dropped it."""
    CORRUPT = enum.auto()
    """What stands there is not what was stored."""
    FAILED = enum.auto()
    """The server did not answer."""


class Judged(NamedTuple):
    """One page's result."""

    place: int
    key: bytes
    entry: PageEntry
    checksum: int | None
    outcome: Outcome


class _Wanted(NamedTuple):
    place: int
    key: bytes
    entry: PageEntry
    array: PageBytes
    stored: PageBytes
    """Where its stored bytes go: ``array`` itself unless they are compressed."""


class Range(NamedTuple):
    """A run of bytes of one value, and where it goes."""

    part: int
    start: int
    views: list[memoryview]

    @property
    def length(self) -> int:
        """How many bytes."""
        return sum(map(len, self.views))


def _offset(wanted: _Wanted) -> int:
    return wanted.entry.offset


class Load:
    """The pages that one call wants of one chunk.

    Args:
        entry: of any of them.
    """

    def __init__(self, entry: PageEntry) -> None:
        self.bucket = entry.bucket
        self.nonce = entry.nonce
        self._header = bytearray(entry.header_bytes)
        self._wanted: list[_Wanted] = []
        self._ranges: list[Range] = []
        self._sums: list[int] = []

    @property
    def stored_bytes(self) -> int:
        """Payload bytes to be read."""
        return sum(wanted.entry.stored_bytes for wanted in self._wanted)

    def add(self, place: int, key: bytes, entry: PageEntry, array: PageBytes) -> None:
        """One more page."""
        stored = array if entry.stored_bytes == entry.length else np.empty(entry.stored_bytes, np.uint8)
        self._wanted.append(_Wanted(place, key, entry, array, stored))
        self._ranges.clear()

    def ranges(self) -> list[Range]:
        """What to read. Neighbours are one range."""
        if not self._ranges:
            self._plan()
        return self._ranges

    def _plan(self) -> None:
        end = len(self._header)
        self._ranges = [Range(0, 0, [memoryview(self._header)])]
        last = 0
        head = len(self._header)
        views = self._ranges[-1].views
        for wanted in sorted(self._wanted, key=_offset):
            view = wanted.stored.data
            offset, size = wanted.entry.offset, wanted.entry.stored_bytes
            if last == 0 and head + offset == end and offset + size <= VALUE_BYTES:  # as nearly always
                views.append(view)
                end += size
                continue
            for part, start, length in extents(len(self._header), wanted.entry.offset, wanted.entry.stored_bytes):
                if part != last or start != end:
                    views = []
                    self._ranges.append(Range(part, start, views))
                views.append(view[:length])
                view = view[length:]
                last, end = part, start + length

    def sum_up(self) -> None:
        """Unpack what has come, and make the checksums of that, whatever it is."""
        self._sums.clear()  # the Cluster may have been asked twice
        for wanted in self._wanted:
            whole = wanted.stored is wanted.array or decompress(wanted.stored, wanted.array)
            self._sums.append(xxhash.xxh3_64_intdigest(wanted.array.data) if whole else _NO_CHECKSUM)

    def judge(self, replies: Sequence[Reply]) -> Iterator[Judged]:
        """What became of each page, given a reply to each of ``ranges``."""
        outcome, header = self._outcome(replies)
        offsets = header.offsets if header is not None else []
        for at, wanted in enumerate(self._wanted):
            checksum = None
            mine = outcome
            if header is not None:
                checksum = _verify(header, offsets, wanted, self._sums[at])
                mine = Outcome.FOUND if checksum is not None else Outcome.CORRUPT
            yield Judged(wanted.place, wanted.key, wanted.entry, checksum, mine)

    def _outcome(self, replies: Sequence[Reply]) -> tuple[Outcome, ChunkHeader | None]:
        if any(isinstance(reply, ServerError) and reply.kind != "WRONGTYPE" for reply in replies):
            return Outcome.FAILED, None
        if any(reply in (0, None) for reply in replies):
            return Outcome.GONE, None
        lengths = [run.length for run in self.ranges()]
        if list(replies) != lengths:
            return Outcome.CORRUPT, None
        try:
            header = decode_header(self._header)
        except FormatError:
            return Outcome.CORRUPT, None
        return (Outcome.FOUND, header) if header.nonce == self.nonce else (Outcome.CORRUPT, None)


def _verify(header: ChunkHeader, offsets: Sequence[int], wanted: _Wanted, checksum: int) -> int | None:
    """The checksum of a page if it is the right one, and its bytes are in place."""
    index, entry = wanted.entry.number, wanted.entry
    if (
        index >= len(header.hashes)
        or wanted.key != header.namespace + header.hashes[index]
        or header.lengths[index] != entry.length
        or header.stored[index] != entry.stored_bytes
        or offsets[index] != entry.offset
        or header.checksums[index] != checksum
    ):
        return None
    return checksum
