"""Which coordinator a configuration needs: without prefix caching, for one group, for several."""

from __future__ import annotations

from kvstore.connector.blocks.cache_config import KVCacheConfig, first_spec
from kvstore.connector.blocks.coordinator import (
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
    check_chunked_local,
)
from kvstore.connector.blocks.hybrid import HybridKVCacheCoordinator
from kvstore.connector.blocks.pool import BlockPool
from kvstore.connector.blocks.specs import ChunkedLocalAttentionSpec, CrossAttentionSpec, Limits, SlidingWindowSpec
from kvstore.errors import ConfigError


def get_kv_cache_coordinator(
    config: KVCacheConfig,
    pool: BlockPool,
    limits: Limits,
    *,
    use_eagle: bool,
    num_prefill_lookahead: int,
    enable_caching: bool,
) -> KVCacheCoordinator:
    """The coordinator for a configuration.

    Raises:
        ConfigError: the groups can't do what is asked of them.
    """
    specs = [first_spec(group) for group in config.kv_cache_groups]
    if limits.context_parallel_size > 1:
        for spec in specs:
            if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
                raise ConfigError(f"context parallelism does not go with {spec.kind} groups")
    if not enable_caching or not specs:
        return KVCacheCoordinatorNoPrefixCache(config, pool, limits, use_eagle=use_eagle)
    if any(isinstance(spec, CrossAttentionSpec) for spec in specs):
        raise ConfigError("prefix caching does not go with cross_attention groups: the prompt is not all that counts")
    if len(specs) == 1:
        coordinator = UnitaryKVCacheCoordinator(
            config, pool, limits, use_eagle=use_eagle, num_prefill_lookahead=num_prefill_lookahead
        )
        check_chunked_local(coordinator.managers[0], coordinator.alignment, use_eagle=use_eagle)
        return coordinator
    return HybridKVCacheCoordinator(
        config, pool, limits, use_eagle=use_eagle, num_prefill_lookahead=num_prefill_lookahead
    )
