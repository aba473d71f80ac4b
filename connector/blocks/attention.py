"""The blocks of each request, by the rule of one kind of attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from connector.blocks.block import Block
from connector.blocks.groups import FullAttentionSpec
from connector.blocks.hashing import BlockHash
from connector.blocks.pool import BlockPool
from connector.blocks.request import Request


class FullAttentionManager:
    """Blocks of requests in a group with full attention: every block is kept until its request is freed.

    Args:
        spec: of this group.
        pool: where blocks come from and go back to.
    """

    def __init__(self, spec: FullAttentionSpec, pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self._pool = pool
        self._blocks: dict[str, list[Block]] = {}
        # How many leading blocks of a request have been cached (or were hits). A request is in it from its first hit,
        # load or cached block on. Blocks behind this number carry no hash.
        self._num_cached: dict[str, int] = {}

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_length: int) -> list[Block]:
        """The cached blocks of the longest prefix, without holding them.

        Args:
            block_hashes: of the request's full blocks.
            max_length: tokens that the hit must not go beyond.
        """
        hit: list[Block] = []
        for block_hash in islice(block_hashes, max_length // self.block_size):
            block = self._pool.get_cached_block(block_hash)
            if block is None:  # no hash behind it can hit: each one names the whole prefix
                break
            hit.append(block)
        return hit

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Block]) -> int:
        """How many blocks leave the free queue when the request is given ``num_tokens`` slots.

        Hits that no one holds count too: they are free until they are touched.
        """
        required = -(-num_tokens // self.block_size)
        new = required - len(self._blocks.get(request_id, ())) - len(new_computed_blocks)
        return max(new, 0) + sum(block.ref_cnt == 0 and not block.is_null for block in new_computed_blocks)

    def add_computed_blocks(self, request_id: str, blocks: Sequence[Block]) -> None:
        """Gives hits to a request that holds no blocks yet, and holds them."""
        assert request_id not in self._blocks, f"request {request_id} holds blocks already"
        self._pool.touch(blocks)
        self._blocks[request_id] = list(blocks)
        self._num_cached[request_id] = len(blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[Block]:
        """Gives the request new blocks until it has ``num_tokens`` slots. The pool must have that many.

        Returns:
            The new blocks alone.
        """
        blocks = self._blocks.setdefault(request_id, [])
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return []
        new = self._pool.get_new_blocks(missing)
        blocks.extend(new)
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Lets the request's full blocks below ``num_tokens`` be found by others."""
        first, last = self._num_cached.get(request.request_id, 0), num_tokens // self.block_size
        if first >= last:
            return
        blocks = self._blocks[request.request_id]
        self._pool.cache_full_blocks(blocks[first:last], request.block_hashes[first:last])
        self._num_cached[request.request_id] = last

    def free(self, request_id: str) -> None:
        """Lets go of the request's blocks, tail first. A request without blocks is no error."""
        self._num_cached.pop(request_id, None)
        self._pool.free_blocks(reversed(self._blocks.pop(request_id, [])))

    def holds(self, request_id: str) -> bool:
        """Whether the request has been given blocks and not been freed."""
        return request_id in self._blocks

    def blocks(self, request_id: str) -> Sequence[Block]:
        """The request's blocks in the order of its tokens; none when it holds none."""
        return self._blocks.get(request_id, ())

    def check_integrity(self) -> None:
        """Recounts what requests hold against the pool's reference counts.

        Raises:
            AssertionError: they disagree.
        """
        held: dict[int, int] = {}
        for blocks in self._blocks.values():
            for block in blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
        for block in self._pool.blocks:
            if not block.is_null and held.get(block.block_id, 0) != block.ref_cnt:
                raise AssertionError(
                    f"block {block.block_id} counts {block.ref_cnt} holders, {held.get(block.block_id, 0)} hold it"
                )
        for request_id, blocks in self._blocks.items():
            num_cached = self._num_cached.get(request_id, 0)
            if num_cached > len(blocks):
                raise AssertionError(f"request {request_id}: {num_cached} of {len(blocks)} blocks count as cached")
            for block in blocks[num_cached:]:
                if block.block_hash is not None:
                    raise AssertionError(f"request {request_id}: block {block.block_id} is cached and does not count")
        if unknown := self._num_cached.keys() - self._blocks.keys():
            raise AssertionError(f"cached blocks are counted for requests that hold none: {sorted(unknown)}")
