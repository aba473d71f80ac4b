"""The KV cache configuration of an engine: how many blocks, and the groups of layers that share a block table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.connector.blocks.specs import KVCacheSpec, UniformTypeKVCacheSpecs, check_at_least
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table: the same block id means the same tokens in each of them.

    Raises:
        ConfigError: a layer's name twice, or one without a spec.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    """Of each of these layers; a :class:`UniformTypeKVCacheSpecs` where they differ."""
    is_eagle_group: bool = False
    """Whether layers of a drafting head are among them: the last block of each hit is computed again."""

    def __post_init__(self) -> None:
        if len(set(self.layer_names)) != len(self.layer_names):
            raise ConfigError(f"a layer occurs twice in a group: {list(self.layer_names)}")
        if isinstance(self.kv_cache_spec, UniformTypeKVCacheSpecs):
            for name in self.layer_names:
                if name not in self.kv_cache_spec.kv_cache_specs:
                    raise ConfigError(f"no spec for layer {name}, only for {list(self.kv_cache_spec.kv_cache_specs)}")

    @property
    def layer_specs(self) -> tuple[KVCacheSpec, ...]:
        """One for each of ``layer_names``."""
        spec = self.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            return tuple(spec.kv_cache_specs[name] for name in self.layer_names)
        return (spec,) * len(self.layer_names)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block over all layers of the group, the padding of each left out: a page of kvstore."""
        return sum(spec.unpadded_page_size_bytes for spec in self.layer_specs)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The blocks of one engine, which all its groups share.

    Raises:
        ConfigError: no block (there is always the null block), or a layer in two groups.
    """

    num_blocks: int
    """Blocks in the engine's KV tensors, the null block (id 0) included."""
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    """None for a model without attention."""
    prefix_cache_retention_interval: int | None = None
    """Where windows and recurrent states are kept for others: None: wherever a hit may end. 0: where a prompt comes to
    its end, and where prompts part. More: there, and once in so many tokens, a multiple of where hits may end."""

    prefix_match_unit: int | None = None
    """Tokens between two block hashes of a request, where that is less than the blocks' greatest common divisor, which
    is a multiple of it. With several groups only."""

    def __post_init__(self) -> None:
        check_at_least(1, num_blocks=self.num_blocks)
        if self.prefix_match_unit is not None:
            check_at_least(1, prefix_match_unit=self.prefix_match_unit)
        if self.prefix_cache_retention_interval is not None:
            check_at_least(0, prefix_cache_retention_interval=self.prefix_cache_retention_interval)
        names = [name for group in self.kv_cache_groups for name in group.layer_names]
        if len(set(names)) != len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise ConfigError(f"layer {twice} is in two groups")

    def block_sizes(self, context_parallel_size: int = 1) -> tuple[int, ...]:
        """Tokens that one block of each group holds, over all ranks that share it."""
        return tuple(
            spec.block_size * (context_parallel_size if spec.is_sharded else 1)
            for spec in (first_spec(group) for group in self.kv_cache_groups)
        )

    def hash_block_size(self, context_parallel_size: int = 1) -> int:
        """Tokens between two block hashes of a request: the greatest length that fits into every group's blocks, or
        what was asked for.

        Raises:
            ConfigError: a ``prefix_match_unit`` that does not fit into them, or into the blocks of a single group.
        """
        sizes = self.block_sizes(context_parallel_size)
        greatest = math.gcd(*sizes) or 1
        unit = self.prefix_match_unit
        if unit is None:
            return greatest
        if greatest % unit or (len(sizes) == 1 and unit != greatest):
            raise ConfigError(
                f"prefix_match_unit must fit into the blocks of each group, and be the block size where there is one"
                f" group, got {unit} for blocks of {list(sizes)} tokens"
            )
        return unit

    def scheduler_block_size(self, context_parallel_size: int = 1) -> int:
        """The smallest length that is whole blocks of every group. Hits end at multiples of it, but for those that end
        inside a block."""
        return math.lcm(*self.block_sizes(context_parallel_size))


def first_spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """What a group's block table depends on, which is the same for each of its layers."""
    spec = group.kv_cache_spec
    return spec.first if isinstance(spec, UniformTypeKVCacheSpecs) else spec
