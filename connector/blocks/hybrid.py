"""The coordinator of several cache groups: the longest hit that all of them agree on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.cache_config import KVCacheConfig, first_spec
from kvstore.connector.blocks.coordinator import GroupHit, KVCacheCoordinator, check_chunked_local
from kvstore.connector.blocks.full_attention import FullAttentionManager
from kvstore.connector.blocks.mamba import MambaManager
from kvstore.connector.blocks.pool import BlockPool
from kvstore.connector.blocks.request import Request
from kvstore.connector.blocks.single_type_manager import SingleTypeKVCacheManager
from kvstore.connector.blocks.sources import BlockSource, CachedOrRemoteSource, CachedSource, HeldSource, Presence
from kvstore.connector.blocks.specs import FullAttentionSpec, KVCacheSpec, Limits, MambaSpec


@dataclass(frozen=True, slots=True)
class _Kind:
    """Groups with equal specs, which are searched together."""

    manager: SingleTypeKVCacheManager[Any]
    """Of the first of them: it stands for all."""
    group_ids: tuple[int, ...]
    use_eagle: bool

    @property
    def is_full_attention(self) -> bool:
        return isinstance(self.manager, FullAttentionManager)


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Several groups, of several kinds as a rule.

    Hits end at multiples of every group's block size, and blocks behind the last such multiple are not cached: no hit
    could ask for them.

    Where recurrent states of ``"align"`` have longer blocks than there are between two hashes, hits end at any hash for
    which a state was kept, inside a block too: the block is copied for whoever goes on in it. That takes groups that
    can be hit there: full attention, states, and any other whose blocks are as short as the hashes' step.
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
        self._hits_inside_blocks = _hits_inside_blocks(config, limits)
        super().__init__(config, pool, limits, use_eagle=use_eagle, num_prefill_lookahead=num_prefill_lookahead)
        groups_of: dict[KVCacheSpec, list[int]] = {}
        for manager in self.managers:
            groups_of.setdefault(manager.spec, []).append(manager.group_id)
        kinds = [
            _Kind(self.managers[group_ids[0]], tuple(group_ids), group_ids[0] in self._eagle_groups)
            for group_ids in groups_of.values()
        ]
        # Full attention first: its search is the quickest, and what it finds bounds that of the others.
        self._kinds = sorted(kinds, key=lambda kind: not kind.is_full_attention)
        for kind in self._kinds:
            check_chunked_local(kind.manager, self.alignment, use_eagle=kind.use_eagle)

    def find_longest_cache_hit(self, request: Request, max_length: int, presence: Presence | None = None) -> GroupHit:
        """See :meth:`KVCacheCoordinator.find_longest_cache_hit`."""
        hashes = request.block_hashes

        def source_of(kind: _Kind) -> BlockSource:
            if presence is None:
                return CachedSource(self.pool, kind.group_ids, hashes, kind.manager.hashes_per_block)
            return CachedOrRemoteSource(self.pool, kind.group_ids, hashes, kind.manager.hashes_per_block, presence)

        return self._agree(source_of, max_length, len(hashes) * self.hash_block_size, drops=True)

    def find_longest_held(self, request_id: str, max_length: int, unusable: Collection[int]) -> int:
        """See :meth:`KVCacheCoordinator.find_longest_held`."""

        def source_of(kind: _Kind) -> BlockSource:
            return HeldSource([self.managers[group_id].blocks(request_id) for group_id in kind.group_ids], unusable)

        return self._agree(source_of, max_length, max_length, drops=False)[1]

    def _agree(
        self, source_of: Callable[[_Kind], BlockSource], max_length: int, num_hashed_tokens: int, *, drops: bool
    ) -> GroupHit:
        """Each kind accepts a length or shortens it, until one is left that all accept.

        A drafting head's kind looks one block further and drops it. It does so once for each length: the block that it
        drops at the final length is there, whichever kind shortened the hit to it.
        """
        hits: dict[int, list[KVCacheBlock]] = {manager.group_id: [] for manager in self.managers}
        full_lengths: dict[int, int] = {}
        longest = 0
        dropped: set[int] = set()
        sources = [source_of(kind) for kind in self._kinds]
        # With full attention and one other kind, what the other one finds is a prefix of what full attention found.
        one_round = len(self._kinds) == 2 and self._kinds[0].is_full_attention
        length = max_length
        while True:
            current = length
            for index, (kind, source) in enumerate(zip(self._kinds, sources, strict=True)):
                if index in full_lengths:  # shorter is no further question to it
                    current = min(current, full_lengths[index])
                    continue
                drop_last = drops and kind.use_eagle and index not in dropped
                limit = current
                if drop_last and not isinstance(kind.manager, MambaManager):
                    limit = min(current + self._dropped_by(kind), num_hashed_tokens)
                columns, found = kind.manager.find_longest_cache_hit(source, limit, drop_last=drop_last)
                if drop_last:
                    dropped.add(index)
                elif found < current:
                    dropped.clear()
                current = found
                longest = max(longest, found)
                hits.update(zip(kind.group_ids, columns, strict=True))
                if kind.is_full_attention:
                    full_lengths[index] = found
            if current >= length:
                break
            length = current
            if one_round:
                break
        for kind in self._kinds:
            if kind.is_full_attention:
                for group_id in kind.group_ids:
                    del hits[group_id][-(-length // kind.manager.block_size) :]
        return tuple(hits[manager.group_id] for manager in self.managers), length, longest

    def _dropped_by(self, kind: _Kind) -> int:
        """Tokens at the end of a hit that a drafting head has computed again."""
        return min(kind.manager.block_size, self.alignment) if kind.is_full_attention else kind.manager.block_size

    def _alignment_of(self, config: KVCacheConfig, limits: Limits) -> int:
        """At any hash, where hits may end inside a block."""
        if self._hits_inside_blocks:
            return config.hash_block_size(limits.context_parallel_size)
        return super()._alignment_of(config, limits)

    def _spread_eagle(self, config: KVCacheConfig, eagle: set[int]) -> set[int]:
        """Groups with equal specs are searched together: what holds for one holds for all of them."""
        specs = [first_spec(group) for group in config.kv_cache_groups]
        return {index for index, spec in enumerate(specs) if any(spec == specs[other] for other in eagle)}

    def _num_cacheable_tokens(self, manager: SingleTypeKVCacheManager[Any], num_computed_tokens: int) -> int:
        aligned = self._aligned(num_computed_tokens)
        if aligned and manager.group_id in self._eagle_groups:
            final = super()._num_cacheable_tokens(manager, num_computed_tokens)
            return min(final, self._aligned(final) + manager.block_size)  # one more, to be matched and dropped
        return aligned

    def _aligned(self, num_tokens: int) -> int:
        """Leading tokens that a hit may ask for."""
        if self._hits_inside_blocks:
            return num_tokens
        return num_tokens - num_tokens % self.scheduler_block_size


def _hits_inside_blocks(config: KVCacheConfig, limits: Limits) -> bool:
    """Whether states are kept inside blocks, and every group can be hit there."""
    parallel = limits.context_parallel_size
    step, sizes = config.hash_block_size(parallel), config.block_sizes(parallel)
    specs = [first_spec(group) for group in config.kv_cache_groups]
    shortest = step if parallel > 1 else step + 1  # over ranks, blocks of full attention are longer than the states'
    kept = any(
        isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align" and spec.block_size >= shortest
        for spec in specs
    )
    return kept and all(
        isinstance(spec, FullAttentionSpec | MambaSpec) or size == step for spec, size in zip(specs, sizes, strict=True)
    )
