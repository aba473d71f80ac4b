"""Plain values out of vLLM's configuration, tensors and plans. Nothing of vLLM is imported: its objects are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvstore.connector.engine.groups import Group
from kvstore.connector.engine.identity import CacheGroup, Model
from kvstore.connector.engine.request_state import RequestState
from kvstore.errors import ConfigError, ResourceError

_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")
_STATES = ("MambaSpec",)
_KINDS = (*_WHOLE, "SlidingWindowSpec", "ChunkedLocalAttentionSpec", *_STATES)
"""Kinds of layers whose blocks are pages: what a block holds depends on the tokens up to its end alone."""


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


def touches_early(config: Any, hash_block_size: int, runner_is_v2: bool) -> bool:
    """Whether vLLM may write to blocks that a step gives out before it calls ``handle_preemptions`` for that step.

    Its V1 model runner never does. V2 zeroes new blocks first, which models with recurrent layers need, and those that
    keep keys and values in several types. It copies blocks in which a hit ends (recurrent layers again: elsewhere hits
    end where blocks do), and moves states on.

    Args:
        config: a ``KVCacheConfig``.
        hash_block_size: tokens between two of vLLM's own hashes: where hits may end.
        runner_is_v2: whether it runs V2.
    """
    has_states = any(type(spec).__name__ in _STATES for group in config.kv_cache_groups for _, spec in layers_of(group))
    hits_end_inside = any(group.kv_cache_spec.block_size != hash_block_size for group in config.kv_cache_groups)
    return runner_is_v2 and (getattr(config, "needs_kv_cache_zeroing", True) or has_states or hits_end_inside)


def model_of(config: Any) -> Model:
    """What a ``VllmConfig`` computes with.

    Raises:
        ResourceError: its weights are in no folder on this machine, or can't be read.
    """
    model = config.model_config
    folders = [weights_folder(model.model, model.revision, config.load_config.download_dir)]
    settings = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": str(config.load_config.load_format),
        "loader": str(config.load_config.model_loader_extra_config),  # it may name other weights than the folder's
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "lora_dtype": str(getattr(config.lora_config, "lora_dtype", "")),
    }
    for name in ("quantization_config", "model_impl", "override_attention_dtype"):
        settings[name] = str(getattr(model, name, ""))
    for name in ("mm_processor_kwargs", "video_pruning_rate"):
        settings[name] = str(getattr(model.multimodal_config, name, ""))
    hf_config = model.hf_config.to_dict()
    if "longrope" in str(hf_config):  # which of its factors hold depends on it
        settings["max_model_len"] = str(model.max_model_len)
    speculative = config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():  # its layers are in the pages
        settings["speculative"] = str(speculative.method)
        draft = speculative.draft_model_config
        if draft is not None and draft.model != model.model:
            folders.append(weights_folder(draft.model, draft.revision, config.load_config.download_dir))
    return Model.describe(model.model, folders, hf_config, settings)


def check_parallel(parallel: Any) -> None:
    """Whether each rank has whole tokens.

    Raises:
        ResourceError: it does not.
    """
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ResourceError(f"{name} {getattr(parallel, name)}: pages of a part of a block's tokens are not kept")


def layers_of(group: Any) -> list[tuple[str, Any]]:
    """Names and specs of a cache group's layers, in the order in which they lie in a page: the engine's, but for layers
    with blocks as long as those of an earlier one, which lie beside it and are copied together with it."""
    by_name = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    layers = [(name, by_name.get(name, group.kv_cache_spec)) for name in group.layer_names]
    sizes = list(dict.fromkeys(spec.page_size_bytes for _, spec in layers))
    return sorted(layers, key=lambda layer: sizes.index(layer[1].page_size_bytes))


def rows_by_part(group: Any, blocks: Mapping[str, torch.Tensor], parts: int) -> list[list[torch.Tensor]]:
    """A cache group's blocks as rows of bytes (:func:`rows_of`), by part and layer.

    Args:
        group: a ``KVCacheGroupSpec``.
        blocks: of each of its layers, ``(blocks, heads, tokens, elements)`` where they are cut.
        parts: into how many ranges of KV heads they are cut; 0: not at all.

    Raises:
        ConfigError: they can't be cut so.
        ResourceError: a block is not one run of bytes.
    """
    if not parts:
        return [[rows_of(blocks[name], spec.page_size_bytes) for name, spec in layers_of(group)]]
    rows: list[list[torch.Tensor]] = [[] for _ in range(parts)]
    for name, spec in layers_of(group):
        of_layer, heads = blocks[name], getattr(spec, "num_kv_heads", 1)
        if heads % parts:
            raise ConfigError(f"kv_parts: a rank's {heads} KV heads of {name} can't be cut into {parts} parts")
        if of_layer.dim() != 4 or of_layer.shape[1] != heads:
            raise ConfigError(
                f"kv_parts: blocks of shape {tuple(of_layer.shape[1:])} of {name} don't show their KV heads"
            )
        for part, cut in enumerate(torch.split(of_layer, heads // parts, 1)):
            try:
                rows[part].append(rows_of(cut, cut[0].numel() * cut.element_size()))
            except ResourceError as error:
                raise ConfigError(
                    f"kv_parts: the KV heads of {name} do not come first in a block (strides {of_layer.stride()[1:]}):"
                    " VLLM_KV_CACHE_LAYOUT=LBHNC is needed"
                ) from error
    return rows


def group_of(group: Any, manager: Any = None) -> Group:
    """What both halves need to know of a ``KVCacheGroupSpec``; the scheduler's, with vLLM's manager of its blocks."""
    _, spec = layers_of(group)[0]
    is_offered = getattr(spec, "mamba_cache_mode", "") == "align"
    most = getattr(manager, "max_admission_blocks_per_request", None)
    if is_offered and most is None:
        # The state that it goes on from and the one that it writes, one for a checkpoint, one for a copy of a part.
        most = 4 + spec.num_speculative_blocks
    return Group(
        block_size=group.kv_cache_spec.block_size,
        keeps=type(spec).__name__ in _WHOLE,
        num_skipped=_none_skipped if manager is None else manager.get_num_skipped_tokens,
        most_blocks=most,
        is_state=type(spec).__name__ in _STATES,
        is_offered=is_offered,
    )


def _none_skipped(num_computed_tokens: int) -> int:
    return 0


def cache_group(
    group: Any,
    blocks: Mapping[str, torch.Tensor],
    page_bytes: int,
    details: Sequence[str],
    isa: Callable[[str], str],
    parts: int = 0,
) -> CacheGroup:
    """What decides on the bytes of a cache group's blocks.

    Args:
        group: a ``KVCacheGroupSpec``.
        blocks: of each of its layers.
        page_bytes: of one block of all of its layers, or of a part of it.
        details: what is the same for all of them: the engine's version, attention backends, the cache's layout.
        isa: the processor's instruction set by which a layer packs its blocks.
        parts: into how many ranges of KV heads the blocks are cut (:func:`rows_by_part`): described is one of them.
    """
    layers = layers_of(group)
    if parts:
        layers = [(name, replace(spec, num_kv_heads=spec.num_kv_heads // parts)) for name, spec in layers]
    _, spec = layers[0]
    of_layers = []
    for name, layer_spec in layers:
        inside = blocks[name][0, : layer_spec.num_kv_heads] if parts else blocks[name][0]
        shape = f"{tuple(inside.shape)} {inside.stride()} {inside.dtype}"
        of_layers.append(f"{name} {shape} {isa(name)} {layer_spec!r}")
    return CacheGroup(
        block_size=spec.block_size,
        page_bytes=page_bytes,
        dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
        layers=len(layers),
        kv_heads=getattr(spec, "num_kv_heads", 0),
        head_size=getattr(spec, "head_size", 0),
        details=[*details, *of_layers],
    )


def new_blocks(output: Any, requests: Mapping[str, RequestState], block_sizes: Sequence[int]) -> Iterable[int]:
    """Blocks that a ``SchedulerOutput`` gives to requests, and that they did not find in vLLM's own cache, and those
    that are zeroed or copied to."""
    cached = output.scheduled_cached_reqs
    whole = [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if block_ids is not None and request_id in cached.resumed_req_ids:
            whole.append((request_id, block_ids))
        else:
            yield from (block_id for of_group in block_ids or () for block_id in of_group)
    for request_id, block_ids in whole:
        tracked = requests.get(request_id)
        num_local = tracked.num_local if tracked is not None else 0
        for size, of_group in zip(block_sizes, block_ids, strict=True):
            yield from of_group[num_local // size :]
    for copy in getattr(output, "kv_cache_block_copies", None) or ():
        yield copy.dst_block_id
    yield from getattr(output, "new_block_ids_to_zero", None) or ()  # also for requests that wait for their loads


def rows_of(blocks: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """A layer's blocks as rows of bytes: ``(blocks, page_bytes)``, in place.

    Args:
        blocks: one in each element of the first dimension.
        page_bytes: of one block, padding included.

    Raises:
        ResourceError: a block is not one run of bytes.
    """
    size = blocks.element_size()
    inside = list(zip(blocks.shape[1:], blocks.stride()[1:], strict=True))
    reach = 1 + sum((count - 1) * stride for count, stride in inside)
    elements = math.prod(count for count, _ in inside)
    if reach != elements or not elements * size <= page_bytes <= blocks.stride(0) * size:
        raise ResourceError(
            f"a block of shape {tuple(blocks.shape[1:])} and strides {blocks.stride()[1:]} in pages of {page_bytes}"
            " bytes is not one run of bytes: another VLLM_KV_CACHE_LAYOUT is needed"
        )
    return torch.empty(0, dtype=torch.uint8, device=blocks.device).set_(
        blocks.untyped_storage(),
        blocks.storage_offset() * size,
        (blocks.shape[0], page_bytes),
        (blocks.stride(0) * size, 1),
    )


def weights_folder(model: str, revision: str | None, download_dir: str | None, file: str = "config.json") -> Path:
    """Where a model's weights are: a folder, or a snapshot of the hub's cache."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, file, cache_dir=download_dir, revision=revision)
    except ValueError:  # no name on the hub: an address, a file in a repository
        found = None
    if not isinstance(found, str):
        raise ResourceError(f"the weights of {model} are in no folder on this machine")
    return Path(found).parent
