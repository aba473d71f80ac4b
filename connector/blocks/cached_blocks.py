"""The index of the prefix cache: from a block hash to the blocks of one group that carry it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.hashing import BlockHash


class BlockHashToBlockMap:
    """Blocks by hash. Several may carry one hash, and the one that has carried it longest is found.

    A block that turns out equal to a cached one is not merged with it: a request's block ids never change once given.
    Nearly every hash has one block, so that a dict of blocks is made for the second only.
    """

    def __init__(self) -> None:
        self._by_hash: dict[BlockHash, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def __iter__(self) -> Iterator[tuple[BlockHash, KVCacheBlock]]:
        """Every hash with every block that carries it."""
        for block_hash, found in self._by_hash.items():
            for block in found.values() if isinstance(found, dict) else (found,):
                yield block_hash, block

    def get(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """The block that has carried this hash longest, or None."""
        found = self._by_hash.get(block_hash)
        return next(iter(found.values())) if isinstance(found, dict) else found

    def get_leading(self, block_hashes: Iterable[BlockHash]) -> list[KVCacheBlock]:
        """The blocks of these hashes, up to the first hash without one."""
        get = self._by_hash.get
        leading: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            found = get(block_hash)
            if found is None:
                break
            leading.append(next(iter(found.values())) if isinstance(found, dict) else found)
        return leading

    def insert(self, block_hash: BlockHash, block: KVCacheBlock) -> None:
        """Lets the block be found by this hash. It must not be already."""
        found = self._by_hash.setdefault(block_hash, block)
        if found is block:
            return
        if isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._by_hash[block_hash] = {found.block_id: found, block.block_id: block}

    def remove(self, block_hash: BlockHash, block: KVCacheBlock) -> None:
        """Lets the block be found no longer. It must be carrying this hash."""
        found = self._by_hash[block_hash]
        if isinstance(found, dict):
            del found[block.block_id]
            if found:
                return
        del self._by_hash[block_hash]

    def clear(self) -> None:
        """Forgets every block."""
        self._by_hash.clear()
