"""The requests of an engine like vLLM: how long their hits are, what is loaded into which of their blocks, and which
blocks are stored when. The engine's request objects are read, nothing of vLLM is imported.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvstore.connector.engine.block_events import BlockEvents, blocks_of
from kvstore.connector.engine.groups import Group
from kvstore.connector.engine.hints import parse_hints
from kvstore.connector.engine.load_admission import LoadAdmission
from kvstore.connector.engine.load_cost import LoadCost
from kvstore.connector.engine.metrics import Counts, lookup_counts
from kvstore.connector.engine.new_blocks import new_blocks
from kvstore.connector.engine.request_hashes import RequestHashes
from kvstore.connector.engine.request_state import RequestState
from kvstore.connector.engine.request_tickets import RequestTickets
from kvstore.connector.longest_hit import longest_hit
from kvstore.connector.lookups import Tiers
from kvstore.connector.plan import StepPlan
from kvstore.connector.prefix_pins import PrefixPins
from kvstore.connector.scheduler import NULL_BLOCK_ID, SchedulerConnector
from kvstore.connector.worker_statistics import LoadTiming
from kvstore.rare_lines import RareLines, one_line

_logger = logging.getLogger("kvstore.connector")


class EngineRequests:
    """Runs on the engine's scheduler thread; nothing waits for I/O.

    With ``async_load`` requests wait for their loads, instead of the step that computes them. ``block_events`` is None
    where nobody listens; listeners know blocks by the engine's own hashes, one for each ``event_block_size`` tokens.
    With ``has_siblings`` other connectors load into the same blocks, in their own ways.
    """

    def __init__(
        self,
        scheduler: SchedulerConnector,
        groups: Sequence[Group],
        hashes: RequestHashes,
        *,
        async_load: bool = True,
        may_store: bool = True,
        may_load: bool = True,
        tickets: RequestTickets,
        load_admission: LoadAdmission,
        pins: PrefixPins | None = None,
        most_keep_minutes: int = 0,
        block_events: BlockEvents | None = None,
        event_block_size: int = 1,
        has_siblings: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._groups = tuple(groups)
        self._hashes = hashes
        self._async_load = async_load
        self._has_siblings = has_siblings
        # Whether steps may compute on blocks whose load fails: they are stored once it is known to be good.
        self._stores_late = has_siblings or not async_load
        self._may_store = may_store
        self._may_load = may_load
        self._tickets = tickets
        self._load_admission = load_admission
        self._pins = pins
        self._most_keep_minutes = most_keep_minutes if pins is not None else 0
        self._kept: dict[str, tuple[list[Sequence[bytes]], int]] = {}  # by requests that end: pages, and for how long
        self._lines = RareLines()
        self._block_events = block_events
        self._event_block_size = event_block_size
        self._block_sizes = [group.block_size for group in groups]
        self._hashes_a_block = [size // hashes.block_size for size in self._block_sizes]
        # A load may cover a prompt to its last token only where all of the blocks before it are there afterwards.
        self._keeps_all = all(group.keeps for group in groups)
        self._requests: dict[str, RequestState] = {}
        self._load_cost = LoadCost(clock)
        self._seconds_saved = 0.0
        self._loads_declined = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens kvstore can add to what the engine has, and whether the request waits for them; None: not
        known yet. Plans nothing."""
        if self._load_admission.waits(request.request_id) or not self._hashes.ready(request):
            return None, False
        state = self._track(request)
        state.num_local = num_computed_tokens
        if state.chain is None or not state.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if any(num_computed_tokens % size for size in self._block_sizes):
            return 0, False  # the engine copies a part of a block that this load would fill
        self._load_admission.release(request.request_id)
        state.lets_pass &= self._load_admission.holders
        if state.lets_pass:
            return None, False
        # An asynchronous load may cover the whole prompt: vLLM then computes its last token again.
        limit = request.num_tokens - (0 if self._async_load and self._keeps_all else 1)
        hashes = [
            of_group[: limit // size]
            for of_group, size in zip(state.hashes(self._hashes_a_block), self._block_sizes, strict=True)
        ]
        presence = self._scheduler.get_presence(request.request_id, hashes, num_computed_tokens)
        if presence is None:
            return None, False
        self._tell_misses(state, hashes)
        hit = self._hit(state, presence, limit)
        waits = hit > num_computed_tokens and self._async_load
        if not waits:
            self._load_admission.leave(request.request_id)
        elif not self._load_admission.admits(request.request_id, request.num_tokens, hit):
            return None, False
        return hit - num_computed_tokens, waits

    def update_state_after_alloc(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The request has these blocks, by group; those of the external tokens are to be filled."""
        state = self._track(request)
        state.is_new = True
        loads: dict[int, list[tuple[int, int]]] = {}
        if num_external_tokens:
            end = state.num_local + num_external_tokens
            for group, (size, ids) in enumerate(zip(self._block_sizes, block_ids, strict=True)):
                places = range(state.num_local // size, -(-end // size))
                loads[group] = [(at, ids[at]) for at in places if ids[at] != NULL_BLOCK_ID]
                self._allocated(block_id for _, block_id in loads[group])
            held = [block_id for ids in block_ids for block_id in ids if block_id != NULL_BLOCK_ID]
            self._load_admission.enter(request.request_id, request.num_tokens, end, held)
            tiers = self._scheduler.offered_tiers(request.request_id)
            state.gain = self._load_cost.gain(*self._pages(tiers, state.num_local, end))
        self._scheduler.update_state_after_alloc(request.request_id, loads)

    def tokens_by_tier(self, request_id: str, num_external_tokens: int) -> Mapping[str, int]:
        """Where the tokens of a request's load come from: by the tier of the pages of its first group."""
        tokens: Counter[str] = Counter()
        pages = self._scheduler.loading_tiers(request_id)
        for group, _, tier in pages:
            if group == pages[0][0]:
                # The last page may be of a block that is not full.
                tokens[tier] += min(self._block_sizes[group], num_external_tokens - tokens.total())
        # Those before a window, or a state, have no pages of their own.
        tokens[pages[0][2] if pages else ""] += num_external_tokens - tokens.total()
        return +tokens

    def plan_step(self, output: Any) -> tuple[StepPlan, int]:
        """Everything for the workers in this step, and the step's number, if it is to be told when it is over."""
        for request_id in output.preempted_req_ids or ():
            if (state := self._requests.get(request_id)) is not None:
                self._notice_preemption(state)
        if not self._keeps_all:
            self._allocated(new_blocks(output, self._requests, self._block_sizes))
        block_state = output.kv_connector_block_state
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            waits = self._load_admission.leave(request_id) and not self._async_load
            if self._has_siblings and state.is_new:
                state.is_new, waits = False, True
            if waits or state.chain is None or not state.may_store:
                continue  # a load in this step may fail: what it was to fill is looked at afterwards
            request = state.request
            computed = (
                request.num_computed_tokens - request.num_in_flight_tokens
                if self._stores_late
                else request.num_computed_tokens + scheduled
            )
            self._save(state, computed, partial(block_state.get_block_ids, request_id))
        self._save_states(block_state)
        plan = self._scheduler.build_connector_meta()
        if not self._keeps_all:  # blocks that may soon be given to others are stored first
            first = sorted(plan.stores, key=lambda store: self._groups[store.group].keeps)
            plan = replace(plan, stores=tuple(first))
        return plan, self._load_cost.begin_step(output.total_num_scheduled_tokens)

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: its blocks are held until its stores are. And what its answer says to others."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self._notice_preemption(state)
        loads = self._load_admission.leave(request.request_id)
        if not self._async_load:
            self._seconds_saved += state.gain
        if request.num_computed_tokens and not loads and state.may_store:
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._save(state, computed, lambda: block_ids)
        params = None if loads else self._tickets.give(state, self._hashes_a_block, block_ids)
        held = (block_id for of_group in block_ids for block_id in of_group)
        stores = self._scheduler.request_finished(request.request_id, held)
        if state.hints.keep_seconds:
            self._keep(state, stores)
        return stores, params

    def update_connector_output(
        self,
        finished_sending: Collection[str],
        finished_recving: Collection[str],
        load_errors: Collection[int],
        failed_recving: Collection[str],
    ) -> None:
        """As :meth:`SchedulerConnector.update_connector_output`."""
        failed = self._scheduler.update_connector_output(
            finished_sending, finished_recving, load_errors, failed_recving
        )
        for request_id in self._kept.keys() & finished_sending:
            self._pin(*self._kept.pop(request_id))
        for request_id in failed & self._requests.keys():
            self._requests[request_id].gain = 0.0
        for request_id in self._requests.keys() & finished_recving:
            self._seconds_saved += self._requests[request_id].gain
            self._requests[request_id].gain = 0.0
        # vLLM takes the blocks of a failed load back, and looks at nobody behind a request for which there are too few:
        # a window takes more to compute than to load. Who holds blocks must not wait behind it, or neither ever runs.
        for request_id in failed_recving:
            if (state := self._requests.get(request_id)) is not None:
                state.lets_pass = frozenset(self._load_admission.holders - {request_id})

    def note(self, step: int, timings: Iterable[LoadTiming], stored: Iterable[tuple[int, Sequence[bytes]]]) -> None:
        """What the workers have told beside: a step that is over, how long loads took, and pages that are stored."""
        if self._block_events is not None:
            for group, hashes in stored:
                self._block_events.store(group, hashes)
        for tier, pages, seconds in timings:
            self._load_cost.note_load(tier, pages, seconds)
        self._load_cost.end_step(step)

    def has_pending_block_frees(self) -> bool:
        """Whether stores hold blocks that come free without a preemption."""
        return self._scheduler.has_pending_block_frees()

    def reset(self) -> None:
        """Nothing that was stored is found by this engine any more, whose weights may be others from now on. What it
        stores is found until it ends, by itself alone; the pages of others stay."""
        self._hashes.reset()
        for state in self._requests.values():
            state.chain = None

    def counts(self) -> Counts:
        """What was counted since the start."""
        counts = lookup_counts(self._scheduler.statistics()) | self._tickets.counts()
        counts["pages_kept"] = self._pins.pinned if self._pins is not None else 0
        return counts | {"seconds_saved": self._seconds_saved, "loads_declined": self._loads_declined}

    def shutdown(self) -> None:
        """Stops what runs in the background."""
        self._scheduler.shutdown()
        if self._pins is not None:
            self._pins.shutdown()

    def _hit(self, state: RequestState, presence: Mapping[int, Sequence[bool]], limit: int) -> int:
        """Tokens that are there with what kvstore has and what is worth loading."""
        known, num_skipped = list(presence.values()), [group.num_skipped for group in self._groups]
        num_local, request = state.num_local, state.request
        hit = longest_hit(known, self._block_sizes, num_skipped, num_local, limit)
        if hit > num_local:
            pages, size = self._pages(self._scheduler.offered_tiers(request.request_id), num_local, hit)
            num_worth = num_local + self._load_cost.pages_worth_loading(pages, size) * size
            if pages and num_worth < hit:
                self._loads_declined += not state.declined
                state.declined = True
                hit = longest_hit(known, self._block_sizes, num_skipped, num_local, num_worth)
        if hit > num_local and self._scheduler.partials_are_there(request.request_id):
            length = request.num_prompt_tokens
            if all(hit == length // size * size for size in self._block_sizes):
                hit = max(hit, length - 1)  # the last token is computed in any case
        return hit

    def _track(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            hints, wrong = parse_hints(
                request.kv_transfer_params, self._most_keep_minutes, self._hashes.shared_prefixes
            )
            for text in wrong:
                self._lines.say(_logger.warning, "request %s: %s", one_line(request.request_id), text)
            store, load = hints.store and self._may_store, hints.load and self._may_load
            shared = self._hashes.shared_prefix(request, hints.shared_prefix) if hints.shared_prefix else None
            chain = self._hashes.chain(request, shared) if store or load else None
            state = RequestState(
                request,
                chain,
                len(self._groups),
                request.num_preemptions,
                may_store=store,
                may_load=load,
                hints=hints,
                shared_prefix=shared,
            )
            self._requests[request.request_id] = state
            self._tickets.take(state, self._hashes_a_block)
        self._notice_preemption(state)
        return state

    def _notice_preemption(self, state: RequestState) -> None:
        if state.num_preemptions != state.request.num_preemptions:
            self._load_admission.leave(state.request.request_id)
            may = state.may_store or state.may_load
            state.restart(self._hashes.chain(state.request, state.shared_prefix) if may else None)
            self._scheduler.request_preempted(state.request.request_id)

    def _keep(self, state: RequestState, stores: bool) -> None:
        """Has a request's prompt pinned, behind its stores."""
        hashes = []
        for group, names in zip(self._groups, state.hashes(self._hashes_a_block), strict=True):
            tokens = state.state_tokens if group.is_offered else state.request.num_prompt_tokens
            full = min(tokens // group.block_size, len(names))
            hashes.append(names[group.num_skipped(full * group.block_size) // group.block_size : full] if full else ())
        if stores:
            self._kept[state.request.request_id] = hashes, state.hints.keep_seconds
        else:
            self._pin(hashes, state.hints.keep_seconds)

    def _pin(self, hashes: Sequence[Sequence[bytes]], seconds: int) -> None:
        if self._pins is not None:
            self._pins.keep(hashes, seconds)

    def _save(self, state: RequestState, num_computed: int, block_ids: Callable[[], Any]) -> None:
        """Plans to store blocks that are full when the step is over."""
        start, end = state.stored_tokens(min(num_computed, state.request.num_tokens), max(self._block_sizes))
        if state.chain is None or all(
            end // size <= saved for size, saved in zip(self._block_sizes, state.num_saved, strict=True)
        ):
            return
        ids, hashes = block_ids(), state.hashes(self._hashes_a_block)
        for group, size in enumerate(self._block_sizes):
            if self._groups[group].is_offered:
                state.num_saved[group] = end // size
                continue
            full = min(end // size, len(ids[group]))
            # Where steps wait for their loads, vLLM shares blocks before it is known that they were filled: whoever
            # loads or computes a block stores it, and nobody who found it.
            found = min(full, max(-(-start // size), state.num_local // size if self._stores_late else 0))
            self._scheduler.save_blocks(
                state.request.request_id,
                group,
                hashes[group][:full],
                [NULL_BLOCK_ID] * found + ids[group][found:full],
                wanted=state.hands_over,
            )
            self._plan_block_events(state, group, hashes[group], range(state.num_saved[group], full))
            state.num_saved[group] = full

    def _save_states(self, block_state: Any) -> None:
        """Plans to store states that this step computes: of which group, in which block, behind how many tokens."""
        offers: Mapping[str, Sequence[tuple[int, int, int]]] = getattr(block_state, "boundary_state_offloads", {})
        for request_id, states in offers.items():
            state = self._requests.get(request_id)
            if state is None or state.chain is None or not state.may_store:
                continue
            hashes, block_ids = state.hashes(self._hashes_a_block), block_state.get_block_ids(request_id)
            start, end = state.stored_tokens(state.request.num_tokens, max(self._block_sizes))
            for group, block_id, num_tokens in states:
                if not start < num_tokens <= end:
                    continue
                if block_id not in block_ids[group] and self._scheduler.was_allocated(block_id):
                    continue  # offered behind the step before, and given to another request in this one
                count, partial_tokens = divmod(num_tokens, self._block_sizes[group])
                if partial_tokens or not 0 < count <= len(hashes[group]):
                    continue  # a prompt's tail: it would be found by this request alone
                self._scheduler.save_state(request_id, group, hashes[group][:count], block_id, wanted=state.hands_over)
                if num_tokens <= state.request.num_prompt_tokens:
                    state.state_tokens = max(state.state_tokens, num_tokens)
                self._plan_block_events(state, group, hashes[group], range(count - 1, count))

    def _plan_block_events(self, state: RequestState, group: int, hashes: Sequence[bytes], places: range) -> None:
        if self._block_events is not None:
            size = self._block_sizes[group]
            for index, block in blocks_of(state.request, group, size, self._event_block_size, places):
                self._block_events.plan(hashes[index], block)

    def _tell_misses(self, state: RequestState, hashes: Sequence[Sequence[bytes]]) -> None:
        """Once a request: what kvstore lacks of it."""
        if self._block_events is None or state.looked_up:
            return
        tiers = self._scheduler.offered_tiers(state.request.request_id)
        state.looked_up = bool(tiers)
        for group, (names, where) in enumerate(zip(hashes, tiers, strict=False)):
            for name, tier in zip(names, where, strict=False):
                if tier is None:
                    self._block_events.miss(group, name)

    def _pages(self, tiers: Tiers, num_local: int, end: int) -> tuple[list[str], int]:
        """The tiers of the pages of these tokens, in the group whose pages are all needed, and tokens a page."""
        number = next((number for number, group in enumerate(self._groups) if group.keeps), 0)
        size = self._block_sizes[number]
        return [tier or "" for tier in tiers[number][num_local // size : end // size]] if tiers else [], size

    def _allocated(self, block_ids: Iterable[int]) -> None:
        """Blocks that are overwritten from this step on; of windows they may come from a request that goes on."""
        if not self._keeps_all:
            self._scheduler.blocks_allocated(block_id for block_id in block_ids if block_id != NULL_BLOCK_ID)
