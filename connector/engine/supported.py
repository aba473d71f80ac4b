"""Which models and settings of vLLM kvstore can keep pages of. The others run without it.

A block is a page where what it holds depends on the tokens up to its end alone.
"""

from __future__ import annotations

from typing import Any

from kvstore.connector.engine.groups import STATES, WHOLE, layers_of
from kvstore.errors import ConfigError, ResourceError

_KINDS = (*WHOLE, "SlidingWindowSpec", "ChunkedLocalAttentionSpec", *STATES)
"""Kinds of layers whose blocks are pages, by the names of vLLM's specs."""


def check_model(model: Any) -> None:
    """Whether a request of a ``ModelConfig`` may begin behind its first token, with what another one has computed.

    Raises:
        ResourceError: it may not: its pooler asks for all tokens at once, or a token changes with later ones.
    """
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        raise ResourceError("vLLM does not serve this pooling model with prefix caching")
    if model.is_diffusion:
        raise ResourceError("models that answer by diffusion are not kept")


def check_groups(config: Any) -> None:
    """Whether the blocks of a ``KVCacheConfig`` are pages.

    Raises:
        ResourceError: they are not, of some kind of layer.
    """
    specs = [spec for group in config.kv_cache_groups for _, spec in layers_of(group)]
    if unknown := sorted({type(spec).__name__ for spec in specs} - set(_KINDS)):
        raise ResourceError(f"layers of the kind {', '.join(unknown)} are not kept")
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise ResourceError("layers in which a token attends to later ones are not kept")
    if any(getattr(spec, "mamba_cache_mode", "align") == "none" for spec in specs):
        raise ResourceError("states of recurrent layers are kept only with vLLM's own prefix caching on")
    everything = tuple(range(len(config.kv_cache_groups)))
    if config.prefix_cacheable_group_ids != everything or any(spec.prefix_replay_tokens for spec in specs):
        raise ResourceError("some cache groups of this model can't be found by prefix")


def check_parallel(parallel: Any, config: Any, is_cut: bool) -> None:
    """Whether what the ranks of a ``ParallelConfig`` have of the blocks of a ``KVCacheConfig`` are pages.

    Args:
        parallel: how the model is spread.
        config: its groups.
        is_cut: whether pages are cut by KV heads, too.

    Raises:
        ConfigError: pages are cut by heads and by tokens.
        ResourceError: these are no pages.
    """
    if (ranks := parallel.prefill_context_parallel_size) > 1:
        raise ResourceError(f"prefill_context_parallel_size {ranks}: what the ranks that it adds have is not kept")
    if (ranks := parallel.decode_context_parallel_size) == 1:
        return
    specs = [spec for group in config.kv_cache_groups for _, spec in layers_of(group)]
    if whole := sorted({type(spec).__name__ for spec in specs if not getattr(spec, "dcp_sharded", False)}):
        raise ResourceError(
            f"decode_context_parallel_size {ranks}: layers of the kind {', '.join(whole)}, whose blocks ranks do not"
            " share by tokens, are not kept"
        )
    if is_cut:
        raise ConfigError(f"kv_parts: pages are not cut by heads where decode_context_parallel_size is {ranks}")
