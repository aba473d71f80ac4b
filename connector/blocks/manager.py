"""The block manager: the scheduler's only door to the engine's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connector.blocks.attention import FullAttentionManager
from connector.blocks.block import Block
from connector.blocks.groups import CacheConfig
from connector.blocks.pool import BlockPool
from connector.blocks.request import Request
from kvstore.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks by cache group, in the order of a request's tokens. What the manager hands out and takes back."""

    blocks: tuple[Sequence[Block], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(tuple((*mine, *others) for mine, others in zip(self.blocks, other.blocks, strict=True)))

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The blocks' ids, one list a group."""
        return tuple([block.block_id for block in group] for group in self.blocks)


@dataclass(frozen=True, slots=True)
class PrefixCacheStatistics:
    """What the prefix cache was asked and what it had, counted when a request is first given blocks."""

    requests: int = 0
    queries: int = 0
    """Tokens of those requests."""
    hits: int = 0
    """Tokens of them that were in cached blocks of this engine."""


class KVCacheManager:
    """Gives blocks to requests, and finds what is already computed.

    For each request, in this order: :meth:`get_computed_blocks`; what that misses may be looked up in kvstore;
    :meth:`allocate_slots` for the prompt and again for each step; :meth:`free`. With pages on their way from kvstore,
    ``allocate_slots(..., delay_cache_blocks=True)`` and, when they have come or failed, :meth:`complete_load`.

    Block ids, hits and the order of eviction are those of vLLM V1's manager after the same calls.

    A block counts as cached from the call on in which its slots are allocated, *before* the engine has computed it. The
    engine must write it in the step that it schedules with that call, before any other request of the step reads it.

    Not thread-safe: it belongs to the scheduler's thread.

    Args:
        config: how many blocks of what size.
        enable_caching: False: every lookup misses, no block is found again.
    """

    def __init__(self, config: CacheConfig, *, enable_caching: bool = True) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, enable_caching=enable_caching)
        self._attention = FullAttentionManager(config.groups[0], self.pool)
        self._nothing = KVCacheBlocks(((),))
        self._statistics = PrefixCacheStatistics()

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._attention.block_size

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, 0.0 … 1.0."""
        return self.pool.usage

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest prefix of a request that is in cached blocks. Changes and holds nothing.

        Full blocks only. When all tokens hit, the last one has to be computed again, to have logits: the hit ends at
        least one token, and hence one block, earlier.

        Returns:
            The blocks, and how many tokens they hold. Valid until the next call that allocates or evicts.
        """
        if not self.pool.enable_caching:
            return self._nothing, 0
        hit = self._attention.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return KVCacheBlocks((hit,)) if hit else self._nothing, len(hit) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> KVCacheBlocks | None:
        """Gives a request the slots that its next step needs.

        Args:
            request: ``num_computed_tokens`` of it have slots already.
            num_new_tokens: tokens to compute in this step. May be 0 while the request only waits for external ones.
            num_new_computed_tokens: tokens in ``new_computed_blocks``. For a request without blocks only.
            new_computed_blocks: what :meth:`get_computed_blocks` found; held from now on.
            num_external_computed_tokens: tokens behind those whose KV comes from kvstore. They get blocks of their own.
            delay_cache_blocks: the external tokens are still on their way: no new block is cached until
                :meth:`complete_load` says that they have come.

        Returns:
            The blocks added for ``num_new_tokens`` (the external tokens' blocks are in :meth:`get_block_ids` alone),
            or None when there is no room; then nothing has changed.

        Raises:
            InvalidRequestError: the numbers do not fit together; nothing has changed.
        """
        request_id = request.request_id
        hit: Sequence[Block] = new_computed_blocks.blocks[0] if new_computed_blocks is not None else ()
        num_computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        num_slots = num_computed + num_new_tokens
        num_to_cache = 0 if delay_cache_blocks else min(num_slots, request.num_tokens)
        is_new = not self._attention.holds(request_id)
        self._check_numbers(
            request, num_new_tokens, num_new_computed_tokens, len(hit), num_external_computed_tokens, num_to_cache
        )

        if self._attention.get_num_blocks_to_allocate(request_id, num_slots, hit) > self.pool.num_free_blocks:
            return None
        if is_new:
            self._attention.add_computed_blocks(request_id, hit)
            self._count(request.num_tokens, num_new_computed_tokens)
        # Two steps that give out the same blocks as one would; the second alone is the answer.
        self._attention.allocate_new_blocks(request_id, num_computed)
        new = self._attention.allocate_new_blocks(request_id, num_slots)
        self.cache_blocks(request, num_to_cache)
        return KVCacheBlocks((new,)) if new else self._nothing

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Lets the request's full blocks below ``num_computed_tokens`` be found by others. Their content must be there.

        Blocks that were cached before are left as they are.
        """
        if self.pool.enable_caching:
            self._attention.cache_blocks(request, num_computed_tokens)

    def complete_load(self, request: Request, invalid_block_ids: Iterable[int] = ()) -> int:
        """Ends the wait for external tokens: what came is cached, what did not is computed.

        Args:
            request: allocated with ``delay_cache_blocks``; its ``num_computed_tokens`` includes the external ones.
            invalid_block_ids: blocks that were not filled. Ids of other requests are ignored.

        Returns:
            How many leading tokens are there now, up to the first invalid block: the request's ``num_computed_tokens``
            from now on. Blocks behind keep their place and are not cached. With 0 the request holds no blocks any
            longer and starts over.
        """
        invalid = frozenset(invalid_block_ids)
        num_computed_tokens = request.num_computed_tokens
        for index, block in enumerate(self._attention.blocks(request.request_id)):
            if block.block_id in invalid:
                num_computed_tokens = min(num_computed_tokens, index * self.block_size)
                break
        if num_computed_tokens:
            self.cache_blocks(request, num_computed_tokens)
        else:
            self.free(request)
        return num_computed_tokens

    def free(self, request: Request) -> None:
        """Takes the request's blocks back, tail first. Full ones can be hit until they are given to someone else.

        Not while something still copies from or to them: hold on until the connector has reported the request.
        """
        self._attention.free(request.request_id)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Lets these blocks be found no longer; who holds them keeps them.

        Raises:
            InvalidRequestError: an id is out of range; nothing has changed.
        """
        self.pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets everything cached. Refused (False, nothing has changed) while a request holds blocks."""
        return self.pool.reset_prefix_cache()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks that a request holds; none when it holds none."""
        blocks = self._attention.blocks(request_id)
        return KVCacheBlocks((tuple(blocks),)) if blocks else self._nothing

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of the blocks that a request holds, one list a group."""
        return self.get_blocks(request_id).get_block_ids()

    def make_prefix_cache_stats(self) -> PrefixCacheStatistics:
        """What was counted since the last call."""
        statistics, self._statistics = self._statistics, PrefixCacheStatistics()
        return statistics

    def check_integrity(self) -> None:
        """Recounts everything; for tests and idle moments.

        Raises:
            AssertionError: blocks, requests, queue and hashes disagree; the message says which.
        """
        self.pool.check_integrity()
        self._attention.check_integrity()

    def _count(self, queries: int, hits: int) -> None:
        # Here and not at the lookup, which a request that waits for room repeats in each step.
        if self.pool.enable_caching:
            before = self._statistics
            self._statistics = PrefixCacheStatistics(before.requests + 1, before.queries + queries, before.hits + hits)

    def _check_numbers(
        self, request: Request, new: int, new_computed: int, hit_blocks: int, external: int, to_cache: int
    ) -> None:
        name = f"request {request.request_id}"
        if min(new, new_computed, external) < 0:
            raise InvalidRequestError(
                f"{name}: numbers of tokens must not be negative: {new}, {new_computed}, {external}"
            )
        if new + new_computed + external == 0:
            raise InvalidRequestError(f"{name}: at least one token must be new or computed elsewhere, got 0")
        if new_computed != hit_blocks * self.block_size:
            raise InvalidRequestError(
                f"{name}: {new_computed} computed tokens do not fill {hit_blocks} blocks of {self.block_size}"
            )
        if self._attention.holds(request.request_id):
            if hit_blocks or external:
                raise InvalidRequestError(f"{name} holds blocks: it can't be given computed ones any longer")
        elif request.num_computed_tokens:
            raise InvalidRequestError(
                f"{name} holds no blocks and says that {request.num_computed_tokens} tokens are computed"
            )
        full_blocks = to_cache // self.block_size
        if self.pool.enable_caching and len(request.block_hashes) < full_blocks:
            raise InvalidRequestError(
                f"{name}: {len(request.block_hashes)} block hashes for {full_blocks} full blocks to be cached"
            )
