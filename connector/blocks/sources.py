"""Where a search for the longest hit finds blocks: cached here, in kvstore, or among those that a request holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.cached_blocks import BlockHashToBlockMap
from kvstore.connector.blocks.hashing import BlockHash
from kvstore.connector.blocks.pool import BlockPool

Presence = Mapping[int, Sequence[bool]]
"""By group: whether kvstore has the page of a request's first, second, … block of that group. What lies behind the end
of a sequence, and every group that is missing, is not there."""


class BlockSource(Protocol):
    """The blocks of a prompt that may count as computed, in groups that share a spec."""

    @property
    def num_groups(self) -> int:
        """How many groups."""

    def at(self, index: int) -> Sequence[KVCacheBlock] | None:
        """The prompt's ``index``-th block, one for each group; None when one of them is missing."""

    def inside(self, num_hashes: int) -> Sequence[KVCacheBlock] | None:
        """The blocks, one for each group, inside of which as many tokens end as so many hashes name, and which are
        filled up to there; None when one of them is missing."""

    def leading(self, limit: int) -> list[list[KVCacheBlock]]:
        """The blocks from the first one on, up to the first one missing in any group, ``limit`` at most. A list of the
        same length for each group."""


class CachedSource:
    """Cached blocks of some groups, found by hash.

    ``block_hashes`` has one for each ``hash_block_size`` tokens, of which a block of these groups holds
    ``hashes_per_block``. A hash names all tokens before it, so that the hash of a longer block is that of its end, and
    that of a prompt's tail inside a block is the one of where it ends.
    """

    def __init__(
        self, pool: BlockPool, group_ids: Sequence[int], block_hashes: Sequence[BlockHash], hashes_per_block: int
    ) -> None:
        self._cached = [pool.cached[group_id] for group_id in group_ids]
        self._hashes = block_hashes
        self._per_block = hashes_per_block

    @property
    def num_groups(self) -> int:
        """See :class:`BlockSource`."""
        return len(self._cached)

    def at(self, index: int) -> Sequence[KVCacheBlock] | None:
        """See :class:`BlockSource`."""
        return _cached_row(self._cached, self._hashes[(index + 1) * self._per_block - 1])

    def inside(self, num_hashes: int) -> Sequence[KVCacheBlock] | None:
        """See :class:`BlockSource`."""
        return _cached_row(self._cached, self._hashes[num_hashes - 1])

    def leading(self, limit: int) -> list[list[KVCacheBlock]]:
        """See :class:`BlockSource`."""
        hashes = self._hashes[self._per_block - 1 : limit * self._per_block : self._per_block]
        return _cut_to_shortest([cached.get_leading(hashes) for cached in self._cached])


class CachedOrRemoteSource:
    """Cached blocks as in :class:`CachedSource`, and where there is none the pool's ``remote_block`` for the page that
    kvstore has."""

    def __init__(
        self,
        pool: BlockPool,
        group_ids: Sequence[int],
        block_hashes: Sequence[BlockHash],
        hashes_per_block: int,
        presence: Presence,
    ) -> None:
        self._cached = [pool.cached[group_id] for group_id in group_ids]
        self._present = [presence.get(group_id, ()) for group_id in group_ids]
        self._hashes = block_hashes
        self._per_block = hashes_per_block
        self._remote = pool.remote_block

    @property
    def num_groups(self) -> int:
        """See :class:`BlockSource`."""
        return len(self._cached)

    def at(self, index: int) -> Sequence[KVCacheBlock] | None:
        """See :class:`BlockSource`."""
        block_hash = self._hashes[(index + 1) * self._per_block - 1]
        row = []
        for cached, present in zip(self._cached, self._present, strict=True):
            block = cached.get(block_hash)
            if block is None:
                if index >= len(present) or not present[index]:
                    return None
                block = self._remote
            row.append(block)
        return row

    def inside(self, num_hashes: int) -> Sequence[KVCacheBlock] | None:
        """See :class:`BlockSource`. A page of kvstore is a whole block."""
        return _cached_row(self._cached, self._hashes[num_hashes - 1])

    def leading(self, limit: int) -> list[list[KVCacheBlock]]:
        """See :class:`BlockSource`."""
        return _leading_rows(self, limit)


class HeldSource:
    """A request's own blocks in some groups, without those that hold nothing, given by id."""

    def __init__(self, tables: Sequence[Sequence[KVCacheBlock]], unusable: Collection[int]) -> None:
        self._tables = tables
        self._unusable = unusable

    @property
    def num_groups(self) -> int:
        """See :class:`BlockSource`."""
        return len(self._tables)

    def at(self, index: int) -> Sequence[KVCacheBlock] | None:
        """See :class:`BlockSource`."""
        row = []
        for table in self._tables:
            if index >= len(table) or table[index].is_null or table[index].block_id in self._unusable:
                return None
            row.append(table[index])
        return row

    def inside(self, num_hashes: int) -> Sequence[KVCacheBlock] | None:
        """Nothing: where a load failed, whole blocks are kept."""
        return None

    def leading(self, limit: int) -> list[list[KVCacheBlock]]:
        """See :class:`BlockSource`."""
        return _leading_rows(self, limit)


def _cached_row(cached: Sequence[BlockHashToBlockMap], block_hash: BlockHash) -> Sequence[KVCacheBlock] | None:
    row = [found for by_hash in cached if (found := by_hash.get(block_hash)) is not None]
    return row if len(row) == len(cached) else None


def _leading_rows(source: BlockSource, limit: int) -> list[list[KVCacheBlock]]:
    columns: list[list[KVCacheBlock]] = [[] for _ in range(source.num_groups)]
    for index in range(limit):
        row = source.at(index)
        if row is None:
            break
        for column, block in zip(columns, row, strict=True):
            column.append(block)
    return columns


def _cut_to_shortest(columns: list[list[KVCacheBlock]]) -> list[list[KVCacheBlock]]:
    shortest = min(map(len, columns))
    for column in columns:
        del column[shortest:]
    return columns
