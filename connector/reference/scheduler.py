"""The reference engine's scheduler: which tokens of which requests a step computes. It touches no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kvstore.connector.blocks.block import KVCacheBlocks
from kvstore.connector.blocks.copies import KVCacheBlockCopy
from kvstore.connector.blocks.manager import KVCacheManager
from kvstore.connector.blocks.specs import MambaSpec
from kvstore.connector.disagg.handover import Handover
from kvstore.connector.plan import StepPlan
from kvstore.connector.reference.request import Request
from kvstore.connector.scheduler import SchedulerConnector


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step."""

    request: Request
    num_new_tokens: int
    """Tokens to compute, behind the request's ``num_computed_tokens``."""
    block_ids: Sequence[Sequence[int]]
    """By group."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes, and what the connector's worker half moves meanwhile."""

    scheduled: tuple[Scheduled, ...]
    plan: StepPlan
    copies: tuple[KVCacheBlockCopy, ...] = ()
    """Those of the plan, as the block manager knows them."""


class Scheduler:
    """Continuous batching over paged blocks, first come, first served, with prompts in chunks.

    A request is in one of these places::

        waiting ──► running ──► over              nothing to load
           │ ▲         ▲ │
           │ └─────────┼─┘  preempted: its blocks are taken from it, it starts over
           ▼           │
        loading ──► loaded                        its blocks are being, or have been, filled from kvstore

    A step serves *running* before *loaded* before *waiting*. Requests in *loaded* hold blocks without making progress:
    when too few blocks are free for the next step of one, it gives them up, so that never all of them wait for each
    other.

    Without a connector nothing is loaded or stored, without a handover tickets are neither given nor taken. A step has
    ``token_budget`` tokens at most; ``max_requests`` hold blocks at once at most.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        connector: SchedulerConnector | None,
        *,
        token_budget: int,
        max_requests: int,
        handover: Handover | None = None,
    ) -> None:
        self._manager = manager
        self._connector = connector
        self._handover = handover
        self._token_budget = token_budget
        self._max_requests = max_requests
        specs = [group.kv_cache_spec for group in manager.config.kv_cache_groups]
        self._keeps_last_states = any(isinstance(s, MambaSpec) and s.mamba_cache_mode == "align" for s in specs)
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._loaded: deque[Request] = deque()
        self._running: list[Request] = []
        self._ending: dict[str, Request] = {}  # over, but their blocks are still read or written
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is not over yet."""
        return bool(self._waiting or self._loading or self._loaded or self._running)

    @property
    def has_transfers(self) -> bool:
        """Whether blocks of requests that are over wait for the connector: steps must go on."""
        return bool(self._ending)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this name is not over, or still holds blocks."""
        return self._find(request_id) is not None or request_id in self._ending

    def add(self, request: Request) -> None:
        """Queue a request."""
        if self._handover is not None and request.transfer.get("do_remote_prefill"):
            self._handover.take(request.request_id, request.transfer, request.prompt)
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it is; None when no such one is under way."""
        request = self._find(request_id)
        if request is not None:
            self._finish(request)
        return request

    def schedule(self) -> Step:
        """Decide on the next step. Its blocks count as cached from now on: it must be computed."""
        self._manager.new_step_starts()
        scheduled: list[Scheduled] = []
        budget = self._token_budget
        preempted = False
        for request in list(self._running):
            if budget == 0 or request not in self._running:
                break
            num_new_tokens = self._num_new_tokens(request, request.num_computed_tokens, budget)
            while not self._allocate(request, num_new_tokens):
                preempted = True
                if self._preempt(self._running.pop()) is request:
                    break
            else:
                budget -= num_new_tokens
                scheduled.append(self._share(request, num_new_tokens))
        # Who was preempted a moment ago would take the blocks back at once.
        if not preempted:
            budget = self._schedule_loaded(scheduled, budget)
            self._schedule_waiting(scheduled, budget)
        copies = tuple(self._manager.take_kv_cache_block_copies())
        return Step(tuple(scheduled), self._plan(scheduled, copies), copies)

    def free_copied(self, step: Step) -> None:
        """The step's copies of blocks have been made."""
        self._manager.free_copied(step.copies)

    def update_computed(self, step: Step) -> None:
        """The step has been computed."""
        for share in step.scheduled:
            share.request.num_computed_tokens += share.num_new_tokens
            share.request.tokens_computed += share.num_new_tokens

    def finish_complete(self) -> list[Request]:
        """End the requests whose answer has its full length."""
        complete = [request for request in self._running if request.complete]
        for request in complete:
            if self._handover is not None and request.transfer.get("do_remote_decode"):
                block_ids = self._manager.get_block_ids(request.request_id)
                request.ticket = self._handover.give(request.request_id, request.prompt, block_ids)
            self._finish(request)
        return complete

    def update_transfers(
        self, finished_sending: Collection[str], finished_recving: Collection[str], load_errors: Collection[int]
    ) -> None:
        """What the connector's worker half has reported; see :meth:`SchedulerConnector.update_connector_output`."""
        if self._connector is None:
            return
        self._connector.update_connector_output(set(finished_sending), set(finished_recving), load_errors)
        for request_id in finished_recving:
            if request_id in self._ending:
                self._ending[request_id].receiving = False
            else:
                self._complete_load(self._loading.pop(request_id), load_errors)
        for request_id in finished_sending:
            self._ending[request_id].sending = False
        for request in list(self._ending.values()):
            self._free_if_idle(request)

    def _schedule_loaded(self, scheduled: list[Scheduled], budget: int) -> int:
        """Go on with requests whose load is over. Returns what is left of the budget."""
        for request in list(self._loaded):
            if budget == 0:
                break
            self._loaded.remove(request)
            num_new_tokens = self._num_new_tokens(request, request.num_computed_tokens, budget)
            if not self._allocate(request, num_new_tokens):
                self._preempt(request)
                continue
            budget -= num_new_tokens
            self._running.append(request)
            scheduled.append(self._share(request, num_new_tokens))
        return budget

    def _schedule_waiting(self, scheduled: list[Scheduled], budget: int) -> None:
        """Start requests, or their loads, as long as blocks are free."""
        for request in list(self._waiting):
            if budget == 0 or len(self._running) + len(self._loading) + len(self._loaded) >= self._max_requests:
                break
            found = self._find_computed(request)
            if found is None:
                continue  # not known yet: the others need not wait
            hit, num_hit, num_external = found
            others = bool(self._running or self._loading or self._loaded)
            if num_external and request.num_preemptions and others:
                break  # a load takes blocks without making progress: two that lost theirs would take it from each other
            partial = self._num_in_partials(request, num_hit + num_external) if num_external else 0
            num_new_tokens = partial if num_external else self._num_new_tokens(request, num_hit, budget)
            if not self._allocate(request, num_new_tokens, num_hit, hit, num_external):
                break
            self._waiting.remove(request)
            # The last token is computed in any case, to have logits.
            request.num_computed_tokens = num_hit + num_external + max(partial - 1, 0)
            request.num_hit_tokens = num_hit
            self._start_load(request, partial > 0)
            if num_external:
                continue
            request.tokens_hit += num_hit
            budget -= num_new_tokens
            self._running.append(request)
            scheduled.append(self._share(request, num_new_tokens))

    def _num_new_tokens(self, request: Request, start: int, budget: int) -> int:
        """How many tokens behind the first ``start`` the next step computes."""
        end = min(request.num_tokens, start + budget)
        if self._keeps_last_states:
            # Only the state at the end of a step is kept, and found again only where a block ends too. The one that
            # matters most is the last before the prompt's end: whoever has the same prefix goes on from there.
            alignment = self._manager.scheduler_block_size
            last = (request.num_tokens - 1) // alignment * alignment
            if start < last:
                end = min(end, last)
                aligned = end // alignment * alignment
                end = aligned if aligned > start else end
            # Where hits may end inside a block, the very last one is found too.
            step = self._manager.cache_hit_alignment_tokens
            tail = (request.num_prompt_tokens - 1) // step * step
            if last < tail and start < tail:
                end = min(end, tail)
        return end - start

    def _find_computed(self, request: Request) -> tuple[KVCacheBlocks, int, int] | None:
        """What of a request is computed: blocks, tokens in the engine's own blocks, and tokens that only the pages of
        kvstore add to them. None: not known yet."""
        hit, num_hit = self._manager.get_computed_blocks(request)
        if self._connector is None:
            return hit, num_hit, 0
        hashes = [
            request.hashes_of_blocks(block_size)[: (request.num_tokens - 1) // block_size]
            for block_size in self._manager.block_sizes
        ]
        presence = self._connector.get_presence(request.request_id, hashes, num_hit)
        return None if presence is None else self._manager.get_computed_blocks_with(request, presence)

    def _allocate(
        self,
        request: Request,
        num_new_tokens: int,
        num_hit: int = 0,
        hit: KVCacheBlocks | None = None,
        num_external: int = 0,
    ) -> bool:
        """Give a request the blocks for its next step, or for what is to be loaded. False: too few are free."""
        new = self._manager.allocate_slots(
            request,
            num_new_tokens,
            num_hit,
            hit,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=num_external > 0,
        )
        if new is None:
            return False
        if self._connector is not None:
            # Some may have left another request's window a moment ago, with a store still reading from them.
            self._connector.blocks_allocated([block_id for group in new.get_block_ids() for block_id in group])
        return True

    def _num_in_partials(self, request: Request, num_full: int) -> int:
        """Tokens behind those in full blocks that come with a ticket as well, in blocks that are not full."""
        rest = request.num_tokens - num_full
        block_sizes = self._manager.block_sizes
        ends_alike = all(num_full == request.num_tokens // block_size * block_size for block_size in block_sizes)
        assert self._connector is not None, "something is loaded"
        there = self._connector.partials_are_there(request.request_id)
        return rest if there and ends_alike and rest > 1 else 0

    def _start_load(self, request: Request, partials: bool) -> None:
        """The request has blocks: have those filled that kvstore has the pages of."""
        if self._connector is None:
            return
        loads = {
            group: [(index, block.block_id) for index, block in blocks]
            for group, blocks in enumerate(self._manager.get_blocks_to_load(request.request_id))
            if blocks
        }
        if partials:
            for group, ids in enumerate(self._manager.get_block_ids(request.request_id)):
                index = request.num_tokens // self._manager.block_sizes[group]
                loads.setdefault(group, []).append((index, ids[index]))
        self._connector.blocks_allocated([block_id for blocks in loads.values() for _, block_id in blocks])
        self._connector.update_state_after_alloc(request.request_id, loads)
        if loads:
            request.receiving = True
            self._loading[request.request_id] = request
        elif request.num_computed_tokens > request.num_hit_tokens:  # no remote page is needed (a window of 1)
            self._complete_load(request, ())

    def _complete_load(self, request: Request, load_errors: Collection[int]) -> None:
        """Keep what is of use without the pages that did not come; the rest is computed."""
        request.receiving = False
        request.num_computed_tokens = self._manager.complete_load(request, load_errors)
        hit = min(request.num_hit_tokens, request.num_computed_tokens)
        request.tokens_hit += hit
        request.tokens_loaded += request.num_computed_tokens - hit
        if request.num_computed_tokens:
            self._loaded.append(request)
        else:
            self._waiting.appendleft(request)

    def _share(self, request: Request, num_new_tokens: int) -> Scheduled:
        return Scheduled(request, num_new_tokens, self._manager.get_block_ids(request.request_id))

    def _plan(self, scheduled: Iterable[Scheduled], copies: Iterable[KVCacheBlockCopy]) -> StepPlan:
        """Copies, stores of the blocks that this step fills, and all else that was decided since the last one."""
        block_ids = tuple((copy.source.block_id, copy.destination.block_id) for copy in copies)
        if self._connector is None:
            return StepPlan(copies=block_ids)
        self._connector.blocks_allocated(destination for _, destination in block_ids)
        for share in scheduled:
            num_computed_tokens = share.request.num_computed_tokens + share.num_new_tokens
            for group, block_size in enumerate(self._manager.block_sizes):
                full = num_computed_tokens // block_size
                self._connector.save_blocks(
                    share.request.request_id,
                    group,
                    share.request.hashes_of_blocks(block_size)[:full],
                    share.block_ids[group][:full],
                )
        return replace(self._connector.build_connector_meta(), copies=block_ids)

    def _preempt(self, request: Request) -> Request:
        """Take a request's blocks from it. It waits at the head of the queue and starts over."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._manager.free(request)
        request.num_computed_tokens = 0
        if self._connector is not None:
            self._connector.request_preempted(request.request_id)
        self._waiting.appendleft(request)
        return request

    def _finish(self, request: Request) -> None:
        """The request is over. Its blocks are freed when no copy uses them any more."""
        request_id = request.request_id
        if self._connector is not None:
            ids = self._manager.get_block_ids(request_id)
            request.sending = self._connector.request_finished(request_id, (each for of in ids for each in of))
        if request in self._running:
            self._running.remove(request)
        elif request in self._loaded:
            self._loaded.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self._loading.pop(request_id, None)
        self._ending[request_id] = request
        self._free_if_idle(request)

    def _free_if_idle(self, request: Request) -> None:
        if not request.sending and not request.receiving:
            self._manager.free(request)
            del self._ending[request.request_id]

    def _find(self, request_id: str) -> Request | None:
        for request in (*self._running, *self._loaded, *self._loading.values(), *self._waiting):
            if request.request_id == request_id:
                return request
        return None
