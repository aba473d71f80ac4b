"""Short chunks of a row are put together; :mod:`kvstore.tiers.redis.merging` says when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvstore.tiers.redis.admission import Admission
from kvstore.tiers.redis.buckets import Buckets, Left
from kvstore.tiers.redis.chunk_builder import ChunkBuilder
from kvstore.tiers.redis.entries import Entries
from kvstore.tiers.redis.format.chunk import ChunkHeader
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.format.new_chunk import NewChunk, entries_of
from kvstore.tiers.redis.loading import Load
from kvstore.tiers.redis.merging import MOST_TAILS, begins_a_row, fills_a_row, is_tail
from kvstore.tiers.redis.net.topology import Topology
from kvstore.tiers.redis.reader import Reader
from kvstore.tiers.tier import PageWrite


class _Tail(NamedTuple):
    """A piece of a row, read back."""

    bucket: int
    header: ChunkHeader
    pages: list[PageWrite]


class Compaction:
    """Safe for threads.

    Args:
        servers: where rows are.
        entries: of pages.
        buckets: of chunks.
        reader: reads pieces back.
        maker: makes the new chunk.
        admission: writes it.
        timeout: seconds for a merge.
    """

    def __init__(
        self,
        servers: Topology,
        entries: Entries,
        buckets: Buckets,
        reader: Reader,
        maker: ChunkBuilder,
        admission: Admission,
        timeout: float,
    ) -> None:
        self._servers = servers
        self._entries = entries
        self._buckets = buckets
        self._reader = reader
        self._maker = maker
        self._admission = admission
        self._timeout = timeout

    def are_filled_by(self, header: ChunkHeader) -> bool:
        """Whether a chunk is the last piece of a row that is to be merged."""
        share = self._buckets.share_of(header.namespace)
        return fills_a_row(header) and share.pages_at_once(header.lengths[0]) is None

    def merge(self, last: NewChunk, pages: Mapping[bytes, PageWrite], entry: PageEntry) -> list[Left]:
        """Write a row that ``last`` has filled as one chunk, point its pages there, and let its pieces go.

        Args:
            last: the row's last piece, in Redis already.
            pages: its pages, by key.
            entry: of the page before its first.

        Returns:
            Which chunks made room.
        """
        deadline = time.monotonic() + self._timeout
        tails = self._tails_before(last.header, entry, deadline)
        if not tails:
            return []
        row = [page for tail in tails for page in tail.pages] + [pages[key] for key in last.keys]
        head = tails[0].header
        merged = self._maker.chunk(row, head.position, head.namespace + head.parent if head.parent else b"")
        standing, left = self._admission.admit([merged], deadline)
        self._servers.exchange(list(self._entries.deletions(left)), deadline)
        if standing:
            pieces = [(tail.bucket, tail.header) for tail in tails] + [(last.bucket, last.header)]
            self._entries.repoint(
                merged, [(bucket, header.nonce) for bucket, header in pieces for _ in header.hashes], deadline
            )
        return left

    def _tails_before(self, following: ChunkHeader, entry: PageEntry | None, deadline: float) -> list[_Tail]:
        """The pieces of a row before its last, read from Redis, as far as they are whole."""
        tails: list[_Tail] = []
        while entry is not None and len(tails) < MOST_TAILS:
            head = self._reader.header(entry, deadline)
            if head is None or not is_tail(head, entry, following):
                break
            load = Load(entry)
            arrays = [np.empty(length, np.uint8) for length in head.lengths]
            for place, found in enumerate(entries_of(head, entry.bucket, entry.header_bytes)):
                load.add(place, head.key(place), found, arrays[place])
            if any(checksum is None for _, checksum, _ in self._reader.load([load])):
                break
            pages = [PageWrite(head.key(at), head.checksums[at], array) for at, array in enumerate(arrays)]
            tails.insert(0, _Tail(entry.bucket, head, pages))
            if begins_a_row(head):
                break
            [entry], _ = self._entries.find([head.namespace + head.parent], deadline)
            following = head
        return tails
