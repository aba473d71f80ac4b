"""Compaction: short chunks of a chain are merged into one of full length.

A chain is cut into chunks at multiples of ``pages_per_chunk``, the *boundaries*. A prompt that grows turn by turn is
stored piece by piece, in *fragments* that end before the next boundary. The fragment that reaches it is the occasion to
write all pages since the last boundary anew, as one chunk: a reader then has one value to fetch for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvstore.tiers.redis.buckets import EvictedChunk
from kvstore.tiers.redis.chunk_writer import ChunkWriter
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.format.chunk import ChunkHeader, pages_per_chunk
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.format.new_chunk import NewChunk, entries_of
from kvstore.tiers.redis.reader import ChunkRead, Reader
from kvstore.tiers.tier import PageWrite

MOST_FRAGMENTS = 8
"""Most fragments before the last that are merged with it."""


def completes(header: ChunkHeader) -> bool:
    """Whether a chunk ends at a boundary, and begins behind the one before."""
    length = pages_per_chunk(header.lengths[0])
    return header.position % length != 0 and (header.position + len(header.hashes)) % length == 0


def begins_at_boundary(header: ChunkHeader) -> bool:
    """Whether there is nothing to be merged before this chunk."""
    return header.position % pages_per_chunk(header.lengths[0]) == 0 or not header.parent


def precedes(header: ChunkHeader, entry: PageEntry, following: ChunkHeader) -> bool:
    """Whether a chunk is the fragment right before another one, and no other prompt goes on there.

    Args:
        header: the chunk's.
        entry: of the page before ``following``'s first, which led to this chunk.
        following: the header of the fragment behind.
    """
    return (
        header.nonce == entry.nonce
        and header.namespace == following.namespace
        and set(header.lengths) == {following.lengths[0]}
        and header.position + len(header.hashes) == following.position
    )


class _Fragment(NamedTuple):
    """Read back from Redis."""

    bucket: int
    header: ChunkHeader
    pages: list[PageWrite]


class Compaction:
    """Safe for threads, and for several nodes at once."""

    def __init__(self, context: Context, reader: Reader, chunks: ChunkWriter) -> None:
        self._context = context
        self._topology = context.topology
        self._entries = context.entries
        self._buckets = context.buckets
        self._reader = reader
        self._chunks = chunks

    def is_due(self, header: ChunkHeader) -> bool:
        """Whether a new chunk is the last fragment before a boundary. In a small quota chunks are short anyway."""
        share = self._buckets.share_of(header.namespace)
        return completes(header) and share.pages_at_once(header.lengths[0]) is None

    def compact(self, last: NewChunk, pages: Mapping[bytes, PageWrite], entry: PageEntry) -> list[EvictedChunk]:
        """Merge the fragments that ``last`` completes into one chunk, point their pages there, and release them.

        Args:
            last: the last fragment, in Redis already.
            pages: its pages, by key.
            entry: of the page before its first.

        Returns:
            Which chunks were evicted for it.
        """
        deadline = self._context.deadline()
        fragments = self._fragments_before(last.header, entry, deadline)
        if not fragments:
            return []
        whole = [page for fragment in fragments for page in fragment.pages] + [pages[key] for key in last.keys]
        head = fragments[0].header
        parent = head.namespace + head.parent if head.parent else b""
        merged = self._chunks.build(whole, head.position, parent, merged=True)
        admitted, evicted, _ = self._chunks.admit([merged], deadline)  # another writer may be at it: then it is his
        self._topology.exchange(list(self._entries.deletions(evicted)), deadline)
        if admitted:
            chunks = [(fragment.bucket, fragment.header) for fragment in fragments] + [(last.bucket, last.header)]
            self._entries.repoint(
                merged, [(bucket, header.nonce) for bucket, header in chunks for _ in header.hashes], deadline
            )
        return evicted

    def _fragments_before(self, following: ChunkHeader, entry: PageEntry | None, deadline: float) -> list[_Fragment]:
        """The fragments between the last boundary and one of them, read from Redis, as far as they are whole."""
        fragments: list[_Fragment] = []
        while entry is not None and len(fragments) < MOST_FRAGMENTS:
            header = self._reader.header(entry, deadline)
            if header is None or not precedes(header, entry, following):
                break
            read = ChunkRead(entry)
            arrays = [np.empty(length, np.uint8) for length in header.lengths]
            for place, found in enumerate(entries_of(header, entry.bucket, entry.header_bytes)):
                read.add(place, header.key(place), found, arrays[place])
            if any(page.checksum is None for page in self._reader.read_chunks([read])):
                break
            pages = [PageWrite(header.key(at), header.checksums[at], array) for at, array in enumerate(arrays)]
            fragments.insert(0, _Fragment(entry.bucket, header, pages))
            if begins_at_boundary(header):
                break
            [entry], _ = self._entries.find([header.namespace + header.parent], deadline)
            following = header
        return fragments
