"""Which namespace an engine's pages belong to: everything that makes its bytes mean the same to another engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.connector.engine.weights import weights_fingerprint
from kvstore.errors import ConfigError, ResourceError
from kvstore.layout import Layout

_NAMES_NOTHING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "name_or_path")
"""Keys of a model's configuration that change no number, or are told elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is computed with, as far as it decides on the numbers in a KV cache."""

    name: str
    """The folder's last part, or the name on the hub."""
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
        meaning = {key: value for key, value in config.items() if key not in _NAMES_NOTHING}
        digest.update(json.dumps([meaning, dict(settings)], sort_keys=True, default=str).encode())
        if not weights:
            raise ResourceError(f"the weights of {model} are in no folder on this machine")
        return cls(name=Path(model).name if Path(model).is_dir() else model, version=digest.hexdigest()[:16])


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
