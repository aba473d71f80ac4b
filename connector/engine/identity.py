"""The identity of an engine's pages: all that decides what their bytes mean, which their namespace's layout names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.connector.engine.groups import layers_of, tokens_a_block
from kvstore.connector.engine.page_rows import strides_in_page
from kvstore.connector.engine.remote_code import code_fingerprint, without_code
from kvstore.connector.engine.weights import weights_fingerprint, weights_folder
from kvstore.errors import ConfigError, ResourceError
from kvstore.labels import label_of
from kvstore.layout import Layout

if TYPE_CHECKING:
    import torch

_UNNAMED = "model"
"""What a model is called of which no configuration says what it is."""
_NAMES_NOTHING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "name_or_path")
"""Keys of a model's configuration that change no number, or are told elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is computed with, as far as it decides on the numbers in a KV cache: nothing of it is a name that people
    choose (:func:`model_label`)."""

    name: str
    """What kind of model: its architecture, as its configuration says."""
    version: str
    """Of the weights and of whatever else changes numbers: two engines with the same one agree on every page."""

    @classmethod
    def describe(
        cls, model: str, weights: Sequence[Path], config: Mapping[str, Any], settings: Mapping[str, str]
    ) -> Model:
        """The model that an engine has loaded.

        Args:
            model: as the user named it: a folder, or a name on the hub.
            weights: folders with weights that take part: the model's, and a draft model's if its KV is in the pages.
            config: the model's configuration, as it is in effect: overrides included.
            settings: what else changes numbers: quantization, load format and the like.

        Raises:
            ResourceError: weights that can't be read.
        """
        digest = hashlib.sha256()
        for folder in weights:
            digest.update(weights_fingerprint(folder).encode())
        meaning = without_code({key: value for key, value in config.items() if key not in _NAMES_NOTHING})
        digest.update(json.dumps([meaning, dict(settings)], sort_keys=True, default=str).encode())
        if not weights:
            raise ResourceError(f"the weights of {model} are in no folder on this machine")
        kinds = config.get("architectures") or [config.get("model_type")]
        return cls(name=label_of(str(kinds[0] or _UNNAMED)), version=digest.hexdigest()[:16])


def model_label(model: str) -> str:
    """What people call a model: its folder's or file's name, or the name on the hub. It decides on nothing."""
    is_here = False
    with suppress(OSError, ValueError):  # too long for a path, or with a zero in it
        is_here = Path(model).exists()
    return label_of(Path(model).absolute().name if is_here else model)


def model_of(config: Any) -> Model:
    """What a ``VllmConfig`` computes with.

    Raises:
        ResourceError: its weights are in no folder on this machine, or can't be read.
    """
    model, download_dir = config.model_config, config.load_config.download_dir
    models = [model]
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
            models.append(draft)
    folders = [weights_folder(each.model, each.revision, download_dir) for each in models]
    for number, (each, folder) in enumerate(zip(models, folders, strict=True)):
        trusted = getattr(each, "trust_remote_code", False)
        if trusted and (code := code_fingerprint(each, folder, each.hf_config.to_dict(), download_dir)):
            settings[f"code {number}"] = code
    return Model.describe(model.model, folders, hf_config, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One cache group's blocks on one rank."""

    block_size: int
    page_bytes: int
    dtype: str
    layers: int
    kv_heads: int
    head_size: int
    details: Sequence[str]
    """Everything else that decides on the bytes of a block: backend, shapes and strides inside a block by layer, the
    processor's instruction set where the backend packs by it, the engine's version."""

    @property
    def format(self) -> str:
        """The details as a name: the first ones in words, all of them as a digest."""
        digest = hashlib.sha256("\0".join(self.details).encode()).hexdigest()[:16]
        return f"{' '.join(self.details[:2])} {digest}"


def cache_group(
    group: Any,
    blocks: Mapping[str, torch.Tensor],
    page_bytes: int,
    details: Sequence[str],
    isa: Callable[[str], str],
    parts: int = 0,
    dcp_size: int = 1,
) -> CacheGroup:
    """What decides on the bytes of a cache group's blocks.

    Args:
        group: a ``KVCacheGroupSpec``.
        blocks: of each of its layers.
        page_bytes: of one block of all of its layers, or of a part of it.
        details: what is the same for all of them: the engine's version, attention backends, the cache's layout.
        isa: the processor's instruction set by which a layer packs its blocks.
        parts: into how many ranges of KV heads the blocks are cut (:func:`rows_by_part`): described is one of them.
        dcp_size: ranks that share a block by its tokens.
    """
    layers = layers_of(group)
    if parts:
        layers = [(name, replace(spec, num_kv_heads=spec.num_kv_heads // parts)) for name, spec in layers]
    _, spec = layers[0]
    of_layers = []
    for name, layer_spec in layers:
        inside = blocks[name][0, : layer_spec.num_kv_heads] if parts else blocks[name][0]
        shape = f"{tuple(inside.shape)} {strides_in_page(inside)} {inside.dtype}"
        of_layers.append(f"{name} {shape} {isa(name)} {layer_spec!r}")
    return CacheGroup(
        block_size=tokens_a_block(spec, dcp_size),
        page_bytes=page_bytes,
        dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
        layers=len(layers),
        kv_heads=getattr(spec, "num_kv_heads", 0),
        head_size=getattr(spec, "head_size", 0),
        details=[*details, *of_layers],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of the model a worker has."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0


def parts_a_rank(kv_parts: int, tp_size: int) -> int:
    """Into how many parts each rank's KV heads are cut.

    Args:
        kv_parts: those of all ranks; 0: nothing is cut.
        tp_size: how many ranks have heads of their own.

    Raises:
        ConfigError: ranks would share a part.
    """
    if kv_parts % tp_size:
        raise ConfigError(
            f"kv_parts {kv_parts}: must be a multiple of the {tp_size} ranks that have KV heads of their own"
        )
    return kv_parts // tp_size


def layouts(model: Model, groups: Sequence[CacheGroup], place: Place, tenant: str) -> list[Layout]:
    """The layouts of one worker's pages, by cache group."""
    return [
        Layout(
            model=model.name,
            revision=model.version,
            dtype=group.dtype,
            layers=group.layers,
            kv_heads=group.kv_heads,
            head_size=group.head_size,
            block_size=group.block_size,
            page_bytes=group.page_bytes,
            format=group.format,
            group=number,
            tp_size=place.tp_size,
            tp_rank=place.tp_rank,
            pp_size=place.pp_size,
            pp_rank=place.pp_rank,
            tenant=tenant,
        )
        for number, group in enumerate(groups)
    ]


def layouts_by_part(
    model: Model, groups: Sequence[CacheGroup], place: Place, tenant: str, parts: int
) -> list[list[Layout]]:
    """The layouts of one worker's pages, by part and cache group: a part is what a rank of its own would have.

    Args:
        model: whose pages.
        groups: a part of their blocks.
        place: the worker's.
        tenant: whose pages.
        parts: into how many the worker's KV heads are cut.
    """
    size, first = place.tp_size * parts, place.tp_rank * parts
    places = [replace(place, tp_size=size, tp_rank=first + part) for part in range(parts)]
    return [layouts(model, groups, of_part, tenant) for of_part in places]
