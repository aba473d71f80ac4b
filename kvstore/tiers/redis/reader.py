"""Reading pages: their entries first, then the ranges of chunks that these name, straight into place, and verified."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.errors import FormatError
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import VALUE_BYTES, ChunkHeader, decode_header, extents
from kvstore.tiers.redis.format.codec import decompress
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.resp import Reply, ServerError
from kvstore.tiers.redis.net.server import batches
from kvstore.tiers.tier import PageBytes

_READS = 2
"""How often a page is looked for: compaction may take its chunk away between entry and chunk, and put another there."""
_NO_CHECKSUM = -1


class Outcome(enum.Enum):
    """What became of one page's read."""

    FOUND = enum.auto()
    GONE = enum.auto()
    """Its chunk was evicted, or the server dropped it."""
    CORRUPT = enum.auto()
    """What stands there is not what was stored."""
    FAILED = enum.auto()
    """The server did not answer."""


class PageRead(NamedTuple):
    """One page's result."""

    place: int
    key: bytes
    entry: PageEntry
    checksum: int | None
    """None unless it was found."""
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


class ChunkRead:
    """The pages that one call reads of one chunk: which ranges are needed, and whether what came is right. No I/O.

    Args:
        entry: of any of them.
    """

    def __init__(self, entry: PageEntry) -> None:
        self.bucket = entry.bucket
        self.nonce = entry.nonce
        self._header = bytearray(entry.header_bytes)
        self._wanted: list[_Wanted] = []
        self._ranges: list[Range] = []
        self._checksums: list[int] = []

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
            for part, start, length in extents(head, offset, size):
                if part != last or start != end:
                    views = []
                    self._ranges.append(Range(part, start, views))
                views.append(view[:length])
                view = view[length:]
                last, end = part, start + length

    def decompress(self) -> None:
        """Decompress what has come, and make the checksums of that, whatever it is."""
        self._checksums.clear()  # the Cluster may have been asked twice
        for wanted in self._wanted:
            whole = wanted.stored is wanted.array or decompress(wanted.stored, wanted.array)
            self._checksums.append(xxhash.xxh3_64_intdigest(wanted.array.data) if whole else _NO_CHECKSUM)

    def results(self, replies: Sequence[Reply]) -> Iterator[PageRead]:
        """What became of each page, given a reply to each of ``ranges``."""
        outcome, header = self._outcome(replies)
        offsets = header.offsets if header is not None else []
        for at, wanted in enumerate(self._wanted):
            checksum = None
            mine = outcome
            if header is not None:
                checksum = _verify(header, offsets, wanted, self._checksums[at])
                mine = Outcome.FOUND if checksum is not None else Outcome.CORRUPT
            yield PageRead(wanted.place, wanted.key, wanted.entry, checksum, mine)

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


def _offset(wanted: _Wanted) -> int:
    return wanted.entry.offset


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


class Reader:
    """Safe for threads."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._topology = context.topology
        self._entries = context.entries
        self._buckets = context.buckets
        self._counts = context.counts

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """See :meth:`kvstore.tiers.redis.RedisTier.read`."""
        answers: list[int | None] = [None] * len(keys)
        places: Sequence[int] = range(len(keys))
        corrupt = errors = 0
        for _ in range(_READS):
            reads, unanswered = self._locate(places, keys, into)
            errors += unanswered
            places = []
            for batch in batches(reads, [read.stored_bytes for read in reads]):
                for page in self.read_chunks(batch):
                    answers[page.place] = page.checksum
                    corrupt += page.outcome is Outcome.CORRUPT
                    if page.outcome is Outcome.GONE:
                        places.append(page.place)
            if not places:
                break
        missed = answers.count(None)
        self._counts.add(
            asked=len(keys),
            missed=missed,
            hit=len(keys) - missed,
            corrupt=corrupt,
            errors=errors,
            read_bytes=sum(len(array) for array, answer in zip(into, answers, strict=True) if answer is not None),
        )
        return answers

    def read_chunks(self, reads: Sequence[ChunkRead]) -> list[PageRead]:
        """Read pages of some chunks, in one request to each server. Entries that led to nothing are deleted."""
        deadline = self._context.deadline()
        requests = []
        used: dict[int, list[bytes]] = defaultdict(list)
        for read in reads:
            ranges = read.ranges()
            for run in ranges:
                name = key_names.part_name(read.bucket, read.nonce, run.part)
                command = [b"GETRANGE", name, b"%d" % run.start, b"%d" % (run.start + run.length - 1)]
                last = read.decompress if run is ranges[-1] else None
                requests.append(Request(self._topology.slot(name), command, run.views, last))
            used[read.bucket].append(read.nonce)
        touches = [self._buckets.touch(bucket, nonces) for bucket, nonces in used.items()]
        replies = iter(self._topology.exchange([*requests, *touches], deadline))
        pages = [page for read in reads for page in read.results([next(replies) for _ in read.ranges()])]
        dangling = [(page.key, page.entry) for page in pages if page.outcome in (Outcome.GONE, Outcome.CORRUPT)]
        if dangling:
            self._entries.forget(dangling, deadline)
        failed = sum(page.outcome is Outcome.FAILED for page in pages)
        if failed:
            self._counts.add(errors=failed)
        return pages

    def header(self, entry: PageEntry, deadline: float) -> ChunkHeader | None:
        """The header of the chunk where a page is; None if there is none that can be read."""
        name = key_names.part_name(entry.bucket, entry.nonce, 0)
        command = [b"GETRANGE", name, b"0", b"%d" % (entry.header_bytes - 1)]
        [reply] = self._topology.exchange([Request(self._topology.slot(name), command)], deadline)
        try:
            return decode_header(reply) if isinstance(reply, bytes) else None
        except FormatError:
            return None

    def _locate(
        self, places: Sequence[int], keys: Sequence[bytes], into: Sequence[PageBytes]
    ) -> tuple[list[ChunkRead], int]:
        """Where some of a call's pages are, and how many of them no server would tell."""
        entries, unanswered = self._entries.find([keys[place] for place in places], self._context.deadline())
        reads: dict[bytes, ChunkRead] = {}
        for place, entry in zip(places, entries, strict=True):
            if entry is None or entry.length != len(into[place]):
                continue
            read = reads.get(entry.nonce)
            if read is None:
                read = reads[entry.nonce] = ChunkRead(entry)
            read.add(place, keys[place], entry, into[place])
        return list(reads.values()), unanswered
