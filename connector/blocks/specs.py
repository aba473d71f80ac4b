"""KV cache specs: what one layer keeps in a block, by kind of attention.

::

    KVCacheSpec
    ├── AttentionSpec               keys and values of each token
    │   ├── FullAttentionSpec       of all tokens
    │   ├── SlidingWindowSpec       of the last few
    │   ├── ChunkedLocalAttentionSpec   of the tokens in the same chunk
    │   └── CrossAttentionSpec      of the encoder's tokens, never shared between requests
    ├── MambaSpec                   one state, which stands for all tokens before it
    └── UniformTypeKVCacheSpecs            several layers of one kind whose pages differ in size
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvstore.errors import ConfigError

MambaCacheMode = Literal["none", "all", "align"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long requests become, and over how many ranks they are spread.

    Raises:
        ConfigError: a value out of its range.
    """

    max_model_len: int
    """Most tokens of a request, prompt and answer."""
    max_in_flight_tokens: int | None = None
    """Most tokens that are scheduled and not settled: a batch for each step under way. None: ``max_model_len``."""
    context_parallel_size: int = 1
    """Ranks that share each block of a sharded group (decode times prefill)."""

    def __post_init__(self) -> None:
        check_at_least(1, max_model_len=self.max_model_len, context_parallel_size=self.context_parallel_size)
        if self.max_in_flight_tokens is not None:
            check_at_least(1, max_in_flight_tokens=self.max_in_flight_tokens)

    @property
    def in_flight_tokens(self) -> int:
        """``max_in_flight_tokens``, or ``max_model_len`` where it is not given."""
        return self.max_model_len if self.max_in_flight_tokens is None else self.max_in_flight_tokens


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """One layer's cache. Specs are compared by value: equal ones can share a group.

    Raises:
        ConfigError: a value out of its range; the message names it.
    """

    kind: ClassVar[str]
    """The name that events give it."""
    is_sharded: ClassVar[bool] = False
    """Whether ranks of context parallelism share each block, so that it holds that many times the tokens."""

    block_size: int
    """Tokens a block."""
    page_size_padded: int | None = None
    """Bytes that a block takes, where that is more than it needs."""

    def __post_init__(self) -> None:
        check_at_least(1, block_size=self.block_size)
        if self.page_size_padded is not None and self.page_size_padded < self.unpadded_page_size_bytes:
            raise ConfigError(
                f"page_size_padded must be at least the {self.unpadded_page_size_bytes} bytes of a block,"
                f" got {self.page_size_padded}"
            )

    @property
    @abstractmethod
    def unpadded_page_size_bytes(self) -> int:
        """Bytes that one block needs in one layer."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block takes in one layer."""
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """Whether a request always needs the same blocks of both, so that both can use one block table."""
        return type(self) is type(other) and self.block_size == other.block_size


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of each token."""

    is_sharded: ClassVar[bool] = True

    token_bytes: int
    """Bytes of one token's keys and values in this layer: 2 * heads * head size * bytes an element."""

    def __post_init__(self) -> None:
        check_at_least(1, token_bytes=self.token_bytes)
        super().__post_init__()

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes that one block needs in one layer."""
        return self.block_size * self.token_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to all tokens before it.

    A layer with a window or chunks whose blocks are kept as if it had none is of this kind too, and says so.
    """

    kind: ClassVar[str] = "full_attention"

    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    """None where ``sliding_window`` is given."""

    def __post_init__(self) -> None:
        if self.sliding_window is not None:
            check_at_least(1, sliding_window=self.sliding_window)
        if self.attention_chunk_size is not None:
            check_at_least(1, attention_chunk_size=self.attention_chunk_size)
            if self.sliding_window is not None:
                raise ConfigError(
                    "a layer has either a window or chunks,"
                    f" got sliding_window {self.sliding_window} and attention_chunk_size {self.attention_chunk_size}"
                )
        super().__post_init__()

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """Windows do not matter: the blocks are kept either way."""
        return isinstance(other, FullAttentionSpec) and self.block_size == other.block_size


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to itself and the ``sliding_window - 1`` tokens before it."""

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int
    extra_retained_tokens: int = 0
    """Tokens before the window whose blocks are kept too: with several drafting modules, one less than there are, since
    so many tokens at the end may be computed once more."""

    def __post_init__(self) -> None:
        check_at_least(1, sliding_window=self.sliding_window)
        check_at_least(0, extra_retained_tokens=self.extra_retained_tokens)
        super().__post_init__()

    def max_admission_blocks_per_request(self, limits: Limits) -> int:
        """The most blocks that a request holds at once: those of the window and of the tokens under way, and one more,
        since a window may begin inside a block."""
        held = self.sliding_window - 1 + self.extra_retained_tokens + limits.in_flight_tokens
        return -(-min(held, limits.max_model_len) // self.block_size) + 1

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """The same window."""
        return (
            isinstance(other, SlidingWindowSpec)
            and self.block_size == other.block_size
            and self.sliding_window == other.sliding_window
        )


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """The sequence is cut into chunks of ``attention_chunk_size``; a token attends to those before it in its chunk."""

    kind: ClassVar[str] = "chunked_local_attention"

    attention_chunk_size: int

    def __post_init__(self) -> None:
        check_at_least(1, attention_chunk_size=self.attention_chunk_size)
        super().__post_init__()

    def max_admission_blocks_per_request(self, limits: Limits) -> int:
        """The most blocks that a request holds at once: those of a chunk and of the tokens under way."""
        tokens = min(self.attention_chunk_size + limits.in_flight_tokens, limits.max_model_len)
        return -(-tokens // self.block_size)

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """The same chunks."""
        return (
            isinstance(other, ChunkedLocalAttentionSpec)
            and self.block_size == other.block_size
            and self.attention_chunk_size == other.attention_chunk_size
        )


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A token attends to what an encoder made of the request's other input. Never shared between requests."""

    kind: ClassVar[str] = "cross_attention"
    is_sharded: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A recurrent layer: a block holds one state, that behind its last token.

    ``mamba_cache_mode`` says which states are kept for others: ``"none"``; ``"all"``, one a block; ``"align"``, the one
    behind each step, for engines that end their steps at block boundaries: then a request holds two states at most.
    """

    kind: ClassVar[str] = "mamba"

    state_bytes: int
    """Bytes of one state."""
    mamba_cache_mode: MambaCacheMode = "none"
    num_speculative_blocks: int = 0
    """More states at the end of each request, for tokens that may be rejected."""

    def __post_init__(self) -> None:
        check_at_least(1, state_bytes=self.state_bytes)
        check_at_least(0, num_speculative_blocks=self.num_speculative_blocks)
        if self.mamba_cache_mode not in ("none", "all", "align"):
            raise ConfigError(f"mamba_cache_mode must be 'none', 'all' or 'align', got {self.mamba_cache_mode!r}")
        super().__post_init__()

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one state, whatever the block size."""
        return self.state_bytes

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """The same number of states, each of the same size."""
        return (
            isinstance(other, MambaSpec)
            and self.block_size == other.block_size
            and self.page_size_bytes == other.page_size_bytes
            and self.mamba_cache_mode == other.mamba_cache_mode
            and self.num_speculative_blocks == other.num_speculative_blocks
        )


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one type whose pages differ in size, behind one block table.

    Raises:
        ConfigError: no layer, or layers of different types.
    """

    kind: ClassVar[str] = "uniform_type"

    kv_cache_specs: Mapping[str, KVCacheSpec] = field(hash=False)
    """By layer, at least one."""

    def __post_init__(self) -> None:
        if not self.kv_cache_specs:
            raise ConfigError("a group of layers of one type needs at least 1 layer, got 0")
        for name, spec in self.kv_cache_specs.items():
            if spec.block_size != self.block_size or not spec.is_same_type(self.first):
                raise ConfigError(f"layer {name} is not of the same type as the others: {spec}, {self.first}")
        super().__post_init__()

    @property
    def first(self) -> KVCacheSpec:
        """Any of them: what the block table needs to know is the same in all."""
        return next(iter(self.kv_cache_specs.values()))

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes that one block needs in all these layers together."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """Whether the other's layers could join these."""
        return self.first.is_same_type(other.first if isinstance(other, UniformTypeKVCacheSpecs) else other)


def check_at_least(lowest: int, **values: int) -> None:
    """Check whole numbers of a configuration.

    Raises:
        ConfigError: one is not an integer, or below ``lowest``.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(f"{name} must be an integer of at least {lowest}, got {value!r}")
