"""What an engine caches: how many blocks there are, and what one holds in each group of layers that share a rule."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FullAttentionSpec:
    """A group of layers in which every token attends to all tokens before it.

    Raises:
        ConfigError: a value below 1.
    """

    block_size: int
    """Tokens a block."""
    page_bytes: int
    """Bytes of one block's KV over all layers of the group; also the size of the page that kvstore keeps of it."""

    def __post_init__(self) -> None:
        for name, value in (("block_size", self.block_size), ("page_bytes", self.page_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The blocks of one engine.

    Raises:
        ConfigError: fewer than two blocks (one of them is the null block), or not exactly one group.
    """

    num_blocks: int
    """Blocks in the engine's KV tensors, the null block (id 0) included."""
    groups: tuple[FullAttentionSpec, ...]
    """One spec a cache group."""

    def __post_init__(self) -> None:
        if isinstance(self.num_blocks, bool) or not isinstance(self.num_blocks, int) or self.num_blocks < 2:
            raise ConfigError(f"num_blocks must be an integer of at least 2, got {self.num_blocks!r}")
        if len(self.groups) != 1:
            raise ConfigError(f"a model with one cache group is supported, got {len(self.groups)} groups")
