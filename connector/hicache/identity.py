"""The identity of a host pool's pages: all that decides what their bytes mean, which their namespace's layout names.

SGLang's keys name tokens, a salt and an adapter's id: no model, no type, no layout, no rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.connector.engine.identity import Model
from kvstore.connector.engine.remote_code import code_fingerprint
from kvstore.connector.engine.weights import weights_fingerprint, weights_folder
from kvstore.errors import ResourceError
from kvstore.layout import Layout

_SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "load_format",
    "model_loader_extra_config",
    "model_impl",
    "json_model_override_args",
    "custom_weight_loader",
    "rl_quant_profile",
    "modelopt_quant",
    "device",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_algorithm",
    "enable_multi_layer_eagle",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)
"""Of SGLang's server arguments those that change numbers, or the bytes that they are written as."""

OTHER_WEIGHTS = (
    "checkpoint_engine_wait_weights_before_ready",
    "weight_cache_mode",
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "decrypted_config_file",
    "decrypted_draft_config_file",
    "quantization_param_path",
)
"""Of SGLang's server arguments those with which the model is not, or not only, what its folder says."""
_OTHER_FORMATS = ("dummy", "remote", "remote_instance", "rdma", "ipc_cache", "private")
"""Of its load formats those that take the weights from elsewhere, or make them up."""

_DRAFT_ADAPTER = "__uno_draft__"
"""What SGLang calls the adapter with which a model drafts for itself."""

_SHAPE = (
    "layout",
    "page_size",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "override_kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "storage_format_tag",
)
"""Of a host pool, where it has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """Where a model's own code may be, as :func:`code_fingerprint` asks."""

    model: str
    revision: str | None
    hf_config_path: None = None
    code_revision: None = None


def model_of(arguments: Any) -> Model:
    """What a server computes with. Reads all weights, unless it has read them before.

    Args:
        arguments: SGLang's ``ServerArgs``, as they are in effect.

    Raises:
        ResourceError: weights that are in no folder on this machine, or can't be read.
    """
    check_folder_decides(arguments)
    path, download_dir = str(arguments.model_path), arguments.download_dir
    settings = {name: str(getattr(arguments, name, None)) for name in _SETTINGS}
    folder = weights_folder(path, arguments.revision, download_dir)
    folders = [folder]
    config = _config(folder)
    if draft := getattr(arguments, "speculative_draft_model_path", None):
        folders.append(
            weights_folder(draft, getattr(arguments, "speculative_draft_model_revision", None), download_dir)
        )
    for name, adapter in sorted(adapters_of(arguments).items()):
        # Their ids, which are in the keys, are made of their names and paths: what lies there may be another one.
        settings[f"adapter {name}"] = weights_fingerprint(
            weights_folder(adapter, None, download_dir, "adapter_config.json")
        )
    if "longrope" in json.dumps(config):  # which of its factors hold depends on it
        settings["context_length"] = str(arguments.context_length)
    if arguments.trust_remote_code:
        settings["code"] = code_fingerprint(
            _Code(model=path, revision=arguments.revision), folder, config, download_dir
        )
    return Model.describe(path, folders, config, settings)


def check_folder_decides(arguments: Any) -> None:
    """Whether a server's model is what its folder says.

    Args:
        arguments: SGLang's ``ServerArgs``, or those of them that are known.

    Raises:
        ResourceError: its weights come from elsewhere.
    """
    for name in OTHER_WEIGHTS:
        value = getattr(arguments, name, None)
        if value and value != "off":
            raise ResourceError(f"with {_flag(name)} the model is not what its folder says, got {value!r}")
    for name in ("load_format", "speculative_draft_load_format"):
        value = getattr(arguments, name, None)
        value = getattr(value, "value", value)  # of an enumeration's member, whose str() is its name
        if value in _OTHER_FORMATS:
            raise ResourceError(f"with {_flag(name)} {value} the weights are not those in the model's folder")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def adapters_of(arguments: Any) -> dict[str, str]:
    """The adapters that a server starts with: their paths by their names. Those that are loaded later have an id of
    their own each time."""
    given = getattr(arguments, "lora_paths", None) or []
    if getattr(arguments, "enable_lora", None) is False:  # then SGLang ignores them, and leaves them as they were typed
        given = []
    adapters = {str(each.lora_name): str(each.lora_path) for each in given}
    if draft := getattr(arguments, "uno_lora_path", None):
        adapters[_DRAFT_ADAPTER] = str(draft)
    return adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of the model a rank has."""

    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    cp_size: int
    cp_rank: int

    @classmethod
    def of(cls, storage: Any) -> Place:
        """Of a ``HiCacheStorageConfig``. Pages that are the same on all tensor-parallel ranks (MLA) are the first
        one's."""
        shared = storage.is_mla_model
        return cls(
            tp_size=1 if shared else storage.tp_size,
            tp_rank=0 if shared else storage.tp_rank,
            pp_size=storage.pp_size,
            pp_rank=storage.pp_rank,
            cp_size=storage.attn_cp_size,
            cp_rank=storage.attn_cp_rank,
        )


def layout_of(model: Model, pool: Any, part_bytes: Sequence[int], place: Place, *, engine: str, tenant: str) -> Layout:
    """The layout of a host pool's pages.

    Args:
        model: whose pages.
        pool: a ``HostKVCache``.
        part_bytes: the sizes of the parts in which a page lies in it, in their order.
        place: the rank's.
        engine: SGLang's name and version.
        tenant: whose pages.
    """
    kind = type(pool).__name__
    dtype = str(pool.dtype).removeprefix("torch.")
    details = [engine, kind, dtype, f"parts {list(part_bytes)}", f"cp {place.cp_rank} of {place.cp_size}"]
    details += [f"{name} {getattr(pool, name, None)}" for name in _SHAPE]
    digest = hashlib.sha256("\0".join(details).encode()).hexdigest()[:16]
    return Layout(
        model=model.name,
        revision=model.version,
        dtype=dtype,
        layers=int(pool.layer_num),
        kv_heads=int(getattr(pool, "head_num", 0) or 0),
        head_size=int(getattr(pool, "head_dim", 0) or getattr(pool, "kv_cache_dim", 0) or 0),
        block_size=int(pool.page_size),
        page_bytes=sum(part_bytes),
        format=f"{engine} {pool.layout} {digest}",
        tp_size=place.tp_size,
        tp_rank=place.tp_rank,
        pp_size=place.pp_size,
        pp_rank=place.pp_rank,
        tenant=tenant,
    )


def _config(folder: Path) -> dict[str, Any]:
    """A model's configuration; a single file of weights has none beside it."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
