"""Plain values out of vLLM's objects. Nothing of vLLM is imported here: its objects are read."""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from connector.blocks.extra_keys import MultimodalInput, PrefixKeys
from connector.blocks.hashing import BlockHashChain
from connector.identity import Model
from connector.tracked import Tracked
from connector.weights import weights_fingerprint
from kvstore.errors import KVStoreError, ResourceError

ADAPTER_WAIT = 1.0
"""Seconds for which the first request of a LoRA adapter waits for its weights to be looked at."""

MOST_SAID = 32
"""Most reasons that are logged, each once."""

_CONTENT_HASH = re.compile(r"(.+:)?([0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""How vLLM names a multimodal input by its content: SHA-256, BLAKE3 or SHA-512, behind a LoRA adapter's name."""

_logger = logging.getLogger("kvstore.connector")


class Hashes:
    """Block hashes of vLLM's requests. They are kvstore's own: vLLM's depend on PYTHONHASHSEED and on its settings.

    Args:
        block_size: tokens between two hashes.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._adapters: dict[tuple[str, str, int], Future[str]] = {}  # fingerprints of LoRA adapters
        self._asked_at: dict[tuple[str, str, int], float] = {}
        self._reader = ThreadPoolExecutor(1, "kvstore-adapters")
        self._said: set[str] = set()
        self._salt = ""

    @property
    def private(self) -> bool:
        """Whether no other engine has the same, since :meth:`reset` was called."""
        return bool(self._salt)

    def reset(self) -> None:
        """From now on no hash equals one that was made before, here or elsewhere."""
        self._salt = secrets.token_hex(16)

    def ready(self, request: Any) -> bool:
        """Whether the request's blocks can be named, or never will be. Nothing waits: ask again if not.

        What has to be read for it, a LoRA adapter's weights, is read in the background, for :data:`ADAPTER_WAIT` at
        most; then the request goes on without.
        """
        if request.lora_request is None:
            return True
        key = _adapter_key(request.lora_request)
        if key not in self._adapters:
            self._adapters[key] = self._reader.submit(_adapter_fingerprint, request.lora_request.lora_path)
            self._asked_at[key] = time.monotonic()
        return self._adapters[key].done() or time.monotonic() >= self._asked_at[key] + ADAPTER_WAIT

    def chain(self, request: Any) -> BlockHashChain | None:
        """For one request; None where its blocks can't be named for sure."""
        if request.resumable:  # its last token may be replaced
            return None
        try:
            return BlockHashChain(self.block_size, self._keys(request))
        except KVStoreError as error:
            if str(error) not in self._said and len(self._said) < MOST_SAID:
                self._said.add(str(error))
                _logger.warning("requests like %s are neither stored nor loaded: %s", request.request_id, error)
            return None

    def _keys(self, request: Any) -> PrefixKeys:
        embeds = request.prompt_embeds
        for feature in request.mm_features:
            if not _CONTENT_HASH.fullmatch(feature.identifier):
                raise ResourceError("a multimodal input is named by something else than a hash of its content")
        return PrefixKeys(
            lora_name="" if request.lora_request is None else self._adapter(request.lora_request),
            multimodal=tuple(
                MultimodalInput(
                    identifier=feature.identifier, offset=feature.mm_position.offset, length=feature.mm_position.length
                )
                for feature in request.mm_features
            ),
            cache_salt="\0".join(filter(None, (self._salt, request.cache_salt))),
            prompt_embeds=None if embeds is None else embeds.contiguous().view(torch.uint8).numpy(),
        )

    def _adapter(self, lora: Any) -> str:
        """A LoRA adapter by its weights: a name, or a path, may stand for another one next time."""
        key = _adapter_key(lora)
        if getattr(lora, "load_inplace", False):  # from its next request on it is looked at again
            self._adapters.pop(key, None)
            raise ResourceError(f"the adapter {lora.lora_name} is being replaced")
        read = self._adapters.get(key)
        if read is None or not read.done():
            raise ResourceError(f"the weights of the adapter {lora.lora_name} were not read in time")
        try:
            return read.result()
        except Exception as error:
            raise ResourceError(f"the weights of the adapter {lora.lora_name} can't be read: {error}") from error


def model_of(config: Any) -> Model:
    """What a ``VllmConfig`` computes with.

    Raises:
        ResourceError: its weights are in no folder of this machine, or can't be read.
    """
    model = config.model_config
    folders = [_weights_folder(model.model, model.revision, config.load_config.download_dir)]
    settings = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": str(config.load_config.load_format),
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
    if speculative is not None:
        settings["speculative"] = str(speculative.method)
        draft = speculative.draft_model_config
        if draft is not None and draft.model != model.model:
            folders.append(_weights_folder(draft.model, draft.revision, config.load_config.download_dir))
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
    """Names and specs of a cache group's layers."""
    by_name = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return [(name, by_name.get(name, group.kv_cache_spec)) for name in group.layer_names]


def new_blocks(output: Any, requests: Mapping[str, Tracked], block_sizes: Sequence[int]) -> Iterable[int]:
    """Blocks that a ``SchedulerOutput`` gives to requests, and that they did not find in vLLM's own cache."""
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


def _adapter_key(lora: Any) -> tuple[str, str, int]:
    return lora.lora_name, lora.lora_path, lora.lora_int_id


def _adapter_fingerprint(path: str) -> str:
    return weights_fingerprint(_weights_folder(path, None, None, "adapter_config.json"))


def _weights_folder(model: str, revision: str | None, download_dir: str | None, file: str = "config.json") -> Path:
    """Where a model's weights are: a folder, or a snapshot of the hub's cache."""
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, file, cache_dir=download_dir, revision=revision)
    except ValueError:  # no name on the hub: an address, a file in a repository
        found = None
    if not isinstance(found, str):
        raise ResourceError(f"the weights of {model} are in no folder of this machine")
    return Path(found).parent
