"""An engine's cache groups, as far as they decide on hits, loads and stores. The engine's objects are only read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.connector.longest_hit import NumSkipped
from kvstore.errors import ConfigError

WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of layers that keep all tokens, by the names of vLLM's specs."""

STATES = ("MambaSpec",)
"""Kinds of layers of which a block holds a state."""


@dataclass(frozen=True, slots=True)
class Group:
    """One of the engine's cache groups."""

    block_size: int
    keeps: bool
    """Whether blocks stay with their request until its end, unlike those before a window."""
    num_skipped: NumSkipped
    most_blocks: int | None = None
    """That a request has at a time, however long it is; None: as many as its tokens fill."""
    is_state: bool = False
    """What a block holds is the state behind its last token, of all tokens before."""
    is_offered: bool = False
    """Of states: the engine tells which block holds which of them (``boundary_state_offloads``), and block tables do
    not: there a state moves on from block to block."""


def fails_by_block(groups: Sequence[Group]) -> bool:
    """Whether an engine can go on in front of a block that was not loaded. Only with one group of which it has all
    blocks: otherwise it has to begin again, since what it needs there was not kept, or a block's number is one of
    several groups'."""
    return len(groups) == 1 and groups[0].keeps


def hash_block_size(block_sizes: Sequence[int]) -> int:
    """Tokens between two hashes, so that each group's blocks have some."""
    return math.gcd(*block_sizes)


def layers_of(group: Any) -> list[tuple[str, Any]]:
    """Names and specs of a cache group's layers, in the order in which they lie in a page: the engine's, but for layers
    with blocks as long as those of an earlier one, which lie beside it and are copied together with it."""
    by_name = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    layers = [(name, by_name.get(name, group.kv_cache_spec)) for name in group.layer_names]
    sizes = list(dict.fromkeys(spec.page_size_bytes for _, spec in layers))
    return sorted(layers, key=lambda layer: sizes.index(layer[1].page_size_bytes))


def heads_in_common(groups: Sequence[Any]) -> int:
    """Into how many parts, of as few KV heads as possible, the blocks of every layer on a rank can be cut alike.

    Args:
        groups: ``KVCacheGroupSpec``.

    Returns:
        0 where no layer has heads of its rank's own: what latent attention keeps is the same on all ranks.

    Raises:
        ConfigError: some layers have no heads, and others, or none, are the same on all ranks.
    """
    layers = [layer for group in groups for layer in layers_of(group)]
    latent = [name for name, spec in layers if "MLA" in type(spec).__name__]
    if len(latent) == len(layers):
        return 0
    headless = [name for name, spec in layers if name in latent or not hasattr(spec, "num_kv_heads")]
    if headless:
        raise ConfigError(f"kv_parts: {headless[0]} ({dict(layers)[headless[0]]!r}) has no KV heads to cut by")
    return math.gcd(*(spec.num_kv_heads for _, spec in layers))


def tokens_a_block(spec: Any, dcp_size: int) -> int:
    """How many tokens a block has: with decode context parallelism those of its parts on all ranks that share it."""
    tokens: int = spec.block_size
    return tokens * dcp_size if getattr(spec, "dcp_sharded", False) else tokens


def group_of(group: Any, manager: Any = None, dcp_size: int = 1) -> Group:
    """What both halves need to know of a ``KVCacheGroupSpec``; the scheduler's, with vLLM's manager of its blocks."""
    _, spec = layers_of(group)[0]
    is_offered = getattr(spec, "mamba_cache_mode", "") == "align"
    most = getattr(manager, "max_admission_blocks_per_request", None)
    if is_offered and most is None:
        # The state that it goes on from and the one that it writes, one for a checkpoint, one for a copy of a part.
        most = 4 + spec.num_speculative_blocks
    return Group(
        block_size=tokens_a_block(group.kv_cache_spec, dcp_size),
        keeps=type(spec).__name__ in WHOLE,
        num_skipped=_none_skipped if manager is None else manager.get_num_skipped_tokens,
        most_blocks=most,
        is_state=type(spec).__name__ in STATES,
        is_offered=is_offered,
    )


def _none_skipped(num_computed_tokens: int) -> int:
    return 0


def touches_early(config: Any, hash_block_size: int, runner_is_v2: bool, dcp_size: int = 1) -> bool:
    """Whether vLLM may write to blocks that a step gives out before it calls ``handle_preemptions`` for that step.

    Its V1 model runner never does. V2 zeroes new blocks first, which models with recurrent layers need, and those that
    keep keys and values in several types. It copies blocks in which a hit ends (recurrent layers again: elsewhere hits
    end where blocks do), and moves states on.

    Args:
        config: a ``KVCacheConfig``.
        hash_block_size: tokens between two of vLLM's own hashes: where hits may end.
        runner_is_v2: whether it runs V2.
        dcp_size: ranks that share a block by its tokens.
    """
    has_states = any(type(spec).__name__ in STATES for group in config.kv_cache_groups for _, spec in layers_of(group))
    sizes = [tokens_a_block(group.kv_cache_spec, dcp_size) for group in config.kv_cache_groups]
    hits_end_inside = any(size != hash_block_size for size in sizes)
    return runner_is_v2 and (getattr(config, "needs_kv_cache_zeroing", True) or has_states or hits_end_inside)
