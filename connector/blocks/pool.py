"""The engine's blocks: given out, shared, taken back, and found again by hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from connector.blocks.block import Block
from connector.blocks.cached_blocks import CachedBlocks
from connector.blocks.free_queue import FreeQueue
from connector.blocks.hashing import BlockHash
from kvstore.errors import InvalidRequestError


class BlockPool:
    """All blocks of an engine. Block 0 is the null block.

    A block that comes back with a hash stays findable and waits at the end of the queue; one without a hash can't be
    hit again and is the next to be given out. Knows nothing of requests.

    Args:
        num_blocks: at least 2, the null block included.
        enable_caching: whether blocks are found by hash at all.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        self.enable_caching = enable_caching
        self.blocks = tuple(Block(block_id) for block_id in range(num_blocks))
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self._free = FreeQueue(self.blocks[1:])
        self._cached = CachedBlocks()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; some of them may still be hit."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Different hashes that can be hit."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0.0 … 1.0. The null block does not count."""
        return 1.0 - self.num_free_blocks / (len(self.blocks) - 1)

    def free_block_ids(self) -> list[int]:
        """The free blocks' ids in order of eviction."""
        return [block.block_id for block in self._free]

    def get_cached_block(self, block_hash: BlockHash) -> Block | None:
        """The block with this hash, or None. Of several, the one that has had it longest."""
        return self._cached.get(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        """Gives out the blocks that are first in the order of eviction. What they held can't be hit any longer.

        Raises:
            InvalidRequestError: more than :attr:`num_free_blocks`; nothing has changed.
        """
        if num_blocks > self.num_free_blocks:
            raise InvalidRequestError(f"{num_blocks} blocks asked for, {self.num_free_blocks} are free")
        blocks = self._free.popleft_n(num_blocks)
        for block in blocks:
            self._evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Holds cached blocks for one more request."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Lets go of blocks for one request.

        Args:
            ordered_blocks: in order of eviction: of those that become free, the first one leaves first.
        """
        hashed: list[Block] = []
        unhashed: list[Block] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"block {block.block_id} is freed by someone who does not hold it"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        self._free.prepend_n(unhashed)
        self._free.append_n(hashed)

    def cache_full_blocks(self, blocks: Sequence[Block], block_hashes: Sequence[BlockHash]) -> None:
        """Lets full blocks be found.

        Args:
            blocks: full ones that have no hash yet; their content must be written in this step at the latest.
            block_hashes: one for each.
        """
        if not self.enable_caching:
            return
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block.is_null:
                continue
            assert block.block_hash is None, f"block {block.block_id} is already cached"
            block.block_hash = block_hash
            self._cached.insert(block_hash, block)

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
            self._evict(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Forgets every hash. Refused (False, nothing has changed) while a request holds blocks."""
        if self.num_free_blocks != len(self.blocks) - 1:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def check_integrity(self) -> None:
        """Recounts everything.

        Raises:
            AssertionError: queue, reference counts and hashes disagree; the message says which.
        """
        self._check_free_queue()
        findable = list(self._cached)
        for block_hash, block in findable:
            _check(self.blocks[block.block_id] is block, f"block {block.block_id} is cached but not of this pool")
            _check(block.block_hash == block_hash, f"block {block.block_id} is found by a hash that it does not carry")
        hashed = sum(block.block_hash is not None for block in self.blocks)
        _check(len(findable) == hashed, f"{hashed} blocks carry a hash, {len(findable)} can be found")
        null = self.null_block
        _check(null.is_null and null.block_id == 0 and null.block_hash is None, "the null block has been used")

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

    def _evict(self, block: Block) -> None:
        if block.block_hash is not None:
            self._cached.remove(block.block_hash, block)
            block.block_hash = None


def _check(holds: bool, otherwise: str) -> None:
    # No assert statement: the check must also run where Python leaves those out.
    if not holds:
        raise AssertionError(otherwise)
