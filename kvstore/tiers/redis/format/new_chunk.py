"""A chunk on its way into Redis: its values, what it is charged with, and the entries of its pages. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvstore.tiers.redis.format import chunk
from kvstore.tiers.redis.format.chunk import VALUE_BYTES, ChunkHeader, part_sizes
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.format.key_names import part_name


@dataclass(frozen=True)
class NewChunk:
    """A chunk that is not in Redis yet."""

    bucket: int
    header: ChunkHeader
    head: bytes
    """The header's bytes."""
    payloads: Sequence[bytes | memoryview]
    """Each page's stored bytes, straight from the arena where they are not compressed."""
    merged: bool = False
    """Made of chunks that are there."""

    @cached_property
    def sizes(self) -> list[int]:
        """How long each of its values is."""
        return part_sizes(len(self.head), sum(self.header.stored))

    @property
    def names(self) -> list[bytes]:
        """Under which each of its values goes."""
        return [part_name(self.bucket, self.header.nonce, part) for part in range(len(self.sizes))]

    @cached_property
    def charge(self) -> int:
        """What it counts against budget and quota."""
        return chunk.charge(self.sizes, len(self.payloads))

    @cached_property
    def keys(self) -> list[bytes]:
        """Its pages' keys."""
        return [self.header.namespace + block_hash for block_hash in self.header.hashes]

    def entries(self) -> list[PageEntry]:
        """What will say where its pages are."""
        return entries_of(self.header, self.bucket, len(self.head))

    @property
    def claim(self) -> bytes:
        """What a writer claims who wants to send it: the same of all chunks that begin with the same page."""
        return self.keys[0] + (b"+" if self.merged else b"")

    def admission(self, budget: int, live_ms: bytes, quota: int | None) -> list[bytes]:
        """The arguments of the script ``ADMIT``, but for the claim.

        Args:
            budget: most bytes in its bucket.
            live_ms: milliseconds that its values live.
            quota: most bytes of its namespace there; None: no quota.
        """
        numbers = [self.charge, len(self.payloads), len(self.head), len(self.sizes), budget]
        most = b"" if quota is None else b"%d" % quota
        return [self.header.nonce, *(b"%d" % number for number in numbers), live_ms, self.header.namespace, most]

    def values(self) -> list[list[bytes | memoryview]]:
        """The bytes of each of its values, as buffers one behind the other: not copied."""
        values: list[list[bytes | memoryview]] = [[self.head]]
        at = 0
        for payload in self.payloads:
            view = memoryview(payload)
            while len(view):
                part, begun = divmod(at, VALUE_BYTES)
                if part == len(values):
                    values.append([])
                piece = view[: VALUE_BYTES - begun]
                values[part].append(piece)
                at += len(piece)
                view = view[len(piece) :]
        return values


def entries_of(header: ChunkHeader, bucket: int, header_bytes: int) -> list[PageEntry]:
    """The entries that the pages of a chunk have."""
    return [
        PageEntry(bucket, header.nonce, header_bytes, number, *where, header.position + number)
        for number, where in enumerate(zip(header.offsets, header.stored, header.lengths, strict=True))
    ]
