"""A small serving engine: paged KV, prefix caching, continuous batching, and kvstore beside it where there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from connector.blocks import CacheConfig, FullAttentionSpec, KVCacheManager
from connector.reference.attention import BatchedSequence
from connector.reference.model import Llama
from connector.reference.request import Answer, Request, answer_of
from connector.reference.scheduler import Scheduler, Step
from connector.scheduler import LOOKUP_BUDGET, SchedulerConnector
from connector.worker import LOAD_DEADLINE, STORE_DEADLINE, WorkerConnector
from gpu.pages import PagedKV
from kvstore.errors import DeadlineError, InvalidRequestError, UnavailableError
from kvstore.layout import Layout

if TYPE_CHECKING:
    from kvstore import Client, Namespace

_logger = logging.getLogger("kvstore.connector")

_IDLE_WAIT = 0.0005
"""Seconds between two looks at loads or stores that everything waits for."""


class Engine:
    """Answers prompts greedily, several at a time, on one thread: the caller's, in :meth:`step`.

    Args:
        model: what computes.
        num_blocks: blocks of its paged KV, at least 2 (block 0 is the null block).
        block_size: tokens a block.
        token_budget: most tokens a step; longer prompts are computed in chunks of it.
        max_requests: most requests that hold blocks at once.
        client: connected to kvstore, and the caller's to close. None, or a node that can't be reached: the engine keeps
            everything to itself.
        lookup_budget: seconds for which a request waits for its lookup, at most.
        load_deadline: seconds for which a request waits for its pages, at most.
        store_deadline: seconds for which a finished request's blocks are held for its stores, at most.

    Raises:
        ConfigError: fewer than 2 blocks.
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
    ) -> None:
        self.model = model
        self.block_size = block_size
        layout = model.config.layout(block_size)
        group = FullAttentionSpec(block_size=block_size, page_bytes=layout.page_bytes)
        self.manager = KVCacheManager(CacheConfig(num_blocks=num_blocks, groups=(group,)))
        self._capacity = (num_blocks - 1) * block_size
        self._kv_cache = model.config.new_kv_cache(num_blocks, block_size)
        self._connector: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        namespace = None if client is None else _namespace(client, layout)
        if client is not None and namespace is not None:
            self._connector = SchedulerConnector(client, namespace, lookup_budget=lookup_budget)
            self._worker = WorkerConnector(
                namespace, PagedKV(self._kv_cache), load_deadline=load_deadline, store_deadline=store_deadline
            )
        self._scheduler = Scheduler(self.manager, self._connector, token_budget=token_budget, max_requests=max_requests)

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

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int) -> None:
        """Queue a prompt.

        Args:
            request_id: not that of a request under way.
            prompt_token_ids: at least 1, each of the model's vocabulary.
            max_tokens: length of the answer, at least 1.

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
        if len(prompt_token_ids) + max_tokens > self._capacity:
            raise InvalidRequestError(
                f"request {request_id}: {len(prompt_token_ids)} tokens and an answer of {max_tokens} do not fit:"
                f" the engine's blocks hold {self._capacity} tokens"
            )
        self._scheduler.add(Request(request_id, prompt_token_ids, max_tokens, self.block_size))

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

    def close(self) -> None:
        """Wait for stores under way, within their deadline, and stop the connector's threads."""
        while self._scheduler.has_transfers:
            self.step()
        if self._worker is not None:
            self._worker.wait_for_save()
            self._worker.shutdown()
        if self._connector is not None:
            self._connector.shutdown()

    def _compute(self, step: Step) -> None:
        sequences = []
        for share in step.scheduled:
            first = share.request.num_computed_tokens
            token_ids = share.request.token_ids[first : first + share.num_new_tokens]
            sequences.append(BatchedSequence(token_ids, first, share.block_ids))
        with torch.inference_mode():
            logits = self.model(sequences, self._kv_cache, self.block_size)
            best = logits.topk(2)
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            next_ids = best.indices[:, 0].tolist()
        self._scheduler.update_computed(step)
        for share, token_id, gap in zip(step.scheduled, next_ids, gaps, strict=True):
            if share.request.num_computed_tokens == share.request.num_tokens:
                share.request.append(token_id, gap)


def _namespace(client: Client, layout: Layout) -> Namespace | None:
    """Where the pages are; None when the node is not there."""
    try:
        return client.namespace(layout)
    except (UnavailableError, DeadlineError) as error:
        _logger.warning("the engine starts without kvstore: %s", error)
        return None
