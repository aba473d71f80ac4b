"""The block manager against what it promises, for models of every kind.

A scheduler with random wishes drives it, and the memory of ``block_manager_promises``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from block_manager_models import DOCUMENTS, MAX_MODEL_LEN, MODELS, NULL, TOKEN, Popped, Request
from block_manager_promises import BlockManagerPromises
from dice import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvstore.connector.blocks import KVCacheBlocks

EXAMPLES = examples(50)
STEPS = 40


class BlockManagerMachine(BlockManagerPromises):
    # A request's way

    @rule(data=st.data())
    def anything(self, data: st.DataObject) -> None:
        """One operation. A rule for each would leave out half of them in each run, and mostly one that all need."""
        active = len(self.running) + len(self.loading)
        weights = {
            self.arrive: 3 * (len(self.waiting) < 3),
            self.admit: 6 * bool(self.waiting and active < 5),
            self.admit_with_remote_pages: 6 * bool(self.waiting and active < 5),
            self.admit_with_tokens_from_elsewhere: 2 * bool(self.waiting and active < 5),
            self.end_a_load: 4 * bool(self.loading),
            self.schedule: 8 * bool(self.ready()),
            self.begin_a_step: 5,
            self.finish: active,
            self.preempt: bool(active),
            self.end_a_copy: 2 * bool(self.popped and not self.step),
            self.leave_blocks_behind: bool(self.running),
            self.evict: 1,
            self.reset: 1,
        }
        names = [operation.__name__ for operation, weight in weights.items() for _ in range(weight)]
        name = data.draw(st.sampled_from(names))
        self.draw = data.draw
        getattr(self, name)()

    def one_of(self, requests: list[Request]) -> Request:
        return requests[self.draw(st.integers(0, len(requests) - 1))]

    def arrive(self) -> None:
        self.count += 1
        document = DOCUMENTS[self.draw(st.integers(0, len(DOCUMENTS) - 1))]
        tokens = document[: self.draw(st.integers(1, len(document)))] + self.draw(st.lists(TOKEN, max_size=5))
        skips = self.draw(st.integers(0, 15)) == 15
        request = Request(f"request {self.count}", tokens, self.manager.hash_block_size, skips)
        self.waiting.append(request)
        self.name(request)

    def admit(self) -> None:
        request = self.one_of(self.waiting)
        hit, num_hit = self.look_up(request)
        new = self.step_length(request, num_hit)
        must_fit, reserved = self.draw(st.sampled_from([(False, 0), (False, 0), (True, 0), (False, 2)]))
        if self.allocate(request, new, num_hit, hit, full_sequence_must_fit=must_fit, reserved_blocks=reserved):
            self.waiting.remove(request)
            self.running.append(request)
            request.num_computed_tokens = num_hit
            self.compute(request, new)

    def admit_with_remote_pages(self) -> None:
        request = self.one_of(self.waiting)
        most = MAX_MODEL_LEN // self.manager.hash_block_size
        pages = st.one_of(
            st.integers(0, most).map(lambda count: [True] * count),
            st.lists(st.sampled_from([True, True, True, False]), max_size=most),
        )
        presence = {number: self.draw(pages) for number in range(len(self.groups))}
        blocks, local, external = self.look_up_with(request, presence)
        if external:
            self.load(request, blocks, local, external)

    def admit_with_tokens_from_elsewhere(self) -> None:
        """As a connector of vLLM's kind: so many tokens more, whichever blocks these are."""
        request = self.one_of(self.waiting)
        hit, num_hit = self.look_up(request)
        unit = self.manager.scheduler_block_size
        external = min(self.draw(st.integers(1, 5)) * unit, request.num_tokens - 1 - num_hit)
        external -= external % unit
        if num_hit % unit:
            return
        if not any(group.is_recurrent for group in self.groups):
            external -= self.draw(st.sampled_from([0, 0, 1]))
        if external > 0 and not request.skip_reading_prefix_cache:
            self.load(request, hit, num_hit, external)

    def load(self, request: Request, blocks: KVCacheBlocks, local: int, external: int) -> None:
        given = self.allocate(request, 0, local, blocks, num_external_computed_tokens=external, delay_cache_blocks=True)
        if not given:
            return
        self.waiting.remove(request)
        self.loading.append(request)
        request.num_computed_tokens = local + external
        for loads in self.manager.get_blocks_to_load(request.request_id):
            self.spoil(block.block_id for _, block in loads)

    def end_a_load(self) -> None:
        request = self.one_of(self.loading)
        loads = self.manager.get_blocks_to_load(request.request_id)
        block_ids = [block.block_id for blocks in loads for _, block in blocks]
        invalid = self.draw(st.one_of(st.just(set()), st.sets(st.sampled_from(block_ids)))) if block_ids else set()
        self.fill(request, invalid)
        tables = self.manager.get_block_ids(request.request_id)
        other = self.draw(st.integers(0, self.num_blocks + 2))  # whose block it is, is not this load's business
        others = set() if any(other in table for table in tables) else {other}
        length = self.manager.complete_load(request, invalid | others)

        def is_there(number: int, end: int) -> bool:
            place, rest = divmod(end, self.groups[number].block_size)
            return not rest and tables[number][place - 1] not in (NULL, *invalid)

        assert length == (
            self.longest(request.num_computed_tokens, is_there) if invalid else request.num_computed_tokens
        )
        request.num_computed_tokens = request.num_cacheable = length
        self.states_came = True
        self.loading.remove(request)
        (self.running if length else self.waiting).append(request)
        assert not any(self.manager.get_blocks_to_load(request.request_id))
        assert length or not any(self.manager.get_block_ids(request.request_id))

    def schedule(self) -> None:
        request = self.one_of(self.ready())
        new = self.step_length(request, request.num_computed_tokens)
        drafts = self.draw(st.lists(TOKEN, max_size=self.model.drafts))
        if request.num_computed_tokens + new < request.num_tokens or request.num_tokens + 3 >= MAX_MODEL_LEN:
            drafts = []
        lookahead = self.draw(st.integers(0, self.model.drafts))
        if self.allocate(request, new + len(drafts), num_lookahead_tokens=lookahead):
            self.compute(request, new, drafts)

    def begin_a_step(self) -> None:
        """The step before is over: drafts turn out right or wrong, requests get a token."""
        for request in self.step:
            request.num_in_flight_tokens = 0
            if request not in self.running:
                continue
            right = request.drafts[: self.draw(st.integers(0, len(request.drafts)))]
            samples = request.num_computed_tokens - len(request.drafts) == request.num_tokens
            request.num_computed_tokens -= len(request.drafts) - len(right)
            request.drafts = []
            if samples and request.num_tokens < MAX_MODEL_LEN - 4:
                request.append([*right, self.draw(TOKEN)])
                self.name(request)
            elif samples:
                self.give_back(request, deferred=False, is_over=True)
        self.step = []
        self.manager.free_copied(self.copying)
        self.copying = []
        self.manager.new_step_starts()
        self.written_in_step = set()
        self.states_came = False

    def finish(self) -> None:
        """Also by an abort, while its pages are loaded or its step is under way."""
        self.give_back(self.one_of(self.running + self.loading), self.draw(st.booleans()))

    def preempt(self) -> None:
        request = self.one_of(self.running + self.loading)
        self.give_back(request, self.draw(st.booleans()))
        request.num_computed_tokens = request.num_cacheable = 0
        request.num_preemptions += 1
        request.drafts = []
        self.waiting.append(request)

    def give_back(self, request: Request, deferred: bool, *, is_over: bool = False) -> None:
        unfilled = [
            block.block_id for blocks in self.manager.get_blocks_to_load(request.request_id) for _, block in blocks
        ]
        # A step that is under way writes to its blocks: they are no one else's before it is over.
        if deferred or (request in self.step and not is_over):
            self.popped.append(Popped(self.manager.pop_blocks_for_free(request), unfilled))
        else:
            self.manager.free(request)
        (self.loading if request in self.loading else self.running).remove(request)

    def end_a_copy(self) -> None:
        popped = self.popped.pop(self.draw(st.integers(0, len(self.popped) - 1)))
        self.spoil(popped.unfilled)
        self.manager.free_popped(popped.blocks)

    def leave_blocks_behind(self) -> None:
        request = self.one_of(self.running)
        settled = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        self.manager.remove_skipped_blocks(request.request_id, settled)

    def evict(self) -> None:
        any_blocks = st.sets(st.integers(0, self.num_blocks - 1), max_size=3)
        found = [[block.block_id for _, block in found] for found in self.manager.pool.cached]
        of_a_group = [st.sets(st.sampled_from(block_ids)) for block_ids in found if block_ids]
        block_ids = self.draw(st.one_of(any_blocks, *of_a_group))
        self.manager.evict_blocks(block_ids)
        self.evicted |= block_ids

    def reset(self) -> None:
        is_idle = not (self.running or self.loading or self.popped or self.copying)
        assert self.manager.reset_prefix_cache() == is_idle

    # What a step does

    def ready(self) -> list[Request]:
        return [
            request
            for request in self.running
            if request not in self.step and request.num_computed_tokens < request.num_tokens
        ]

    def step_length(self, request: Request, computed: int) -> int:
        remaining = request.num_tokens - computed
        chunk = self.draw(st.one_of(st.just(remaining), st.integers(1, remaining)))
        unit = self.model.step_unit
        if chunk < remaining and unit > 1:
            chunk = max((computed + chunk) // unit * unit, (computed // unit + 1) * unit) - computed
        if self.manager.cache_hit_alignment_tokens < unit:
            if computed % unit:  # a state is left where a block ends
                chunk = min(chunk, unit - computed % unit)
            step = self.manager.hash_block_size
            boundary = (request.num_prompt_tokens - 1) // step * step
            if computed < boundary < computed + chunk and self.draw(st.sampled_from([True, True, False])):
                chunk = boundary - computed
        return min(remaining, chunk)

    def allocate(self, request: Request, num_new: int, num_hit: int = 0, hit: KVCacheBlocks | None = None, **options):
        manager = self.manager
        pool = manager.pool
        tables = manager.get_block_ids(request.request_id)
        free, cached = pool.free_block_ids(), [list(found) for found in pool.cached]
        held = self.holders()
        given = manager.allocate_slots(request, num_new, num_hit, hit, **options)
        self.make_copies()
        after = manager.get_block_ids(request.request_id)
        if given is None:
            behind = set(pool.free_block_ids()) - set(free)
            assert [block_id for block_id in pool.free_block_ids() if block_id not in behind] == free
            assert [list(found) for found in pool.cached] == cached
            for table, now in zip(tables, after, strict=True):
                assert len(table) == len(now)
                assert all(new in (NULL, old) for old, new in zip(table, now, strict=True))
                behind -= set(table)
            assert not behind
            self.check_lack_of_blocks(request, num_new, num_hit, hit, **options)
            return False
        hits = set() if hit is None else {block_id for table in hit.get_block_ids() for block_id in table}
        for table, now in zip(tables, after, strict=True):
            for block_id in set(now) - set(table) - hits - {NULL}:
                # One that it has left behind in this call may come back.
                others = held[block_id] - sum(block_id in before for before in tables)
                assert not others, f"block {block_id} is given to {request.request_id}, and held"
                self.evicted.discard(block_id)
        if pool.num_free_blocks < options.get("reserved_blocks", 0):
            raise AssertionError("blocks in reserve have been given away")
        return True

    def check_lack_of_blocks(
        self, request, num_new, num_hit, hit, *, num_external_computed_tokens=0, full_sequence_must_fit=False,
        reserved_blocks=0, num_lookahead_tokens=0, delay_cache_blocks=False,
    ) -> None:  # fmt: skip
        """There is none only where even a request without any blocks might find none."""
        slots = request.num_computed_tokens + num_hit + num_external_computed_tokens + num_new + num_lookahead_tokens
        if full_sequence_must_fit:
            slots = max(slots, request.num_tokens)
        most = sum(-(-slots // group.block_size) + group.speculative + 1 for group in self.groups)
        # A state that came in this step is read in the next one only.
        waits = num_hit + num_external_computed_tokens > 0 and self.states_came
        assert waits or self.manager.pool.num_free_blocks - reserved_blocks < most

    def compute(self, request: Request, new: int, drafts: Sequence[int] = ()) -> None:
        first = request.num_computed_tokens
        request.drafts = list(drafts)
        last = first + new + len(drafts)
        tables = self.manager.get_block_ids(request.request_id)
        missing = self.can_go_on(request.token_ids, first, tables)
        assert missing is None, missing
        for group, table in zip(self.groups, tables, strict=True):
            if group.is_recurrent and first:
                assert table[(first - 1) // group.block_size] not in self.written_in_step, "read and written in a step"
        self.write(request, first, last)
        request.num_computed_tokens = last
        request.num_in_flight_tokens = last - first
        request.num_cacheable = min(last, request.num_tokens)
        self.step.append(request)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", MODELS)
def test_the_manager_keeps_its_promises(name: str) -> None:
    machine = type("Machine", (BlockManagerMachine,), {"model": MODELS[name]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
