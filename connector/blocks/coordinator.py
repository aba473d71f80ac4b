"""The coordinator of cache groups: each step of the manager for all groups, and the longest hit that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.cache_config import KVCacheConfig, first_spec
from kvstore.connector.blocks.chunked_local_attention import ChunkedLocalAttentionManager
from kvstore.connector.blocks.cross_attention import CrossAttentionManager
from kvstore.connector.blocks.full_attention import FullAttentionManager
from kvstore.connector.blocks.mamba import AlignedMambaManager, MambaManager
from kvstore.connector.blocks.pool import BlockPool, check_counts
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import GroupSettings, SingleTypeKVCacheManager
from kvstore.connector.blocks.sliding_window import SlidingWindowManager
from kvstore.connector.blocks.sources import (
    BlockSource,
    CachedOrRemoteSource,
    CachedSource,
    HeldSource,
    Presence,
)
from kvstore.connector.blocks.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    Limits,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstore.errors import ConfigError

GroupHit = tuple[tuple[list[KVCacheBlock], ...], int, int]
"""The blocks of a hit, by group; its length in tokens; and the longest one that some group had on the way to it."""


class KVCacheCoordinator(ABC):
    """The groups' managers, which share a pool.

    With ``use_eagle`` hits are shortened for a drafting head: in the groups that say so, or in all where none does.
    Of ``num_prefill_lookahead`` drafting modules each reads one token further ahead than the one before it, so that the
    KV of the last tokens is final only when the tokens behind them are computed.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        pool: BlockPool,
        limits: Limits,
        *,
        use_eagle: bool,
        num_prefill_lookahead: int = 0,
    ) -> None:
        self.pool = pool
        self.block_sizes = config.block_sizes(limits.context_parallel_size)
        self.hash_block_size = config.hash_block_size(limits.context_parallel_size)
        self.scheduler_block_size = config.scheduler_block_size(limits.context_parallel_size)
        self.alignment = self._alignment_of(config, limits)
        """Hits end at multiples of it."""
        eagle = {index for index, group in enumerate(config.kv_cache_groups) if group.is_eagle_group}
        if use_eagle and not eagle:
            eagle = set(range(len(config.kv_cache_groups)))
        self._eagle_groups = self._spread_eagle(config, eagle)
        self._retention = _check_retention(config, self.scheduler_block_size)
        self._num_unsettled = max(num_prefill_lookahead - 1, 0)
        if pool.enable_caching and self._eagle_groups and num_prefill_lookahead > self.scheduler_block_size:
            raise ConfigError(
                f"num_prefill_lookahead must not be above the {self.scheduler_block_size} tokens at whose multiples"
                f" hits end, got {num_prefill_lookahead}: no more than a block of each hit is computed again"
            )
        self.managers: tuple[SingleTypeKVCacheManager[Any], ...] = tuple(
            _manager(
                first_spec(group),
                pool,
                GroupSettings(
                    group_id=index,
                    block_size=self.block_sizes[index],
                    hash_block_size=self.hash_block_size,
                    alignment=self.alignment,
                    use_eagle=index in self._eagle_groups,
                    any_eagle=use_eagle,
                    limits=limits,
                    retention_interval=self._retention,
                ),
            )
            for index, group in enumerate(config.kv_cache_groups)
        )

    @abstractmethod
    def find_longest_cache_hit(self, request: Request, max_length: int, presence: Presence | None = None) -> GroupHit:
        """The longest prefix of a request that all groups have.

        Args:
            request: whose hashes are looked up.
            max_length: tokens that the hit must not go beyond.
            presence: pages of kvstore, which count as well.
        """

    @abstractmethod
    def find_longest_held(self, request_id: str, max_length: int, unusable: Collection[int]) -> int:
        """How many leading tokens of a request its own blocks stand for.

        Args:
            request_id: whose blocks they are.
            max_length: tokens that its blocks would stand for if all held what they should.
            unusable: ids of blocks that don't.
        """

    def waits_for_step(self, computed_blocks: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Whether a hit is of use in the next step only; asked here, and nowhere else."""
        return any(
            manager.waits_for_step(blocks) for manager, blocks in zip(self.managers, computed_blocks, strict=True)
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        computed_blocks: Sequence[Sequence[KVCacheBlock]],
        num_computed_tokens: int,
        num_main_tokens: int,
        num_encoder_tokens: int,
        *,
        for_admission: bool = False,
    ) -> int:
        """The sum over all groups; see :meth:`SingleTypeKVCacheManager.get_num_blocks_to_allocate`."""
        num_blocks = 0
        for manager, computed in zip(self.managers, computed_blocks, strict=True):
            if manager.holds_encoder_tokens:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id, num_encoder_tokens, (), 0, num_encoder_tokens
                )
            else:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    computed,
                    num_computed_tokens,
                    num_main_tokens,
                    for_admission=for_admission,
                )
        return num_blocks

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        blocks: Sequence[Sequence[KVCacheBlock]],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Gives hits to a request that holds no blocks yet, and blocks to the pages that come from elsewhere."""
        for manager, computed in zip(self.managers, blocks, strict=True):
            manager.add_local_computed_blocks(request_id, computed, num_computed_tokens)
        if num_external_tokens:
            for manager in self.managers:
                manager.allocate_external_computed_blocks(request_id, num_computed_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_main_tokens: int, num_encoder_tokens: int
    ) -> tuple[list[KVCacheBlock], ...]:
        """Gives the request new blocks in each group; see :meth:`SingleTypeKVCacheManager.allocate_new_blocks`."""
        new = []
        for manager in self.managers:
            num_slots = num_encoder_tokens if manager.holds_encoder_tokens else num_tokens
            new.append(manager.allocate_new_blocks(request_id, num_slots, num_main_tokens))
        return tuple(new)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Lets the request's full blocks below ``num_computed_tokens`` be found by others."""
        boundaries = self._boundaries(request) if self._retention is not None else ()
        for manager in self.managers:
            manager.cache_blocks(request, self._num_cacheable_tokens(manager, num_computed_tokens), boundaries)

    def note_reused(self, request: Request, num_tokens: int) -> None:
        """Notes a hit; see :meth:`SingleTypeKVCacheManager.note_reused`."""
        for manager in self.managers:
            num_blocks = num_tokens // manager.block_size
            if num_blocks:
                manager.note_reused(request, num_blocks)

    def remove_skipped_blocks(self, request_id: str, num_processed_tokens: int) -> None:
        """Frees the blocks that no token behind ``num_processed_tokens`` needs."""
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, num_processed_tokens)

    def complete_load(self, request_id: str, num_computed_tokens: int) -> None:
        """Ends the wait for pages; see :meth:`SingleTypeKVCacheManager.complete_load`."""
        for manager in self.managers:
            manager.complete_load(request_id, num_computed_tokens)

    def end_loading(self, request_id: str) -> None:
        """The request's blocks wait for no page any longer."""
        for manager in self.managers:
            manager.end_loading(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forgets the request and returns its blocks of all groups, which are still held."""
        return [block for manager in self.managers for block in manager.pop_blocks_for_free(request_id)]

    def free(self, request_id: str) -> None:
        """Lets go of the request's blocks, group after group, tail first."""
        for manager in self.managers:
            manager.free(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether the request has been given blocks, or could have been, and not been freed."""
        return bool(self.managers) and self.managers[0].holds(request_id)  # all groups do, or none

    def get_blocks(self, request_id: str) -> tuple[Sequence[KVCacheBlock], ...]:
        """The request's blocks by group."""
        return tuple(manager.blocks(request_id) for manager in self.managers)

    def get_num_common_prefix_blocks(self, request_id: str, popped: Mapping[int, int]) -> list[int]:
        """By group; see :meth:`SingleTypeKVCacheManager.get_num_common_prefix_blocks`."""
        return [manager.get_num_common_prefix_blocks(request_id, popped) for manager in self.managers]

    def new_step_starts(self) -> None:
        """What was cached in the step before has been computed."""
        for manager in self.managers:
            manager.new_step_starts()

    def check_integrity(self, popped: Mapping[int, int]) -> None:
        """Recounts everything.

        Args:
            popped: by block id, how often a block is held by no request any longer.

        Raises:
            AssertionError: blocks, requests, queue and hashes disagree; the message says which.
        """
        self.pool.check_integrity()
        held = [popped.get(block_id, 0) for block_id in range(len(self.pool.blocks))]
        for block in self.pool.copies.held():
            held[block.block_id] += 1
        for manager in self.managers:
            manager.count_held(held)
        check_counts(held, self.pool)

    def _alignment_of(self, config: KVCacheConfig, limits: Limits) -> int:
        """Where hits may end."""
        return config.scheduler_block_size(limits.context_parallel_size)

    def _spread_eagle(self, config: KVCacheConfig, eagle: set[int]) -> set[int]:
        """The groups whose hits are shortened, given those that say so."""
        return eagle

    def _boundaries(self, request: Request) -> set[int]:
        """Where others may go on that begin with this request's prompt: the same prompt once more (its last token is
        computed again), a longer one, one that parts from it where another did."""
        num_tokens, step = request.num_prompt_tokens, self.scheduler_block_size
        if self._eagle_groups:  # hits end a block earlier
            boundaries = {max(end // step * step - step, 0) for end in (num_tokens - 1, num_tokens)}
        else:
            boundaries = {num_tokens - 1}
        return boundaries | ({request.shared_prefix_boundary} - {0})

    def _num_cacheable_tokens(self, manager: SingleTypeKVCacheManager[Any], num_computed_tokens: int) -> int:
        """Leading tokens whose KV is final and whose blocks a hit may ask for."""
        return max(num_computed_tokens - self._num_unsettled, 0)


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Without prefix caching: any groups, or none; no hits."""

    def find_longest_cache_hit(self, request: Request, max_length: int, presence: Presence | None = None) -> GroupHit:
        """Nothing."""
        return tuple([] for _ in self.managers), 0, 0

    def find_longest_held(self, request_id: str, max_length: int, unusable: Collection[int]) -> int:
        """The tokens before the first block that is unusable, where there is one group; otherwise nothing."""
        if len(self.managers) != 1:
            return 0
        source = HeldSource([self.managers[0].blocks(request_id)], unusable)
        return self.managers[0].find_longest_cache_hit(source, max_length, drop_last=False)[1]

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Nothing is found again."""


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group."""

    def find_longest_cache_hit(self, request: Request, max_length: int, presence: Presence | None = None) -> GroupHit:
        """The group's own answer."""
        hashes = request.block_hashes
        source: BlockSource = (
            CachedSource(self.pool, (0,), hashes, 1)
            if presence is None
            else CachedOrRemoteSource(self.pool, (0,), hashes, 1, presence)
        )
        (blocks,), length = self.managers[0].find_longest_cache_hit(
            source, max_length, drop_last=0 in self._eagle_groups
        )
        return (blocks,), length, length

    def find_longest_held(self, request_id: str, max_length: int, unusable: Collection[int]) -> int:
        """The group's own answer."""
        source = HeldSource([self.managers[0].blocks(request_id)], unusable)
        return self.managers[0].find_longest_cache_hit(source, max_length, drop_last=False)[1]


def check_chunked_local(manager: SingleTypeKVCacheManager[Any], alignment: int, *, use_eagle: bool) -> None:
    """Check a group with chunks; others are left alone.

    Raises:
        ConfigError: it can't do what is asked of it.
    """
    if not isinstance(manager, ChunkedLocalAttentionManager):
        return
    if manager.spec.attention_chunk_size % manager.block_size:
        raise ConfigError(
            f"attention_chunk_size must be a multiple of the block size, got {manager.spec.attention_chunk_size} tokens"
            f" and blocks of {manager.block_size}"
        )
    if use_eagle:
        raise ConfigError("drafting heads do not go with chunked_local_attention groups")
    if manager.block_size != alignment:
        raise ConfigError(
            f"chunked_local_attention groups need the block size of the other groups: {manager.block_size} tokens,"
            f" hits end at multiples of {alignment}"
        )


def _manager(spec: KVCacheSpec, pool: BlockPool, settings: GroupSettings) -> SingleTypeKVCacheManager[Any]:
    kinds: list[tuple[type[KVCacheSpec], type[SingleTypeKVCacheManager[Any]]]] = [
        (FullAttentionSpec, FullAttentionManager),
        (SlidingWindowSpec, SlidingWindowManager),
        (ChunkedLocalAttentionSpec, ChunkedLocalAttentionManager),
        (CrossAttentionSpec, CrossAttentionManager),
    ]
    if isinstance(spec, MambaSpec):
        return (AlignedMambaManager if spec.mamba_cache_mode == "align" else MambaManager)(spec, pool, settings)
    for kind, manager in kinds:
        if isinstance(spec, kind):
            return manager(spec, pool, settings)
    raise ConfigError(f"no block manager for {type(spec).__name__}")


def _check_retention(config: KVCacheConfig, alignment: int) -> int | None:
    interval = config.prefix_cache_retention_interval
    if interval:
        kinds = [first_spec(group) for group in config.kv_cache_groups]
        if not any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in kinds):
            raise ConfigError(
                f"prefix_cache_retention_interval is {interval} and no group has a window or recurrent states: only 0"
                " and None have a meaning there"
            )
        if interval % alignment:
            raise ConfigError(
                f"prefix_cache_retention_interval must be a multiple of the {alignment} tokens at which hits may end,"
                f" got {interval}"
            )
    return interval
