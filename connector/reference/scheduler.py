"""Which tokens of which requests a step computes. Decides, and touches neither tensors nor kvstore itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from connector.blocks import KVCacheManager
from connector.plan import StepPlan
from connector.reference.request import Request
from connector.scheduler import SchedulerConnector


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's share of a step."""

    request: Request
    num_new_tokens: int
    """Tokens to compute, behind the request's ``num_computed_tokens``."""
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes, and what the connector's worker half moves meanwhile."""

    scheduled: tuple[Scheduled, ...]
    plan: StepPlan


class Scheduler:
    """Continuous batching over paged blocks, first come, first served, with prompts in chunks.

    A request is in one of these places::

        waiting ──► running ──► over              nothing to load
           │ ▲         ▲ │
           │ └─────────┼─┘  preempted: its blocks are taken from it, it starts over
           ▼           │
        loading ──► loaded                        its blocks are being, or have been, filled from kvstore

    A step serves *running* before *loaded* before *waiting*. Requests in *loaded* hold blocks without making progress:
    when there is no room for the next step of one, it gives them up, so that never all of them wait for each other.

    Args:
        manager: of the engine's blocks.
        connector: None: nothing is loaded or stored.
        token_budget: most tokens a step.
        max_requests: most requests that hold blocks at once.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        connector: SchedulerConnector | None,
        *,
        token_budget: int,
        max_requests: int,
    ) -> None:
        self._manager = manager
        self._connector = connector
        self._token_budget = token_budget
        self._max_requests = max_requests
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
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it is; None when no such one is under way."""
        request = self._find(request_id)
        if request is not None:
            self._finish(request)
        return request

    def schedule(self) -> Step:
        """Decide on the next step. Its blocks count as cached from now on: it must be computed."""
        scheduled: list[Scheduled] = []
        budget = self._token_budget
        preempted = False
        for request in list(self._running):
            if budget == 0 or request not in self._running:
                break
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while self._manager.allocate_slots(request, num_new_tokens) is None:
                preempted = True
                if self._preempt(self._running.pop()) is request:
                    break
            else:
                budget -= num_new_tokens
                scheduled.append(self._share(request, num_new_tokens))
        # Who was preempted a moment ago would take the room back at once.
        if not preempted:
            budget = self._schedule_loaded(scheduled, budget)
            self._schedule_waiting(scheduled, budget)
        return Step(tuple(scheduled), self._plan(scheduled))

    def update_computed(self, step: Step) -> None:
        """The step has been computed."""
        for share in step.scheduled:
            share.request.num_computed_tokens += share.num_new_tokens
            share.request.tokens_computed += share.num_new_tokens

    def finish_complete(self) -> list[Request]:
        """End the requests whose answer has its full length."""
        complete = [request for request in self._running if request.complete]
        for request in complete:
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
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if self._manager.allocate_slots(request, num_new_tokens) is None:
                self._preempt(request)
                continue
            budget -= num_new_tokens
            self._running.append(request)
            scheduled.append(self._share(request, num_new_tokens))
        return budget

    def _schedule_waiting(self, scheduled: list[Scheduled], budget: int) -> None:
        """Start requests, or their loads, as long as there is room."""
        for request in list(self._waiting):
            if budget == 0 or len(self._running) + len(self._loading) + len(self._loaded) >= self._max_requests:
                break
            hit, num_hit = self._manager.get_computed_blocks(request)
            num_external = self._matched(request, num_hit)
            if num_external is None:
                continue  # not known yet: the others need not wait
            num_new_tokens = 0 if num_external else min(request.num_tokens - num_hit, budget)
            allocated = self._manager.allocate_slots(
                request, num_new_tokens, num_hit, hit, num_external, delay_cache_blocks=num_external > 0
            )
            if allocated is None:
                break
            self._waiting.remove(request)
            request.num_computed_tokens = num_hit + num_external
            request.tokens_hit += num_hit
            self._start(request, num_hit, num_external)
            if num_external:
                continue
            budget -= num_new_tokens
            self._running.append(request)
            scheduled.append(self._share(request, num_new_tokens))

    def _matched(self, request: Request, num_hit: int) -> int | None:
        """Tokens that kvstore has beyond the engine's own; None: not known yet."""
        if self._connector is None:
            return 0
        matched, _ = self._connector.get_num_new_matched_tokens(
            request.request_id, request.block_hashes, request.num_tokens, num_hit
        )
        return matched

    def _start(self, request: Request, num_hit: int, num_external: int) -> None:
        """The request has blocks: have those filled that kvstore has."""
        if self._connector is None:
            return
        first = num_hit // self._manager.block_size
        block_ids = self._manager.get_block_ids(request.request_id)[0]
        external = block_ids[first : first + num_external // self._manager.block_size]
        self._connector.update_state_after_alloc(request.request_id, external, num_external)
        if num_external:
            request.receiving = True
            request.load_from = num_hit
            self._loading[request.request_id] = request

    def _complete_load(self, request: Request, load_errors: Collection[int]) -> None:
        """Keep what came, up to the first block that did not; the rest is computed."""
        request.receiving = False
        request.num_computed_tokens = self._manager.complete_load(request, load_errors)
        request.tokens_loaded += request.num_computed_tokens - request.load_from
        if request.num_computed_tokens:
            self._loaded.append(request)
        else:
            self._waiting.appendleft(request)

    def _share(self, request: Request, num_new_tokens: int) -> Scheduled:
        return Scheduled(request, num_new_tokens, self._manager.get_block_ids(request.request_id)[0])

    def _plan(self, scheduled: Sequence[Scheduled]) -> StepPlan:
        """Stores of the blocks that this step fills, and everything else that was decided since the last one."""
        if self._connector is None:
            return StepPlan()
        for share in scheduled:
            num_computed_tokens = share.request.num_computed_tokens + share.num_new_tokens
            full = num_computed_tokens // self._manager.block_size
            self._connector.save_blocks(
                share.request.request_id, share.request.block_hashes[:full], share.block_ids[:full]
            )
        return self._connector.build_connector_meta()

    def _preempt(self, request: Request) -> Request:
        """Take a request's blocks from it. It waits at the head of the queue and starts over."""
        self.num_preemptions += 1
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
            request.sending = self._connector.request_finished(request_id)
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
