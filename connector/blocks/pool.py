"""The block pool: an engine's blocks, given out, shared, freed, and found again by hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.cached_blocks import BlockHashToBlockMap
from kvstore.connector.blocks.copies import BlockCopies, KVCacheBlockCopy
from kvstore.connector.blocks.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from kvstore.connector.blocks.free_queue import FreeKVCacheBlockQueue
from kvstore.connector.blocks.hashing import BlockHash
from kvstore.errors import InvalidRequestError


class BlockPool:
    """All blocks of an engine, shared by its groups: a block belongs to one group from when it is given out until it
    is given to another one. KVCacheBlock 0 is the null block.

    A block that comes back with a hash stays findable and waits at the end of the queue; one without a hash can't be
    hit again and is the next to be given out. Knows nothing of requests.

    Args:
        num_blocks: at least 1, the null block included.
        num_groups: whose blocks are found apart from each other.
        enable_caching: whether blocks are found by hash at all.
        enable_kv_cache_events: whether changes are noted for :meth:`take_events`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
    ) -> None:
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.blocks = tuple(KVCacheBlock(block_id) for block_id in range(num_blocks))
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.remote_block = KVCacheBlock(-1)
        """Stands, in the result of a lookup, for a page that is to be loaded from kvstore. Of no pool."""
        self.cached = tuple(BlockHashToBlockMap() for _ in range(num_groups))
        """What can be found, by group. To be read only."""
        self.copies = BlockCopies()
        """Between blocks of it, to be made by the step that is scheduled; :meth:`copy_block` adds to them."""
        self._free = FreeKVCacheBlockQueue(self.blocks[1:])
        self._events: list[KVCacheEvent] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; some of them may still be hit."""
        return len(self._free)

    def free_block_ids(self) -> list[int]:
        """The free blocks' ids in order of eviction."""
        return [block.block_id for block in self._free]

    def get_cached_block(self, block_hash: BlockHash, group_id: int = 0) -> KVCacheBlock | None:
        """The group's block with this hash, or None. Of several, the one that has had it longest."""
        return self.cached[group_id].get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Gives out the blocks that are first in the order of eviction. What they held can't be hit any longer.

        Raises:
            InvalidRequestError: more than :attr:`num_free_blocks`; nothing has changed.
        """
        if num_blocks > self.num_free_blocks:
            raise InvalidRequestError(f"{num_blocks} blocks asked for, {self.num_free_blocks} are free")
        blocks = self._free.popleft_n(num_blocks)
        for block in blocks:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Holds blocks for one more request."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Lets go of blocks for one request.

        Args:
            ordered_blocks: in order of eviction: of those that become free, the first one leaves first.
        """
        hashed: list[KVCacheBlock] = []
        unhashed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"block {block.block_id} is freed by someone who does not hold it"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        self._free.prepend_n(unhashed)
        self._free.append_n(hashed)

    def cache_full_blocks(
        self, blocks: Iterable[KVCacheBlock], block_hashes: Iterable[BlockHash], group_id: int
    ) -> None:
        """Lets full blocks be found. Those that are found already stay as they are.

        Args:
            blocks: full ones, none of them the null block; their content must be written in this step at the latest.
            block_hashes: one for each.
            group_id: in which they are found.
        """
        insert = self.cached[group_id].insert
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block.tail_tokens:  # it was not full until now
                self._evict(block)
            if block.block_hash is None:
                block.block_hash = block_hash
                block.group_id = group_id
                insert(block_hash, block)

    def cache_partial_block(self, block: KVCacheBlock, block_hash: BlockHash, group_id: int, num_tokens: int) -> bool:
        """Lets a block be found by the hash of a prompt that ends inside of it, or at its end.

        Args:
            block: not the null block; the tail's content must be written in this step at the latest.
            block_hash: of the whole prompt up to there.
            group_id: in which it is found.
            num_tokens: of the prompt up to there.

        Returns:
            Whether it was not found by this hash before.
        """
        if block_hash == block.block_hash or block_hash in block.more_hashes:
            return False
        if 0 < block.tail_tokens < num_tokens:  # a longer tail takes the place of a shorter one
            self._evict(block)
        if block.block_hash is None:
            block.block_hash = block_hash
            block.group_id = group_id
            block.tail_tokens = num_tokens
        else:
            block.more_hashes += (block_hash,)
        self.cached[group_id].insert(block_hash, block)
        return True

    def move_hashes(self, source: KVCacheBlock, destination: KVCacheBlock) -> None:
        """Lets another block, which has no hash, be found in place of one whose owner is about to write over it."""
        assert destination.block_hash is None, f"block {destination.block_id} is found by a hash of its own"
        if source.block_hash is None:
            return
        cached = self.cached[source.group_id]
        for block_hash in (source.block_hash, *source.more_hashes):
            cached.remove(block_hash, source)
            cached.insert(block_hash, destination)
        destination.block_hash = source.block_hash
        destination.group_id = source.group_id
        destination.tail_tokens = source.tail_tokens
        destination.more_hashes = source.more_hashes
        _forget_hashes(source)

    def copy_block(self, source: KVCacheBlock, destination: KVCacheBlock, group_id: int) -> None:
        """Has a block copied before anything is written in the step that is scheduled; both are held until it is."""
        self.touch((source, destination))
        self.copies.add(KVCacheBlockCopy(source, destination, group_id))

    def free_copied(self, copies: Sequence[KVCacheBlockCopy]) -> None:
        """Lets go of the blocks of copies that have been made.

        Raises:
            InvalidRequestError: one was not taken, or is freed already; nothing has changed.
        """
        if not self.copies.end(copies):
            raise InvalidRequestError(f"among {len(copies)} copies is one that is not under way")
        self.free_blocks([block for copy in copies for block in (copy.source, copy.destination)])

    def note_stored(self, event: BlockStored) -> None:
        """Notes what :meth:`cache_full_blocks` was called for."""
        self._events.append(event)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Lets these blocks be found no longer. Who holds them keeps them; those without a hash are left alone.

        Raises:
            InvalidRequestError: an id is out of range; nothing has changed.
        """
        wanted = list(block_ids)
        for block_id in wanted:
            if not 0 <= block_id < len(self.blocks):
                raise InvalidRequestError(f"block ids lie between 0 and {len(self.blocks) - 1}, got {block_id}")
        for block_id in wanted:
            block = self.blocks[block_id]
            if block.block_hash is not None:
                self._evict(block)

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash. Refused (False, nothing has changed) while a request holds blocks."""
        if self.num_free_blocks != len(self.blocks) - 1:
            return False
        for cached in self.cached:
            cached.clear()
        for block in self.blocks:
            _forget_hashes(block)
        if self.enable_kv_cache_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """What changed since the last call, in order; nothing without ``enable_kv_cache_events``."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Recounts everything.

        Raises:
            AssertionError: queue, reference counts and hashes disagree; the message says which.
        """
        self._check_free_queue()
        num_findable = 0
        for group_id, cached in enumerate(self.cached):
            for block_hash, block in cached:
                num_findable += 1
                _check(self.blocks[block.block_id] is block, f"block {block.block_id} is cached but not of this pool")
                _check(
                    block_hash in (block.block_hash, *block.more_hashes) and block.group_id == group_id,
                    f"block {block.block_id} is found in group {group_id} by a hash that it does not carry there",
                )
        hashed = sum((block.block_hash is not None) + len(block.more_hashes) for block in self.blocks)
        _check(num_findable == hashed, f"blocks carry {hashed} hashes, {num_findable} can be found")
        null, remote = self.null_block, self.remote_block
        _check(null.is_null and null.block_id == 0 and null.block_hash is None, "the null block has been used")
        _check(remote.ref_cnt == 0 and remote.block_hash is None, "the block for remote pages has been used")

    def _check_free_queue(self) -> None:
        free = list(self._free)
        _check(len(free) == len(self._free), f"the queue holds {len(free)} blocks and counts {len(self._free)}")
        for block, following in pairwise(free):
            _check(following.prev_free is block, f"block {following.block_id} does not point back at its neighbour")
        free_ids = {block.block_id for block in free}
        _check(len(free_ids) == len(free), "a block is twice in the free queue")
        for block in self.blocks[1:]:
            if block.block_id in free_ids:
                _check(block.ref_cnt == 0, f"block {block.block_id} is free and held {block.ref_cnt} times")
            else:
                _check(block.ref_cnt > 0, f"block {block.block_id} is lost: neither free nor held")
                _check(block.prev_free is None is block.next_free, f"block {block.block_id} is held and linked as free")
        _check(0 not in free_ids, "the null block is free")

    def _evict(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        for block_hash in (block.block_hash, *block.more_hashes):
            self.cached[block.group_id].remove(block_hash, block)
            if self.enable_kv_cache_events:
                self._events.append(BlockRemoved(block_hash, block.group_id))
        _forget_hashes(block)


def check_counts(held: Sequence[int], pool: BlockPool) -> None:
    """Compares reference counts with who holds what.

    Args:
        held: for each block id, how often it is held.
        pool: whose blocks these are.

    Raises:
        AssertionError: they disagree.
    """
    for block in pool.blocks[1:]:
        _check(
            held[block.block_id] == block.ref_cnt,
            f"block {block.block_id} counts {block.ref_cnt} holders, {held[block.block_id]} hold it",
        )


def _forget_hashes(block: KVCacheBlock) -> None:
    block.block_hash = None
    block.tail_tokens = 0
    block.more_hashes = ()


def _check(holds: bool, otherwise: str) -> None:
    # No assert statement: the check must also run where Python leaves those out.
    if not holds:
        raise AssertionError(otherwise)
