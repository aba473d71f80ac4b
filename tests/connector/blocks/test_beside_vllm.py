"""The block manager beside vLLM's own, operation by operation, on the same random workloads.

After each operation both must have answered the same and be in the same state: hits, block ids, the order of eviction,
reference counts, hashes, events, usage, statistics.

Where the two differ on purpose:

- vLLM 0.32 also finds prefixes that end inside a block, and copies that block. Here full blocks alone are found. It
  does so where a full-attention group, or recurrent states in mode "align", have longer blocks than there are between
  two hashes: for those models, and no others, its registration of such tails is switched off.
- Failed loads: vLLM truncates in the scheduler, to the first block that was not filled, also where a window or a
  recurrent state leaves nothing to continue from there; in models with several groups it gives the whole load up. Here
  the manager truncates, to a length that every group can continue from; vLLM's manager is then told that length.
- Recurrent states in mode "align", with external tokens and new ones in one call: vLLM counts a block too few and, when
  that one is missing, raises halfway. Here the answer is that there is no room.
- ``get_num_common_prefix_blocks``: vLLM answers 0.

Skipped where vLLM is not installed. ``BESIDE_VLLM_SEEDS`` says how many workloads each model gets.
"""

from __future__ import annotations

import ast
import logging
import os
import random
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from connector.blocks.block import Block
from connector.blocks.config import KVCacheConfig, KVCacheGroupSpec
from connector.blocks.events import AllBlocksCleared, BlockRemoved, KVCacheEvent
from connector.blocks.extra_keys import MultimodalInput, PrefixKeys
from connector.blocks.hashing import BlockHash, BlockHashChain
from connector.blocks.manager import KVCacheManager
from connector.blocks.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"  # whole hashes in events
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="compares with vLLM, which is not installed (make test-vllm)")
    import torch
    import vllm.v1.kv_cache_interface as interface
    from vllm.distributed import kv_events
    from vllm.v1.core import kv_cache_coordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.request import RequestStatus

SEEDS = int(os.environ.get("BESIDE_VLLM_SEEDS", "25"))
FIRST_SEED = int(os.environ.get("BESIDE_VLLM_FIRST_SEED", "0"))

REMOTE = -1
"""The id that stands for a page of the level below."""

pytestmark = pytest.mark.filterwarnings("default")


# --- What is compared: models of every shape -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers with one block table."""

    kind: str
    block_size: int = 4
    reach: int = 0
    """Tokens of a window or a chunk."""
    mode: str = "all"
    speculative: int = 0
    eagle: bool = False


def full(block_size: int = 4, *, eagle: bool = False) -> Group:
    return Group(kind="full", block_size=block_size, eagle=eagle)


def window(reach: int, block_size: int = 4, *, eagle: bool = False) -> Group:
    return Group(kind="window", block_size=block_size, reach=reach, eagle=eagle)


def chunk(reach: int, block_size: int = 4) -> Group:
    return Group(kind="chunk", block_size=block_size, reach=reach)


def mamba(mode: str, block_size: int = 4, *, speculative: int = 0, eagle: bool = False) -> Group:
    return Group(kind="mamba", block_size=block_size, mode=mode, speculative=speculative, eagle=eagle)


def cross(block_size: int = 4) -> Group:
    return Group(kind="cross", block_size=block_size)


@dataclass(frozen=True)
class Model:
    groups: tuple[Group, ...]
    use_eagle: bool = False
    dcp: int = 1
    caching: bool = True
    keys: bool = False
    """Requests with LoRA, multimodal inputs, salts, prompt embeddings."""
    drafts: int = 0
    """Most tokens that are drafted for a step."""

    @property
    def aligned_steps(self) -> int:
        """Prefill steps end at multiples of it."""
        return max((group.block_size for group in self.groups if group.mode == "align"), default=1)

    @property
    def has_encoder(self) -> bool:
        return any(group.kind == "cross" for group in self.groups)

    def config(self, num_blocks: int) -> KVCacheConfig:
        groups = [
            KVCacheGroupSpec((f"layer {index}",), spec_of(group), is_eagle_group=group.eagle)
            for index, group in enumerate(self.groups)
        ]
        return KVCacheConfig(num_blocks, tuple(groups))

    def vllm_config(self, num_blocks: int) -> interface.KVCacheConfig:
        groups = [
            interface.KVCacheGroupSpec([f"layer {index}"], vllm_spec_of(group), is_eagle_group=group.eagle)
            for index, group in enumerate(self.groups)
        ]
        return interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def spec_of(group: Group) -> KVCacheSpec:
    if group.kind == "mamba":
        return MambaSpec(
            block_size=group.block_size,
            state_bytes=8,
            mamba_cache_mode=group.mode,
            num_speculative_blocks=group.speculative,
        )
    sizes = {"block_size": group.block_size, "token_bytes": 8}
    if group.kind == "window":
        return SlidingWindowSpec(**sizes, sliding_window=group.reach)
    if group.kind == "chunk":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=group.reach)
    if group.kind == "cross":
        return CrossAttentionSpec(**sizes)
    return FullAttentionSpec(**sizes)


def vllm_spec_of(group: Group) -> interface.KVCacheSpec:
    if group.kind == "mamba":
        return interface.MambaSpec(
            block_size=group.block_size,
            shapes=((2,),),
            dtypes=(torch.float32,),
            mamba_cache_mode=group.mode,
            num_speculative_blocks=group.speculative,
        )
    sizes = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group.kind == "window":
        return interface.SlidingWindowSpec(**sizes, sliding_window=group.reach)
    if group.kind == "chunk":
        return interface.ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=group.reach)
    if group.kind == "cross":
        return interface.CrossAttentionSpec(**sizes)
    return interface.FullAttentionSpec(**sizes)


MODELS = {
    "full": Model((full(),)),
    "full, block size 1": Model((full(1),)),
    "full, keys": Model((full(),), keys=True),
    "full, drafts": Model((full(),), drafts=3),
    "full, eagle": Model((full(),), use_eagle=True, drafts=2),
    "full, no caching": Model((full(),), caching=False),
    "full, decode context parallel": Model((full(),), dcp=2),
    "full, decode context parallel, eagle": Model((full(2),), dcp=4, use_eagle=True, drafts=1),
    "window of 1": Model((window(1),)),
    "window of 4": Model((window(4),)),
    "window of 5": Model((window(5),)),
    "window of 10": Model((window(10),), drafts=2),
    "window of 10, keys": Model((window(10),), keys=True),
    "window of 1000": Model((window(1000),)),
    "window of 6, block size 1": Model((window(6, 1),)),
    "window, eagle": Model((window(6),), use_eagle=True, drafts=2),
    "window of 1, eagle": Model((window(1),), use_eagle=True, drafts=2),
    "window, no caching": Model((window(6),), caching=False),
    "chunks of 4": Model((chunk(4),)),
    "chunks of 8": Model((chunk(8),), drafts=2),
    "chunks of 8, keys": Model((chunk(8),), keys=True),
    "chunks of 1000": Model((chunk(1000),)),
    "chunks, no caching": Model((chunk(8),), caching=False),
    "mamba none": Model((mamba("none", 10_000),), caching=False),
    "mamba none, drafts": Model((mamba("none", 10_000, speculative=2),), caching=False, drafts=2),
    "mamba none, short blocks": Model((mamba("none"),)),
    "mamba all": Model((mamba("all"),)),
    "mamba all, keys": Model((mamba("all"),), keys=True),
    "mamba all, drafts": Model((mamba("all", speculative=2),), drafts=2),
    "mamba all, eagle": Model((mamba("all", speculative=1),), drafts=1, use_eagle=True),
    "mamba align": Model((mamba("align"),)),
    "mamba align, drafts": Model((mamba("align", speculative=2),), drafts=2),
    "mamba align, eagle": Model((mamba("align", speculative=2),), drafts=2, use_eagle=True),
    "mamba align, no caching": Model((mamba("align", speculative=1),), drafts=1, caching=False),
    "full + full": Model((full(), full())),
    "full + full, one eagle": Model((full(), full(eagle=True)), use_eagle=True, drafts=2),
    "full + window": Model((full(), window(6))),
    "full + window, keys": Model((full(), window(10)), keys=True),
    "full + window, no caching": Model((full(), window(10)), caching=False),
    "full + window, all eagle": Model((full(), window(6)), use_eagle=True, drafts=2),
    "full + window, full eagle": Model((full(eagle=True), window(6)), use_eagle=True, drafts=2),
    "full + window, window eagle": Model((full(), window(9, eagle=True)), use_eagle=True, drafts=2),
    "window + full": Model((window(9), full())),
    "full + chunks": Model((full(), chunk(8))),
    "full + chunks, full eagle": Model((full(eagle=True), chunk(8)), use_eagle=True, drafts=1),
    "full + window + chunks": Model((full(), window(6), chunk(8))),
    "full + mamba all": Model((full(), mamba("all"))),
    "full + mamba align": Model((full(), mamba("align"))),
    "full + mamba align, keys": Model((full(), mamba("align")), keys=True),
    "full + mamba align, drafts": Model((full(), mamba("align", speculative=2)), drafts=2),
    "full + mamba align, full eagle": Model(
        (full(eagle=True), mamba("align", speculative=2)), use_eagle=True, drafts=2
    ),
    "full + mamba align, all eagle": Model((full(), mamba("align", speculative=1)), use_eagle=True, drafts=1),
    "full + 2 mamba align": Model((full(), mamba("align"), mamba("align"))),
    "full + window + window": Model((full(), window(6), window(13))),
    "full + 2 equal windows": Model((full(), window(6), window(6))),
    "full + 2 equal windows, one eagle": Model((full(), window(6), window(6, eagle=True)), use_eagle=True, drafts=1),
    "full + window + window, eagle": Model((full(), window(6), window(13)), use_eagle=True, drafts=1),
    "full + window + mamba all": Model((full(), window(6), mamba("all"))),
    "full + window + mamba align": Model((full(), window(6), mamba("align", speculative=1)), drafts=1),
    "full + window + mamba align, eagle": Model(
        (full(), window(6, eagle=True), mamba("align", speculative=1)), use_eagle=True, drafts=1
    ),
    "window + mamba all": Model((window(6), mamba("all"))),
    "window + mamba align": Model((window(6), mamba("align"))),
    "window + window": Model((window(6), window(13))),
    "window + window, eagle": Model((window(6, eagle=True), window(13)), use_eagle=True, drafts=1),
    "full 8 + window 4, keys": Model((full(8), window(10, 4)), keys=True),
    "full 16 + window 4": Model((full(16), window(7, 4))),
    "full 8 + full 4": Model((full(8), full(4))),
    "full 8 + mamba all 4": Model((full(8), mamba("all", 4))),
    "full 8 + mamba align 4": Model((full(8), mamba("align", 4))),
    "full 4 + window 8": Model((full(4), window(10, 8))),
    "full 4 + window 8, eagle": Model((full(4), window(10, 8)), use_eagle=True, drafts=2),
    "full 4 + window 8, window eagle": Model((full(4), window(10, 8, eagle=True)), use_eagle=True, drafts=2),
    "full 2 + window 4 + window 8": Model((full(2), window(6, 4), window(20, 8))),
    "full 2 + window 4 + window 2, keys": Model((full(2), window(6, 4), window(4, 2)), keys=True),
    "full 4 + mamba all 8": Model((full(4), mamba("all", 8))),
    "window 4 + window 6": Model((window(9, 4), window(9, 6))),
    "window 4 + window 8, eagle": Model((window(9, 4), window(9, 8)), use_eagle=True, drafts=1),
    "window 4 + mamba all 8": Model((window(7, 4), mamba("all", 8))),
    "full 8 + window 4": Model((full(8), window(6, 4))),
    "full 8 + window 4, eagle": Model((full(8), window(6, 4)), use_eagle=True, drafts=2),
    "full 8 + window 4, full eagle": Model((full(8, eagle=True), window(6, 4)), use_eagle=True, drafts=2),
    "full 6 + window 4": Model((full(6), window(6, 4))),
    "full 8 + window 2 + mamba all 4": Model((full(8), window(5, 2), mamba("all", 4))),
    "full 4 + mamba align 8": Model((full(4), mamba("align", 8))),
    "full 4 + mamba align 8, eagle": Model((full(4), mamba("align", 8, speculative=1)), use_eagle=True, drafts=1),
    "full 2 + window 4 + mamba align 8": Model((full(2), window(5, 4), mamba("align", 8))),
    "full + cross": Model((full(), cross()), caching=False),
    "full + mamba none": Model((full(), mamba("none"))),
    "full + mamba all, decode context parallel": Model((full(), mamba("all", 8)), dcp=2),
    "mamba all, decode context parallel": Model((mamba("all"),), dcp=2),
    "window + chunks": Model((window(6), chunk(8))),
    "chunks + mamba all": Model((chunk(8), mamba("all"))),
    "full + window, eagle in one group alone": Model((full(), window(6, eagle=True)), drafts=1),
    "full + mamba align, eagle in one group alone": Model((full(eagle=True), mamba("align", speculative=1)), drafts=1),
    "no layers": Model((), caching=False),
    "full + window + cross": Model((full(), window(6), cross(2)), caching=False),
}


# --- Requests: what both managers read of one ------------------------------------------------------------------------


@dataclass
class Step:
    """A step that was scheduled and is not over."""

    num_tokens: int
    num_drafts: int
    samples: bool
    is_stale: bool = False
    """The request lost its blocks meanwhile."""


class Request:
    """A request as both managers see it, and as the scheduler of these workloads does."""

    def __init__(
        self, request_id: str, hash_block_size: int, tokens: Sequence[int], keys: PrefixKeys, *, skip: bool
    ) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = skip
        self.prefix_keys = keys
        self._chain = BlockHashChain(hash_block_size, keys)
        self.append(tokens)

        self.steps: deque[Step] = deque()
        self.num_placeholders = 0
        """Tokens that steps under way will add."""
        self.is_loading = False
        self.computes_again = False
        """The whole prompt was loaded: its last token is computed once more, for its logits."""

        # What vLLM's manager reads besides.
        self.status = RequestStatus.WAITING
        self.shared_prefix_boundary = 0
        self.session_id = None
        self.cache_salt = keys.cache_salt or None
        self.lora_request = self._vllm_lora()
        self.mm_features = [
            SimpleNamespace(
                identifier=each.identifier, mm_position=SimpleNamespace(offset=each.offset, length=each.length)
            )
            for each in keys.multimodal
        ]
        self.prompt_embeds = None if keys.prompt_embeds is None else torch.from_numpy(keys.prompt_embeds)
        self._prompt_embeds_per_block_hashes: dict[tuple[int, int], bytes] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        return self._chain.hashes

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.token_ids

    def append(self, tokens: Sequence[int]) -> None:
        self.token_ids += tokens
        self._chain.extend(tokens)

    def _vllm_lora(self) -> SimpleNamespace | None:
        name = self.prefix_keys.lora_name
        if not name:
            return None
        return SimpleNamespace(adapter_id=1, name=name, lora_name=name, lora_path=self.prefix_keys.lora_path)


@dataclass(frozen=True)
class Allocation:
    """Numbers of :meth:`KVCacheManager.allocate_slots`."""

    num_new_tokens: int
    num_local: int = 0
    num_external: int = 0
    num_lookahead: int = 0
    delay: bool = False
    num_encoder: int = 0
    must_fit: bool = False
    reserved: int = 0


# --- The two sides ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    num_blocks: int
    max_model_len: int
    max_in_flight_tokens: int | None


class Ours:
    """The manager of this project, in words that can be compared."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self.manager = KVCacheManager(
            model.config(limits.num_blocks),
            limits.max_model_len,
            max_in_flight_tokens=limits.max_in_flight_tokens,
            enable_caching=model.caching,
            use_eagle=model.use_eagle,
            enable_kv_cache_events=True,
            dcp_world_size=model.dcp,
        )
        self.pool = self.manager.pool
        self._popped: list[list[Block]] = []

    def look_up(self, request: Request) -> tuple[Any, int]:
        return self.manager.get_computed_blocks(request)

    def allocate(self, request: Request, hit: Any, numbers: Allocation) -> Any:
        return self.manager.allocate_slots(
            request,
            numbers.num_new_tokens,
            numbers.num_local,
            hit,
            num_lookahead_tokens=numbers.num_lookahead,
            num_external_computed_tokens=numbers.num_external,
            delay_cache_blocks=numbers.delay,
            num_encoder_tokens=numbers.num_encoder,
            full_sequence_must_fit=numbers.must_fit,
            reserved_blocks=numbers.reserved,
        )

    def loading(self, request: Request) -> list[int]:
        groups = self.manager.get_blocks_to_load(request.request_id)
        return [block.block_id for blocks in groups for _, block in blocks]

    def unwritable_places(self, request: Request) -> list[int]:
        """Tokens below the computed ones at which blocks begin that are null or that others hold or find."""
        blocks = self.manager.get_blocks(request.request_id).blocks
        return [
            index * block_size
            for table, block_size in zip(blocks, self.manager.block_sizes, strict=True)
            for index, block in enumerate(table)
            if block.is_null or block.block_hash is not None or block.ref_cnt != 1
        ]

    def complete_load(self, request: Request, invalid: set[int]) -> int:
        return self.manager.complete_load(request, invalid)

    def free(self, request: Request) -> None:
        self.manager.free(request)

    def pop(self, request: Request) -> list[int]:
        self._popped.append(self.manager.pop_blocks_for_free(request))
        return [block.block_id for block in self._popped[-1]]

    def free_popped(self, index: int) -> None:
        self.manager.free_popped(self._popped.pop(index))

    def evict(self, block_ids: set[int]) -> None:
        self.manager.evict_blocks(block_ids)

    def reset(self) -> bool:
        return self.manager.reset_prefix_cache()

    def cache(self, request: Request, num_tokens: int) -> None:
        self.manager.cache_blocks(request, num_tokens)

    def remove_skipped(self, request: Request, num_tokens: int) -> None:
        self.manager.remove_skipped_blocks(request.request_id, num_tokens)

    def new_step_starts(self) -> None:
        self.manager.new_step_starts()

    def table(self, request: Request) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(request.request_id)

    def state(self, requests: Iterable[Request]) -> dict[str, Any]:
        manager, pool = self.manager, self.pool
        manager.check_integrity()
        stats = manager.make_prefix_cache_stats()
        return {
            "order of eviction": pool.free_block_ids(),
            "reference counts": [block.ref_cnt for block in pool.blocks if not block.is_null],
            "hashes": [
                None if block.block_hash is None else (block.block_hash, block.group_id) for block in pool.blocks
            ],
            "block tables": [manager.get_block_ids(request.request_id) for request in requests],
            "unhashed": [
                manager.get_blocks(request.request_id).get_unhashed_block_ids_all_groups() for request in requests
            ],
            "cached tokens": [manager.estimate_cached_tokens(request) for request in requests],
            "events": [_comparable(event) for event in manager.take_events()],
            "usage": manager.usage,
            "statistics": (stats.reset, stats.requests, stats.queries, stats.hits),
            "preempted": (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits),
        }


def _comparable(event: KVCacheEvent) -> tuple[Any, ...]:
    if isinstance(event, BlockRemoved):
        return ("removed", event.block_hash, event.group_idx)
    if isinstance(event, AllBlocksCleared):
        return ("cleared",)
    return (
        "stored",
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        event.lora_name,
        event.extra_keys,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
    )


class Theirs:
    """vLLM's manager, in the same words."""

    def __init__(self, model: Model, limits: Limits) -> None:
        config = model.config(limits.num_blocks)
        hash_block_size = config.hash_block_size(model.dcp)
        sizes = config.block_sizes(model.dcp)
        longer = [group for group, size in zip(model.groups, sizes, strict=True) if size > hash_block_size]
        self.finds_tails = any(group.mode == "align" for group in longer) and model.caching
        with _without_states_inside_blocks() if self.finds_tails else mock.patch.dict({}):
            self.manager = VllmManager(
                model.vllm_config(limits.num_blocks),
                limits.max_model_len,
                scheduler_block_size=config.scheduler_block_size(model.dcp),
                hash_block_size=hash_block_size,
                max_in_flight_tokens=limits.max_in_flight_tokens,
                enable_caching=model.caching,
                use_eagle=model.use_eagle,
                log_stats=True,
                enable_kv_cache_events=True,
                dcp_world_size=model.dcp,
            )
        for manager in self.manager.coordinator.single_type_managers:
            if isinstance(manager, MambaManager) and manager.block_size > hash_block_size:
                _only_at_block_ends(manager)
        self.pool = self.manager.block_pool
        self._popped: list[list[Any]] = []

    def look_up(self, request: Request) -> tuple[Any, int]:
        blocks, num_tokens, _ = self.manager.get_computed_blocks(request)
        return blocks, num_tokens

    def look_up_with(self, request: Request, presence: dict[int, list[bool]]) -> tuple[Any, int]:
        """A lookup that takes what the level below has for cached."""
        if not self.manager.prefix_cache_lookup_enabled(request):
            return (), 0
        pool, hashes = self.pool, request.block_hashes
        below = {
            (hashes[(index + 1) * manager.block_size // pool.hash_block_size - 1], group_id)
            for group_id, manager in enumerate(self.manager.coordinator.single_type_managers)
            for index, is_present in enumerate(presence.get(group_id, ()))
            if is_present
        }
        remote = KVCacheBlock(REMOTE)

        def get(block_hash: Any, group_ids: list[int]) -> list[Any] | None:
            row = [
                (pool.__class__.get_cached_block(pool, block_hash, [group_id]) or [None])[0]
                or (remote if (block_hash, group_id) in below else None)
                for group_id in group_ids
            ]
            return None if None in row else row

        with mock.patch.object(pool, "get_cached_block", get):
            blocks, length, _ = self.manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)
        return blocks, length

    def allocate(self, request: Request, hit: Any, numbers: Allocation) -> Any:
        added = self.manager.allocate_slots(
            request,
            numbers.num_new_tokens,
            numbers.num_local,
            hit,
            num_lookahead_tokens=numbers.num_lookahead,
            num_external_computed_tokens=numbers.num_external,
            delay_cache_blocks=numbers.delay,
            num_encoder_tokens=numbers.num_encoder,
            full_sequence_must_fit=numbers.must_fit,
            reserved_blocks=numbers.reserved,
        )
        if added is not None and hit is not None:  # vLLM leaves that to its scheduler
            self.manager.record_prefix_cache_stats(request, numbers.num_local)
        return added

    def complete_load(self, request: Request, invalid: set[int]) -> int:
        """What vLLM's scheduler does: truncates at the first block that was not filled, or starts over."""
        num_tokens = request.num_computed_tokens
        tables = self.manager.get_block_ids(request.request_id)
        for manager, table in zip(self.manager.coordinator.single_type_managers, tables, strict=True):
            covered = table[: -(-request.num_computed_tokens // manager.block_size)]
            bad = next((index for index, block_id in enumerate(covered) if block_id in invalid), None)
            if bad is not None:
                num_tokens = min(num_tokens, bad * manager.block_size)
        return self.end_load(request, num_tokens)

    def end_load(self, request: Request, num_tokens: int) -> int:
        if num_tokens:
            self.manager.cache_blocks(request, num_tokens)
        else:
            self.manager.free(request)
        return num_tokens

    def free(self, request: Request) -> None:
        self.manager.free(request)

    def pop(self, request: Request) -> list[int]:
        self._popped.append(self.manager.pop_blocks_for_free(request))
        return [block.block_id for block in self._popped[-1] if not block.is_null]

    def free_popped(self, index: int) -> None:
        self.pool.free_blocks(reversed(self._popped.pop(index)))

    def evict(self, block_ids: set[int]) -> None:
        self.manager.evict_blocks(block_ids)

    def reset(self) -> bool:
        return self.manager.reset_prefix_cache()

    def cache(self, request: Request, num_tokens: int) -> None:
        self.manager.cache_blocks(request, num_tokens)

    def remove_skipped(self, request: Request, num_tokens: int) -> None:
        self.manager.remove_skipped_blocks(request.request_id, num_tokens)

    def new_step_starts(self) -> None:
        self.manager.new_step_starts()

    def table(self, request: Request) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(request.request_id)

    def state(self, requests: Iterable[Request]) -> dict[str, Any]:
        manager, pool = self.manager, self.pool
        stats = manager.make_prefix_cache_stats()
        assert stats is not None
        return {
            "order of eviction": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "reference counts": [block.ref_cnt for block in pool.blocks if not block.is_null],
            "hashes": [_vllm_hash(block) for block in pool.blocks],
            "block tables": [manager.get_block_ids(request.request_id) for request in requests],
            "unhashed": [
                manager.get_blocks(request.request_id).get_unhashed_block_ids_all_groups() for request in requests
            ],
            "cached tokens": [manager.estimate_cached_tokens(request) for request in requests],
            "events": [_vllm_comparable(event) for event in manager.take_events()],
            "usage": manager.usage,
            "statistics": (stats.reset, stats.requests, stats.queries, stats.hits),
            "preempted": (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits),
        }


@contextmanager
def _without_states_inside_blocks() -> Iterator[None]:
    with mock.patch.object(kv_cache_coordinator, "partial_hash_hits_enabled", lambda *_, **__: False):
        yield


def _only_at_block_ends(manager: Any) -> None:
    original = manager._cache_partial_tail_block

    def cache(request: Request, num_tokens: int, **options: Any) -> Any:
        return original(request, num_tokens, **options) if num_tokens % manager.block_size == 0 else None

    manager._cache_partial_tail_block = cache


def _vllm_hash(block: Any) -> tuple[bytes, int] | None:
    return block.block_hash and (block.block_hash[:-4], int.from_bytes(block.block_hash[-4:], "big"))


def _vllm_comparable(event: Any) -> tuple[Any, ...]:
    if isinstance(event, kv_events.BlockRemoved):
        (block_hash,) = event.block_hashes
        return ("removed", block_hash, event.group_idx)
    if isinstance(event, kv_events.AllBlocksCleared):
        return ("cleared",)
    return (
        "stored",
        tuple(event.block_hashes),
        event.parent_block_hash,
        tuple(event.token_ids),
        event.block_size,
        event.lora_name,
        tuple(event.extra_keys or ()),
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
    )


class Diverged(Exception):  # noqa: N818  it is no error
    """vLLM's manager raised halfway, or did what is not wanted here: there is nothing to compare any longer."""


# --- Workloads -------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """How much happened: a comparison of nothing would always pass."""

    hits: int = 0
    hits_below: int = 0
    misses_of_room: int = 0
    loads: int = 0
    failed_loads: int = 0
    preemptions: int = 0
    resets: int = 0


@dataclass
class Workload:
    """A scheduler with random wishes, in front of both managers."""

    model: Model
    seed: int
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        chance = self.random
        self.limits = Limits(
            num_blocks=chance.choice((chance.randint(1, 12), chance.randint(8, 40), chance.randint(30, 90))),
            max_model_len=chance.choice((45, 64, 10_000)),
            max_in_flight_tokens=chance.choice((None, chance.randint(1, 40))),
        )
        self.sides = (Ours(self.model, self.limits), Theirs(self.model, self.limits))
        self.hash_block_size = self.model.config(2).hash_block_size(self.model.dcp)
        self.scheduler_block_size = self.model.config(2).scheduler_block_size(self.model.dcp)
        self.depth = chance.choice((1, 1, 2, 3))
        """Steps that may be under way for one request."""
        self.documents = [[chance.choice((0, 0, 0, 1)) for _ in range(100)] for _ in range(3)]
        self.keys = [self._random_keys() for _ in range(3)] if self.model.keys else [PrefixKeys()]
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_requests = 0
        self.num_popped = 0
        self.log: list[str] = []

    def run(self) -> None:
        try:
            self._run()
        except Diverged:
            self.sides[0].manager.check_integrity()

    def _run(self) -> None:
        operations = {
            self._arrive: 4,
            self._admit: 6,
            self._step: 12,
            self._settle: 10,
            self._end_load: 3,
            self._finish: 2,
            self._preempt: 1,
            self._free_popped: 1,
            self._new_step_starts: 4,
            self._evict: 1,
            self._reset: 1,
            self._remove_skipped: 1,
            self._cache: 1,
        }
        for operation in self.random.choices(
            list(operations), list(operations.values()), k=self.random.randint(20, 160)
        ):
            self._do(operation)
        # All is given back in the end.
        while self.running:
            self._do(self._finish)
        while self.num_popped:
            self._do(self._free_popped)
        self._do(self._reset)
        assert self.sides[0].pool.num_free_blocks == self.limits.num_blocks - 1

    def _do(self, operation: Any) -> None:
        self.log.append(operation.__name__.strip("_"))
        try:
            operation()
            mine, theirs = (side.state(self.running) for side in self.sides)
            for what, wanted in theirs.items():
                self._same(what, mine[what], wanted)
        except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise AssertionError(
                f"{self.model}, seed {self.seed}, {self.limits}, operation {len(self.log)}:"
                f" {type(error).__name__}: {error}\n" + "\n".join(self.log[-12:])
            ) from error

    def _same(self, what: str, mine: Any, theirs: Any) -> None:
        assert mine == theirs, f"{what}:\n  ours   {_short(mine)}\n  vLLM's {_short(theirs)}"

    def _both(self, name: str, *arguments: Any) -> Any:
        """The same call of both, whose answers must be the same."""
        mine, theirs = (getattr(side, name)(*arguments) for side in self.sides)
        self._same(name, mine, theirs)
        return mine

    def _note(self, text: str) -> None:
        self.log[-1] += f" {text}"

    # What happens to requests

    def _random_keys(self) -> PrefixKeys:
        chance = self.random
        ends = sorted(chance.sample(range(1, 60), 4))
        inputs = [
            MultimodalInput(identifier=chance.choice("xy"), offset=start, length=end - start)
            for start, end in pairwise(ends)
            if chance.random() < 0.5
        ]
        embeds = np.array([[chance.randint(0, 1)] for _ in range(60)], np.float32) if chance.random() < 0.2 else None
        lora = chance.choice(("", "", "adapter"))
        return PrefixKeys(
            lora_name=lora,
            lora_path=lora and "/adapters/1",
            multimodal=tuple(inputs),
            cache_salt=chance.choice(("", "", "salt")),
            prompt_embeds=embeds,
        )

    def _arrive(self) -> None:
        chance = self.random
        length = chance.randint(1, min(60, self.limits.max_model_len - 1))
        shared = chance.randint(0, length)
        tokens = chance.choice(self.documents)[:shared] + [chance.choice((0, 0, 0, 1)) for _ in range(length - shared)]
        keys = chance.choice(self.keys)
        skip = chance.random() < 0.05
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", self.hash_block_size, tokens, keys, skip=skip)
        self._note(f"{request.request_id} of {length} tokens{', skips reading' if skip else ''}")
        self.waiting.append(request)

    def _admit(self) -> None:
        if not self.waiting:
            return
        chance = self.random
        request = chance.choice(self.waiting)
        (hit, local), (their_hit, their_local) = (side.look_up(request) for side in self.sides)
        self._same("hit tokens", local, their_local)
        for what in ("get_block_ids", "get_unhashed_block_ids_all_groups"):
            self._same(f"hit, {what}", getattr(hit, what)(), getattr(their_hit, what)())
        self.counts.hits += local > 0
        external = self._random_external(request, local)
        delay = external > 0 and (local + external == request.num_tokens or chance.random() < 0.7)
        is_below = False
        if self.model.caching and chance.random() < 0.3:
            with_below = self._look_below(request, local)
            if with_below is None:
                return
            hit, their_hit, local, external = with_below
            delay = is_below = external > 0
        computed = local + external
        numbers = Allocation(
            num_new_tokens=0 if delay else self._random_chunk(request, computed),
            num_local=local,
            num_external=external,
            num_lookahead=self._random_lookahead(),
            delay=delay,
            num_encoder=chance.randint(1, 12) if self.model.has_encoder else 0,
            # Pages from below count there like blocks that are here; vLLM forgets some of them.
            must_fit=chance.random() < 0.3 and not is_below,
            reserved=chance.choice((0, 0, chance.randint(1, 6))) if delay or not external else 0,
        )
        self._note(f"{request.request_id} {numbers}")
        if self._allocate(request, (hit, their_hit), numbers):
            self.waiting.remove(request)
            self.running.append(request)
            request.is_loading = delay
            request.num_computed_tokens = computed
            self.counts.loads += delay
            if not delay:
                self._schedule(request, numbers.num_new_tokens, 0)

    def _look_below(self, request: Request, local: int) -> tuple[Any, Any, int, int] | None:
        """A hit of blocks that are here and pages that are below. vLLM is told that those below are here, too.

        vLLM's manager can be given such a hit only when its blocks that are here come before its pages that are below,
        in each group.
        """
        mine, theirs = self.sides
        presence = {
            group_id: [self.random.random() < share for _ in range(request.num_tokens // block_size)]
            for group_id, block_size in enumerate(mine.manager.block_sizes)
            if (share := self.random.choice((0.0, 0.6, 0.9, 1.0)))
        }
        self._note(f"{request.request_id} below {presence}")
        hit, same_local, external = mine.manager.get_computed_blocks_with(request, presence)
        their_hit, length = theirs.look_up_with(request, presence)
        block_ids = hit.get_block_ids()
        # A page below that was matched and dropped again leaves a longer hit with nothing to load.
        only_here = not any(REMOTE in row for row in block_ids)
        self._same("local hit", same_local, max(local, length) if only_here else local)
        self._same("hit with the level below", same_local + external, max(local, length))
        if same_local == local and not external:
            return hit, theirs.look_up(request)[0], local, 0
        self._same(
            "blocks with the level below", block_ids, tuple([block.block_id for block in row] for row in their_hit)
        )
        self.counts.hits_below += 1
        here = [row.index(REMOTE) if REMOTE in row else len(row) for row in block_ids]
        if any(block_id > 0 for row, end in zip(block_ids, here, strict=True) for block_id in row[end:]):
            return None
        rows = tuple(list(row[:end]) for row, end in zip(their_hit, here, strict=True))
        return hit, theirs.manager.create_kv_cache_blocks(rows), same_local, external

    def _step(self) -> None:
        ready = [
            request
            for request in self.running
            if not request.is_loading
            and len(request.steps) < self.depth
            and request.num_computed_tokens < request.num_tokens + request.num_placeholders
        ]
        if not ready:
            return
        request = self.random.choice(ready)
        drafts = 0
        new = self._random_chunk(request, request.num_computed_tokens)
        if request.num_computed_tokens + new >= request.num_tokens:
            drafts = self.random.randint(0, self.model.drafts)
        drafts = min(drafts, self.limits.max_model_len - request.num_computed_tokens - new)
        if drafts < 0:
            return
        numbers = Allocation(num_new_tokens=new + drafts, num_lookahead=self._random_lookahead())
        self._note(f"{request.request_id} {request.num_computed_tokens} + {numbers}")
        if self._allocate(request, (None, None), numbers):
            self._schedule(request, new, drafts)

    def _allocate(self, request: Request, hits: tuple[Any, Any], numbers: Allocation) -> bool:
        mine = self.sides[0].allocate(request, hits[0], numbers)
        try:
            theirs = self.sides[1].allocate(request, hits[1], numbers)
        except ValueError:
            assert self.model.aligned_steps > 1
            assert numbers.num_external
            assert numbers.num_new_tokens
            assert mine is None
            raise Diverged from None
        if mine is None or theirs is None:
            self._same("room", mine is not None, theirs is not None)
            self._note("- no room")
            self.counts.misses_of_room += 1
            return False
        self._same("new blocks", mine.get_block_ids(), theirs.get_block_ids())
        self._check_places(request, numbers)
        self._same("new blocks, or none", mine.get_block_ids(allow_none=True), theirs.get_block_ids(allow_none=True))
        return True

    def _check_places(self, request: Request, numbers: Allocation) -> None:
        """Each token that the step computes has a place of its own."""
        first = request.num_computed_tokens + numbers.num_local + numbers.num_external + request.computes_again
        manager = self.sides[0].manager
        blocks = manager.get_blocks(request.request_id).blocks
        for group, block_size, table in zip(self.model.groups, manager.block_sizes, blocks, strict=True):
            if group.kind in ("full", "window", "chunk"):
                written = table[first // block_size : -(-(first + numbers.num_new_tokens) // block_size)]
                assert not any(block.is_null for block in written)
                assert all(block.ref_cnt == 1 for block in written)

    def _schedule(self, request: Request, new: int, drafts: int) -> None:
        request.num_computed_tokens += new + drafts
        request.num_in_flight_tokens += new + drafts
        request.computes_again = False
        samples = request.num_computed_tokens >= request.num_tokens
        request.steps.append(Step(new + drafts, drafts, samples))
        if samples:
            request.num_placeholders += 1 + drafts

    def _settle(self) -> None:
        """The oldest step of a request is over: some of its drafts were right."""
        busy = [request for request in self.waiting + self.running if request.steps]
        if not busy:
            return
        request = self.random.choice(busy)
        step = request.steps.popleft()
        request.num_in_flight_tokens -= step.num_tokens
        if step.samples and not step.is_stale:
            accepted = self.random.randint(0, step.num_drafts)
            request.append([self.random.choice((0, 0, 0, 1)) for _ in range(1 + accepted)])
            request.num_placeholders -= 1 + step.num_drafts
            request.num_computed_tokens -= step.num_drafts - accepted
            if request.num_tokens >= self.limits.max_model_len:
                self._give_back(request)
                self.running.remove(request)
        self._note(f"{request.request_id} {step}")

    def _end_load(self) -> None:
        loading = [request for request in self.running if request.is_loading]
        if not loading:
            return
        chance = self.random
        request = chance.choice(loading)
        invalid: set[int] = set()
        if chance.random() < 0.5:
            share = chance.choice((0.05, 0.3, 1.0))
            invalid = {block_id for block_id in self.sides[0].loading(request) if chance.random() < share}
        if chance.random() < 0.1:  # of somebody else
            own = {block_id for table in self.sides[0].table(request) for block_id in table}
            invalid |= {chance.randint(1, self.limits.num_blocks + 3)} - own
        self._note(f"{request.request_id} {request.num_computed_tokens} invalid {sorted(invalid)}")
        mine, theirs = self.sides
        mine, theirs = self.sides
        if len(self.model.groups) == 1 and self.model.groups[0].kind == "full":
            num_tokens = self._both("complete_load", request, invalid)
        else:
            places = mine.unwritable_places(request)
            num_tokens = mine.complete_load(request, invalid)
            if num_tokens and any(place >= num_tokens for place in places):
                raise Diverged  # vLLM keeps blocks where tokens are to be computed that must not be written to
            theirs.end_load(request, num_tokens)
        self._note(f"-> {num_tokens}")
        assert 0 <= num_tokens <= request.num_computed_tokens
        self.counts.failed_loads += num_tokens < request.num_computed_tokens
        request.is_loading = False
        request.num_computed_tokens = num_tokens
        if not num_tokens:
            self.running.remove(request)
            self.waiting.append(request)
        elif num_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
            request.computes_again = True

    def _finish(self) -> None:
        """Also while its pages are being loaded or its steps are under way."""
        if not self.running:
            return
        request = self.random.choice(self.running)
        self._note(request.request_id)
        if self.random.random() < 0.3:
            self._both("remove_skipped", request, max(0, request.num_computed_tokens - request.num_in_flight_tokens))
        self._give_back(request)
        self.running.remove(request)

    def _preempt(self) -> None:
        if not self.running:
            return
        request = self.random.choice(self.running)
        self._note(request.request_id)
        self._give_back(request)
        self.running.remove(request)
        self.waiting.append(request)
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.num_preemptions += 1
        request.is_loading = request.computes_again = False
        for step in request.steps:
            step.is_stale = True
        self.counts.preemptions += 1

    def _give_back(self, request: Request) -> None:
        if self.random.random() < 0.3:
            self._both("pop", request)
            self.num_popped += 1
        else:
            self._both("free", request)

    def _free_popped(self) -> None:
        if self.num_popped:
            self._both("free_popped", self.random.randrange(self.num_popped))
            self.num_popped -= 1

    # What happens to the cache

    def _new_step_starts(self) -> None:
        self._both("new_step_starts")

    def _evict(self) -> None:
        block_ids = {self.random.randrange(self.limits.num_blocks) for _ in range(self.random.randint(0, 4))}
        if self.sides[1].finds_tails:  # what is evicted while it is held is cached again there as such a tail
            block_ids = {block_id for block_id in block_ids if not self.sides[0].pool.blocks[block_id].ref_cnt}
        self._note(str(sorted(block_ids)))
        self._both("evict", block_ids)

    def _reset(self) -> None:
        if self.model.groups:  # without any, vLLM resets nothing and says so in no event
            self.counts.resets += self._both("reset")

    def _remove_skipped(self) -> None:
        if self.running:
            request = self.random.choice(self.running)
            self._note(request.request_id)
            self._both("remove_skipped", request, max(0, request.num_computed_tokens - request.num_in_flight_tokens))

    def _cache(self) -> None:
        """Once more what is cached already, as after a load that is waited for."""
        computed = [request for request in self.running if not request.is_loading]
        if computed:
            request = self.random.choice(computed)
            self._note(request.request_id)
            self._both("cache", request, min(request.num_computed_tokens, request.num_tokens))

    # Numbers of tokens

    def _random_external(self, request: Request, local: int) -> int:
        chance = self.random
        if request.skip_reading_prefix_cache or chance.random() < 0.6:
            return 0
        num_tokens = chance.randint(0, request.num_tokens - local)
        unit = chance.choice((self.scheduler_block_size, self.scheduler_block_size, self.scheduler_block_size, 1))
        return num_tokens - num_tokens % unit

    def _random_chunk(self, request: Request, computed: int) -> int:
        """How many tokens the next step computes: to the end, or fewer."""
        remaining = max(request.num_tokens + request.num_placeholders - computed, 1)
        if self.random.random() < 0.5:
            return remaining
        new = self.random.randint(1, remaining)
        unit = self.model.aligned_steps
        if unit > 1 and new < remaining and self.random.random() < 0.7:
            end = (computed + new) // unit * unit
            new = end - computed if end > computed else min(remaining, (computed // unit + 1) * unit - computed)
        return new

    def _random_lookahead(self) -> int:
        return self.random.choice((0, self.model.drafts, self.random.randint(0, self.model.drafts)))


def _short(answer: Any) -> str:
    """Hashes by their first letters."""
    return re.sub(r"[0-9a-f]{16,}", lambda found: found[0][:6], re.sub(r"b(['\"]).*?(?<!\\)\1", _hex, repr(answer)))


def _hex(found: re.Match[str]) -> str:
    return ast.literal_eval(found[0]).hex()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # vLLM warns of each reset that it refuses
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", MODELS)
def test_does_what_vllm_does(name: str) -> None:
    counts = Counts()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        Workload(MODELS[name], seed, counts).run()
    assert counts.misses_of_room or not MODELS[name].groups
    assert counts.loads
    assert counts.preemptions
    if MODELS[name].caching:
        assert counts.hits or name == "window of 1"  # vLLM caches none of its blocks: nothing is attended to
        assert counts.hits_below or name == "chunks of 4"  # whole chunks always hit
