"""How many blocks fit into an engine's memory, and how many requests into those blocks.

One scheduler leads all workers of an engine by the same block tables, so they all get the same groups and the same
number of blocks: that of the worker with least room.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from kvstore.connector.blocks.cache_config import KVCacheConfig, KVCacheGroupSpec, first_spec
from kvstore.connector.blocks.grouping import get_kv_cache_groups
from kvstore.connector.blocks.specs import (
    FullAttentionSpec,
    KVCacheSpec,
    Limits,
    UniformTypeSpecs,
    check_at_least,
)
from kvstore.errors import ConfigError


def get_kv_cache_configs(
    workers: Sequence[Mapping[str, KVCacheSpec]],
    available_bytes: Sequence[int],
    limits: Limits,
    *,
    num_blocks_override: int | None = None,
    disable_hybrid_kv_cache_manager: bool = False,
    eagle_layers: Collection[str] = (),
) -> list[KVCacheConfig]:
    """The configuration of each worker: everywhere the same groups, each with the worker's own layers.

    The memory of every worker must hold one request of ``max_model_len`` and the null block. They are vLLM's, with
    these differences: a worker without layers has no say in the number of blocks (vLLM fails there), and a group that
    is marked for a drafting head is so on all workers, also on those with none of the group's layers.

    Args:
        workers: the layers of each worker by name, at least one worker. A layer on several workers (tensor parallelism)
            has the same spec on each.
        available_bytes: memory for the cache, by worker.
        limits: how long requests may become.
        num_blocks_override: this many blocks, whatever the memory.
        disable_hybrid_kv_cache_manager: see :func:`~kvstore.connector.blocks.grouping.get_kv_cache_groups`.
        eagle_layers: see :func:`~kvstore.connector.blocks.grouping.get_kv_cache_groups`.

    Raises:
        ConfigError: too little memory (the message names what is needed, what is there, and the estimated longest model
            length); a layer whose spec differs between workers; context parallelism with windows or chunks; layers that
            can't be grouped; a number out of its range.
    """
    if not workers or len(workers) != len(available_bytes):
        raise ConfigError(
            "at least 1 worker is needed, and a number of bytes for each,"
            f" got {len(workers)} workers and {len(available_bytes)} numbers"
        )
    if num_blocks_override is not None:
        check_at_least(1, num_blocks_override=num_blocks_override)
    groups = get_kv_cache_groups(
        _all_layers(workers),
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
        eagle_layers=eagle_layers,
    )
    _check_sharding(groups, limits)
    groups_by_worker = [_on_worker(groups, layers) for layers in workers]
    nums_blocks = []
    for worker, (worker_groups, available) in enumerate(zip(groups_by_worker, available_bytes, strict=True)):
        block_bytes = bytes_per_block(worker_groups)
        if block_bytes == 0:
            continue
        num_blocks = available // block_bytes
        where = f"worker {worker} has {available} bytes available"
        if num_blocks_override is not None:
            num_blocks, available = num_blocks_override, num_blocks_override * block_bytes
            where = f"worker {worker} has {available} bytes in num_blocks_override = {num_blocks_override} blocks"
        _check_one_request_fits(worker_groups, limits, available, where)
        nums_blocks.append(num_blocks)
    # Without attention there is still the null block.
    num_blocks = min(nums_blocks, default=1)
    return [KVCacheConfig(num_blocks, worker_groups) for worker_groups in groups_by_worker]


def scheduler_config(configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    """The scheduler's configuration: what a block table depends on, which is the same on all workers.

    Layers of one type with pages of several sizes have the spec of one of them, and the layers' names are the first
    worker's: for the bytes of a page ask a worker's configuration.

    Raises:
        ConfigError: no configuration, or some that are not of one engine.
    """
    if not configs:
        raise ConfigError("at least 1 worker's configuration is needed, got 0")
    first = configs[0]
    for config in configs:
        if config.num_blocks != first.num_blocks:
            raise ConfigError(f"workers differ in num_blocks: {first.num_blocks} and {config.num_blocks}")
        if len(config.kv_cache_groups) != len(first.kv_cache_groups):
            raise ConfigError(
                f"workers differ in their groups: {len(first.kv_cache_groups)} and {len(config.kv_cache_groups)}"
            )
    return KVCacheConfig(
        first.num_blocks, tuple(replace(group, kv_cache_spec=first_spec(group)) for group in first.kv_cache_groups)
    )


def bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes that one block takes in a worker's memory, whichever group has it."""
    return max((group.block_bytes for group in groups), default=0)


def max_concurrency(config: KVCacheConfig, limits: Limits) -> float:
    """How many requests of ``max_model_len`` the blocks hold at once; infinite where requests need none."""
    num_blocks = _blocks_per_request(config.kv_cache_groups, limits)
    return config.num_blocks / num_blocks if num_blocks else math.inf


def max_memory_bytes(groups: Sequence[KVCacheGroupSpec], limits: Limits) -> int:
    """The most bytes that one request takes."""
    return bytes_per_block(groups) * _blocks_per_request(groups, limits)


def estimate_max_model_len(groups: Sequence[KVCacheGroupSpec], limits: Limits, available_bytes: int) -> int:
    """The longest request, of at most ``max_model_len`` tokens, that fits into ``available_bytes``; 0: none.

    The null block is not in them.
    """
    lengths = range(1, limits.max_model_len + 1)
    return bisect_right(
        lengths, available_bytes, key=lambda length: max_memory_bytes(groups, replace(limits, max_model_len=length))
    )


def _all_layers(workers: Sequence[Mapping[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    layers: dict[str, KVCacheSpec] = {}
    for worker in workers:
        for name, spec in worker.items():
            known = layers.setdefault(name, spec)
            if known != spec:
                raise ConfigError(f"layer {name} differs between workers: {known} and {spec}")
    return layers


def _check_sharding(groups: Sequence[KVCacheGroupSpec], limits: Limits) -> None:
    if limits.context_parallel_size == 1:
        return
    for group in groups:
        spec = first_spec(group)
        if spec.is_sharded and not isinstance(spec, FullAttentionSpec):
            raise ConfigError(
                f"context_parallel_size must be 1 with layers of {spec.kind} like {group.layer_names[0]},"
                f" got {limits.context_parallel_size}"
            )


def _on_worker(groups: Sequence[KVCacheGroupSpec], layers: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """The groups with the layers of one worker only; a group may be left without any."""
    projected = []
    for group in groups:
        names = tuple(name for name in group.layer_names if name in layers)
        spec = group.kv_cache_spec
        if names and isinstance(spec, UniformTypeSpecs):
            spec = UniformTypeSpecs(block_size=spec.block_size, specs={name: spec.specs[name] for name in names})
        projected.append(replace(group, layer_names=names, kv_cache_spec=spec))
    return tuple(projected)


def _blocks_per_request(groups: Sequence[KVCacheGroupSpec], limits: Limits) -> int:
    return sum(group.kv_cache_spec.max_blocks(limits) for group in groups)


def _check_one_request_fits(groups: Sequence[KVCacheGroupSpec], limits: Limits, available: int, where: str) -> None:
    null_block = bytes_per_block(groups)
    needed = max_memory_bytes(groups, limits)
    usable = available - null_block
    if needed <= usable:
        return
    longest = estimate_max_model_len(groups, limits, usable)
    estimate = f"the longest that fits has about {longest} tokens" if longest else "not even one of 1 token fits"
    raise ConfigError(
        f"a request of max_model_len = {limits.max_model_len} tokens needs {needed + null_block} bytes of KV cache"
        f" ({null_block} of them for the null block), {where}; {estimate}"
    )
