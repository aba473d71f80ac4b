"""The reference engine: paged KV, prefix caching, continuous batching, and kvstore where there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvstore.connector.blocks.cache_config import KVCacheConfig
from kvstore.connector.blocks.manager import KVCacheManager
from kvstore.connector.blocks.specs import (
    KVCacheSpec,
    Limits,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstore.connector.disagg.handover import WAIT, Handover, default_node_id
from kvstore.connector.reference.batch import BatchedSequence
from kvstore.connector.reference.kv_cache import KVCache
from kvstore.connector.reference.model import Llama
from kvstore.connector.reference.request import Answer, Request, answer_of
from kvstore.connector.reference.scheduler import Scheduler, Step
from kvstore.connector.scheduler import LOOKUP_BUDGET, SchedulerConnector
from kvstore.connector.worker import LOAD_DEADLINE, STORE_DEADLINE, WorkerConnector
from kvstore.errors import DeadlineError, InvalidRequestError, UnavailableError
from kvstore.gpu.cudart import cuda_runtime
from kvstore.gpu.paged_kv import PagedKV
from kvstore.gpu.pinned import PinnedMapping
from kvstore.gpu.pinned_arena import PinnedArena
from kvstore.gpu.quantized import QuantizedKV
from kvstore.layout import Layout

if TYPE_CHECKING:
    from kvstore import Client, Namespace

_logger = logging.getLogger("kvstore.connector")

_NO_LIMIT = 1 << 30
"""Tokens of a request: whatever the blocks allow, which with windows or recurrence alone is any number."""

_IDLE_WAIT = 0.0005
"""Seconds between two looks at loads or stores that everything waits for."""


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """What engines need that hand prompts over to each other."""

    key: bytes
    """32 bytes, the same on all of them: it signs tickets."""
    node_id: str = ""
    """What the others call this engine's node; empty: :func:`~kvstore.connector.disagg.handover.default_node_id`."""
    peers: Mapping[str, Client] = field(default_factory=dict)
    """Other engines' nodes, by such names: pages are loaded from nowhere else. The caller closes them."""
    wait: float = WAIT
    """Most seconds for which pages on their way are waited for."""


class Engine:
    """Answers prompts greedily, several at a time, on one thread: the caller's, in :meth:`step`.

    It is also the tests' stand-in for vLLM, which is why it has options that neither demo nor benchmarks set.

    Args:
        model: what computes.
        num_blocks: blocks of its cache, which all its groups share; at least 2 (block 0 is the null block).
        block_size: tokens a block; see :meth:`LlamaConfig.cache_groups`.
        token_budget: most tokens a step; longer prompts are computed in chunks of it.
        max_requests: most requests that hold blocks at once.
        client: connected to kvstore, and the caller's to close. None, or a node that can't be reached: the engine keeps
            everything to itself.
        lookup_budget: seconds for which a request waits for its lookup, at most.
        load_deadline: seconds for which a request waits for its pages, at most.
        store_deadline: seconds for which a finished request's blocks are held for its stores, at most.
        mamba_cache_mode: which states of recurrent layers are kept: one a block, or (``"align"``) the one behind each
            step, and steps end at block boundaries.
        prefix_match_unit: tokens between two places where hits may end, where that is less than a block: with states of
            ``"align"`` and no windows prompts share what they have in common inside a block, too.
        zeroes_blocks: a step's new blocks are zeroed, and the connector is told of the step behind that, as vLLM's V2
            model runner does it.
        enable_caching: False: every prompt is computed from its first token on, and nothing is loaded.
        disaggregation: for an engine that shares its work with others: prefill for them, or decode after them.
        codec: one of :data:`kvstore.gpu.codec.CODECS`: keys and values are stored smaller, with loss. States never are:
            an error in one would stay in all that follow.

    Raises:
        ConfigError: fewer than 2 blocks, or a ``prefix_match_unit`` that does not fit into them.
        LayoutMismatchError: the node knows the model with pages of another size.
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_blocks: int,
        block_size: int = 16,
        token_budget: int = 512,
        max_requests: int = 8,
        client: Client | None = None,
        lookup_budget: float = LOOKUP_BUDGET,
        load_deadline: float = LOAD_DEADLINE,
        store_deadline: float = STORE_DEADLINE,
        mamba_cache_mode: MambaCacheMode = "all",
        prefix_match_unit: int | None = None,
        zeroes_blocks: bool = False,
        enable_caching: bool = True,
        codec: str = "",
        disaggregation: Disaggregation | None = None,
    ) -> None:
        self.model = model
        self._token_budget = token_budget
        self._zeroes_blocks = zeroes_blocks
        groups = model.config.cache_groups(block_size, mamba_cache_mode)
        config = KVCacheConfig(num_blocks, groups, prefix_match_unit=prefix_match_unit)
        self.manager = KVCacheManager(
            config,
            max_model_len=_NO_LIMIT,
            max_in_flight_tokens=token_budget,
            enable_caching=enable_caching,
        )
        self._cache = KVCache(config, model.device)
        # What the model makes on its way is made where it computes.
        self._on_device: AbstractContextManager[object] = nullcontext() if model.device.type == "cpu" else model.device
        self._connector: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        handover = None
        pages, layouts = self._pages(codec)
        namespaces = None if client is None else _namespaces(client, layouts)
        if client is not None and namespaces is not None:
            peers = {
                node: (peer, [[peer.namespace(layout, lazy=True) for layout in layouts]])
                for node, peer in (disaggregation.peers if disaggregation is not None else {}).items()
            }
            self._connector = SchedulerConnector(
                client, namespaces, lookup_budget=lookup_budget, touched_early=zeroes_blocks, peers=peers
            )
            if disaggregation is not None:
                has_states = any(isinstance(group.kv_cache_spec, MambaSpec) for group in config.kv_cache_groups)
                node_id = disaggregation.node_id or default_node_id(client.url)
                handover = Handover(
                    self._connector,
                    disaggregation.key,
                    node_id,
                    layouts,
                    list(peers),
                    wait=disaggregation.wait,
                    early=not has_states,
                    has_partials=not has_states,
                )
            on_cuda = model.device.type == "cuda"
            pin = partial(PinnedMapping, runtime=cuda_runtime(model.device))
            self._worker = WorkerConnector(
                namespaces,
                pages,
                load_deadline=load_deadline,
                store_deadline=store_deadline,
                touched_early=zeroes_blocks,
                arena=PinnedArena(lambda: client.arena_units, pin) if on_cuda else None,
                peers={node: theirs for node, (_, (theirs,)) in peers.items()},
            )
        self._scheduler = Scheduler(
            self.manager,
            self._connector,
            token_budget=token_budget,
            max_requests=max_requests,
            handover=handover,
        )
        self.handover = handover
        """For its statistics; None: it shares its work with nobody."""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of the pages of each cache group."""
        return self.model.config.layouts(self._cache.groups)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is not answered yet."""
        return self._scheduler.has_unfinished

    @property
    def num_preemptions(self) -> int:
        """How often a request's blocks were taken from it for others."""
        return self._scheduler.num_preemptions

    @property
    def worker(self) -> WorkerConnector | None:
        """The connector's worker half, for its statistics; None without kvstore."""
        return self._worker

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue a prompt.

        Args:
            request_id: not that of a request under way.
            prompt_token_ids: at least 1, each of the model's vocabulary.
            max_tokens: length of the answer, at least 1.
            transfer: as an engine's ``kv_transfer_params``: ``{"do_remote_decode": True}`` for an answer with a ticket,
                or those in such an answer.

        Raises:
            InvalidRequestError: one of these does not hold, or prompt and answer do not fit into all blocks together.
        """
        vocab_size = self.model.config.vocab_size
        if self._scheduler.knows(request_id):
            raise InvalidRequestError(f"request {request_id} is under way already")
        if not prompt_token_ids or max_tokens < 1:
            raise InvalidRequestError(
                f"request {request_id}: a prompt of at least 1 token and an answer of at least 1 token are needed,"
                f" got {len(prompt_token_ids)} and {max_tokens}"
            )
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab_size:
            raise InvalidRequestError(f"request {request_id}: token ids must lie between 0 and {vocab_size - 1}")
        num_blocks = self._blocks_needed(len(prompt_token_ids) + max_tokens)
        capacity = self.manager.config.num_blocks - 1
        if num_blocks > capacity:
            raise InvalidRequestError(
                f"request {request_id}: {len(prompt_token_ids)} tokens and an answer of {max_tokens} do not fit:"
                f" they need {num_blocks} blocks, the engine has {capacity}"
            )
        self._scheduler.add(Request(request_id, prompt_token_ids, max_tokens, self.manager.hash_block_size, transfer))

    def abort(self, request_id: str) -> Answer | None:
        """End a request, at any moment. Returns what it has so far; None when no such request is under way."""
        request = self._scheduler.abort(request_id)
        return None if request is None else answer_of(request, aborted=True)

    def step(self) -> list[Answer]:
        """Compute one batch. Returns the answers that it completed."""
        if self._worker is not None:
            sent, received = self._worker.get_finished()
            self._scheduler.update_transfers(sent, received, self._worker.get_block_ids_with_load_errors())
        step = self._scheduler.schedule()
        if self._worker is not None:
            if self._zeroes_blocks:
                self._cache.zero(step.plan.overwritten)
            self._worker.handle_preemptions(step.plan)
        self._cache.copy(step.plan.copies)
        self._scheduler.free_copied(step)
        if self._worker is not None:
            self._worker.start_load_kv(step.plan)
        if step.scheduled:
            self._compute(step)
        if self._worker is not None:
            self._worker.start_save_kv(step.plan)
        if not step.scheduled:
            time.sleep(_IDLE_WAIT)  # requests wait for kvstore, and the threads that serve them need the processor
        return [answer_of(request, aborted=False) for request in self._scheduler.finish_complete()]

    def run(self) -> list[Answer]:
        """Step until every request is answered. Returns the answers in the order of their completion."""
        answers = []
        while self.has_unfinished:
            answers += self.step()
        return answers

    def settle(self) -> None:
        """Step until the blocks of answered requests are free: as long as their stores take, within their deadline."""
        while self._scheduler.has_transfers:
            self.step()

    def close(self) -> None:
        """Wait for stores under way, within their deadline, and stop the connector's threads."""
        self.settle()
        if self._worker is not None:
            self._worker.wait_for_save()
            self._worker.shutdown()
        if self._connector is not None:
            self._connector.shutdown()

    def _pages(self, codec: str) -> tuple[list[PagedKV | QuantizedKV], list[Layout]]:
        """The blocks of each group as they are stored, and the layouts of that."""
        pages: list[PagedKV | QuantizedKV] = []
        layouts = []
        for group, layout in enumerate(self.layouts):
            kv = self._cache.pages(group, layout.kv_heads)
            if codec and layout.kv_heads:
                coded = QuantizedKV(kv, codec)
                pages.append(coded)
                layouts.append(replace(layout, codec=codec, page_bytes=coded.page_bytes))
            else:
                pages.append(kv)
                layouts.append(layout)
        return pages, layouts

    def _compute(self, step: Step) -> None:
        sequences = []
        for share in step.scheduled:
            first = share.request.num_computed_tokens
            token_ids = share.request.token_ids[first : first + share.num_new_tokens]
            sequences.append(BatchedSequence(token_ids, first, share.block_ids))
        with torch.inference_mode(), self._on_device:
            logits = self.model(sequences, self._cache)
            best = logits.topk(2)
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            next_ids = best.indices[:, 0].tolist()
        self._scheduler.update_computed(step)
        for share, token_id, gap in zip(step.scheduled, next_ids, gaps, strict=True):
            if share.request.num_computed_tokens == share.request.num_tokens:
                share.request.append(token_id, gap)

    def _blocks_needed(self, num_tokens: int) -> int:
        """The most blocks that a request holds at once on its way to so many tokens."""
        groups = self._cache.groups
        copies = self.manager.cache_hit_alignment_tokens < self.manager.scheduler_block_size  # of a block in each
        most = sum(_most_blocks(group.kv_cache_spec, num_tokens, self._token_budget) for group in groups)
        return most + copies * len(groups)


def _most_blocks(spec: KVCacheSpec, num_tokens: int, token_budget: int) -> int:
    """The most blocks of one group that a request holds at once on its way to so many tokens."""
    most = -(-num_tokens // spec.block_size)
    if isinstance(spec, MambaSpec):  # a state for each block of a step, and the one that it starts from
        return min(most, -(-token_budget // spec.block_size) + 1)
    if isinstance(spec, SlidingWindowSpec):
        limits = Limits(max_model_len=num_tokens, max_in_flight_tokens=token_budget)
        return min(most, spec.max_admission_blocks_per_request(limits))
    return most


def _namespaces(client: Client, layouts: Sequence[Layout]) -> list[Namespace] | None:
    """Where the pages of each group are; None when the node is not there."""
    try:
        return [client.namespace(layout) for layout in layouts]
    except (UnavailableError, DeadlineError) as error:
        _logger.warning("the engine starts without kvstore: %s", error)
        return None
