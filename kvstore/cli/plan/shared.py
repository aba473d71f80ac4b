"""Redis in a simulation: chunks in buckets, cut, charged, placed, evicted and merged by the tier's own rules.

What is imported decides: where a chain is cut (``plan_chunks``, ``pages_per_chunk``), what a chunk is charged
(``charge``, ``part_sizes``), in which bucket it lies (``share_of``), on which server that is (the hash slot), and when
short chunks become a long one (``completes``, ``begins_at_boundary``). Only the scripts' few lines are done here: the
oldest chunk of a bucket leaves until a new one fits.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvstore.cli.plan.costs import header_bytes
from kvstore.tiers.redis.buckets import BUCKET_CHUNKS
from kvstore.tiers.redis.compaction import MOST_FRAGMENTS, begins_at_boundary, completes
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import CHUNK_BYTES, ChunkHeader, charge, part_sizes
from kvstore.tiers.redis.format.planning import NewPage, plan_chunks
from kvstore.tiers.redis.quotas import FULL_CHUNK, share_of

_NAMESPACE = bytes(key_names.NAMESPACE_BYTES)
_NONCE = bytes(key_names.NONCE_BYTES)


def page_key(block: int) -> bytes:
    """A key as random as a real one."""
    return _NAMESPACE + hashlib.sha256(b"%d" % block).digest()


@dataclass(slots=True, eq=False)
class Chunk:
    """Some blocks side by side."""

    bucket: int
    position: int
    parent: int | None
    """The block before its first."""
    blocks: tuple[int, ...]
    live: int
    """How many of them have an entry that leads here."""
    charge: int


class Merged(NamedTuple):
    """A chunk that was written anew from shorter ones."""

    whole: Chunk
    fragments: list[Chunk]
    """Those before the last, which were read back."""
    left: list[Chunk]
    """Those that were evicted for it."""


class SharedPages:
    """The pages that all nodes share.

    Args:
        limit_bytes: of all of them together.
        block_bytes: of one block of the trace. One of more than 2 MiB is taken for a chunk by itself.
    """

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        whole = max(FULL_CHUNK, self._charge(1))
        self.buckets = max(1, min(key_names.MOST_BUCKETS, limit_bytes // (BUCKET_CHUNKS * whole)))
        self._budget = limit_bytes // self.buckets
        self._share = share_of(_NAMESPACE, 0, self.buckets)
        self._orders: list[OrderedDict[Chunk, None]] = [OrderedDict() for _ in range(self.buckets)]
        self._used = [0] * self.buckets
        self._entries: dict[int, Chunk] = {}
        self._positions: dict[int, int] = {}
        self.evicted = 0
        """Blocks that left for others."""

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    @property
    def used_bytes(self) -> int:
        """As charged."""
        return sum(self._used)

    def __len__(self) -> int:
        return len(self._entries)

    def chunks_of(self, blocks: Iterable[int]) -> list[Chunk]:
        """The chunks of blocks that are here, each once."""
        return list(dict.fromkeys(self._entries[block] for block in blocks if block in self._entries))

    def touch(self, blocks: Sequence[int]) -> None:
        """Blocks were used; the chunk of the first counts as the newest."""
        for chunk in reversed(self.chunks_of(blocks)):
            self._orders[chunk.bucket].move_to_end(chunk)

    def plan(self, prompt: Sequence[int], wanted: Sequence[int]) -> list[Chunk]:
        """The chunks that a write makes of those blocks of ``wanted`` that are not here. Nothing is changed.

        Args:
            prompt: the whole prompt that they are of.
            wanted: some of its blocks, in its order.
        """
        places = {block: place for place, block in enumerate(prompt)}
        new = [block for block in wanted if block not in self._entries]
        found: dict[int, int] = {}
        pages = []
        for block in new:
            place = places[block]
            before = prompt[place - 1] if place else None
            position = -1
            if before is not None:
                position = found[before] if before in found else self._positions.get(before, -1)
            found[block] = position + 1
            pages.append(NewPage(page_key(block), self._block_bytes, position + 1))
        made = []
        for cut in plan_chunks(pages):
            blocks = tuple(new[cut.start : cut.stop])
            place = places[blocks[0]]
            parent = prompt[place - 1] if place else None
            bucket = self._share.bucket_of(pages[cut.start].key)
            made.append(Chunk(bucket, pages[cut.start].position, parent, blocks, 0, self._charge(len(blocks))))
        return made

    def admit(self, chunk: Chunk) -> list[Chunk]:
        """Put a chunk of :meth:`plan` in its bucket, and entries where none stand; the oldest leave for it.

        Returns:
            Those that left.
        """
        if chunk.charge > self._budget:
            return []
        left = self._take_in(chunk)
        for place, block in enumerate(chunk.blocks):
            if block not in self._entries:
                self._entries[block] = chunk
                self._positions[block] = chunk.position + place
                chunk.live += 1
        if not chunk.live:  # somebody else was first with all of them
            self._drop(chunk)
        return left

    def compact(self, last: Chunk) -> Merged | None:
        """Write the fragments that a chunk completes anew as one; None: it completes none."""
        if self._block_bytes > CHUNK_BYTES or not last.live or not completes(_header(last, self._block_bytes)):
            return None
        fragments: list[Chunk] = []
        following = last
        while following.parent is not None and len(fragments) < MOST_FRAGMENTS:
            before = self._entries.get(following.parent)
            if before is None or before.position + len(before.blocks) != following.position:
                break
            fragments.insert(0, before)
            if begins_at_boundary(_header(before, self._block_bytes)):
                break
            following = before
        if not fragments:
            return None
        parts = [*fragments, last]
        blocks = tuple(block for part in parts for block in part.blocks)
        whole = Chunk(
            self._share.bucket_of(page_key(blocks[0])), parts[0].position, parts[0].parent, blocks, 0,
            self._charge(len(blocks)),
        )  # fmt: skip
        left = self._merge(whole, parts)
        return Merged(whole, fragments, left)

    def _merge(self, whole: Chunk, parts: Sequence[Chunk]) -> list[Chunk]:
        """Admit a chunk in the place of its parts."""
        if whole.charge > self._budget:
            return []
        left = self._take_in(whole)
        for part in parts:
            moved = [block for block in part.blocks if self._entries.get(block) is part]
            for block in moved:
                self._entries[block] = whole
            whole.live += len(moved)
            if part in self._orders[part.bucket]:
                self._drop(part)
        return left

    def _charge(self, blocks: int) -> int:
        if self._block_bytes > CHUNK_BYTES:
            pages = -(-self._block_bytes // CHUNK_BYTES)
            return pages * charge(part_sizes(header_bytes(1), CHUNK_BYTES), 1)
        return charge(part_sizes(header_bytes(blocks), blocks * self._block_bytes), blocks)

    def _take_in(self, chunk: Chunk) -> list[Chunk]:
        order = self._orders[chunk.bucket]
        left = []
        while self._used[chunk.bucket] + chunk.charge > self._budget:
            oldest = next(iter(order))
            self.evicted += self._drop(oldest)
            left.append(oldest)
        order[chunk] = None
        self._used[chunk.bucket] += chunk.charge
        return left

    def _drop(self, chunk: Chunk) -> int:
        del self._orders[chunk.bucket][chunk]
        self._used[chunk.bucket] -= chunk.charge
        gone = [block for block in chunk.blocks if self._entries.get(block) is chunk]
        for block in gone:
            del self._entries[block]
            self._positions.pop(block, None)
        return len(gone)


@lru_cache(1 << 15)
def server_of_bucket(bucket: int, servers: int) -> int:
    """Which of some servers has a bucket, where each has as many neighbouring hash slots."""
    return key_slot(key_names.bucket_names(bucket)[0]) * servers // REDIS_CLUSTER_HASH_SLOTS


def _header(chunk: Chunk, block_bytes: int) -> ChunkHeader:
    """As far as it decides about compaction."""
    hashes, lengths = (b"",) * len(chunk.blocks), (block_bytes,) * len(chunk.blocks)
    parent = b"-" if chunk.parent is not None else b""
    return ChunkHeader(0, _NAMESPACE, _NONCE, hashes, lengths, lengths, (), chunk.position, parent)
