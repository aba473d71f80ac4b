"""The block manager against what it promises, for models of every kind.

The model is a memory: for each block what was written there last, token by token, in which group and behind which
tokens. It knows which KV a token needs before it can be computed, by the definition of each kind of attention, and
nothing of hashes, queues or counts. A scheduler with random wishes drives both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from connector.blocks import (
    BlockHashChain,
    BlockRemoved,
    BlockStored,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

MAX_MODEL_LEN = 40
NULL, REMOTE = 0, -1

TOKEN = st.sampled_from([0, 0, 0, 0, 1])  # one of them frequent, so that prefixes repeat
EXAMPLES = 50
STEPS = 40

DOCUMENTS = ([0] * 24, [0] * 7 + [1] * 17, [0, 0, 1] * 8)

GARBAGE = ("nothing that anyone wrote",)


# --- What a token needs, by definition -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Layers of one kind, with a block table of their own."""

    kind: str
    block_size: int = 2
    reach: int = 0
    """Tokens of a window or a chunk."""
    speculative: int = 0
    is_eagle: bool = False

    @property
    def is_recurrent(self) -> bool:
        return self.kind.startswith("mamba")

    @property
    def spec(self) -> KVCacheSpec:
        sizes = {"block_size": self.block_size, "token_bytes": 8}
        if self.kind == "full":
            return FullAttentionSpec(**sizes)
        if self.kind == "window":
            return SlidingWindowSpec(**sizes, sliding_window=self.reach)
        if self.kind == "chunk":
            return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=self.reach)
        return MambaSpec(
            block_size=self.block_size,
            state_bytes=8,
            mamba_cache_mode="align" if self.kind == "mamba align" else "all",
            num_speculative_blocks=self.speculative,
        )

    def first_needed(self, length: int) -> int:
        """The first token that token ``length`` attends to."""
        if self.kind == "window":
            return max(0, length - self.reach + 1)
        if self.kind == "chunk":
            return length - length % self.reach
        return 0

    def needed_blocks(self, length: int) -> range:
        """Places of the blocks that token ``length`` needs, which is the first of a block."""
        end = length // self.block_size
        if self.is_recurrent:
            return range(max(end - 1, 0), end)
        return range(min(self.first_needed(length) // self.block_size, end), end)


@dataclass(frozen=True)
class Model:
    groups: tuple[Group, ...]
    drafts: int = 0
    use_eagle: bool = False

    @property
    def step_unit(self) -> int:
        """Steps of a prompt end at multiples of it, or with the prompt."""
        return max((group.block_size for group in self.groups if group.kind == "mamba align"), default=1)


MODELS = {
    "full": Model((Group("full"),), drafts=3),
    "full, eagle": Model((Group("full"),), drafts=2, use_eagle=True),
    "window": Model((Group("window", reach=5),), drafts=2),
    "window, eagle": Model((Group("window", reach=5),), drafts=2, use_eagle=True),
    "window of a block": Model((Group("window", reach=3),)),
    "chunks": Model((Group("chunk", reach=6),), drafts=2),
    "states": Model((Group("mamba all"),)),
    "aligned states": Model((Group("mamba align", speculative=1),)),
    "full + window": Model((Group("full"), Group("window", reach=4)), drafts=2),
    "full + window, longer blocks": Model((Group("full"), Group("window", 4, reach=7)), drafts=2),
    "full, longer blocks + window": Model((Group("full", 4), Group("window", reach=4)), drafts=2),
    "full + window, eagle": Model((Group("full"), Group("window", 4, reach=7)), drafts=2, use_eagle=True),
    "full + window + window": Model((Group("full"), Group("window", reach=4), Group("window", reach=9))),
    "full + chunks": Model((Group("full"), Group("chunk", reach=6))),
    "full, longer blocks + states": Model((Group("full", 4), Group("mamba all"))),
    "full + states, longer blocks": Model((Group("full"), Group("mamba all", 4))),
    "full + aligned states": Model((Group("full"), Group("mamba align"))),
    "full + aligned states, longer blocks": Model((Group("full"), Group("mamba align", 4, speculative=1))),
    "full, longer blocks + aligned states": Model((Group("full", 4), Group("mamba align"))),
    "full + window + aligned states": Model((Group("full"), Group("window", reach=4), Group("mamba align"))),
}


# --- Requests --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    request_id: str
    token_ids: list[int]
    hash_block_size: int
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    prefix_keys: None = None
    num_prompt_tokens: int = 0
    drafts: list[int] = field(default_factory=list)
    """Of the step under way."""
    num_cacheable: int = 0
    """Leading tokens that may be hit by others since it was given slots the last time."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self._chain = BlockHashChain(self.hash_block_size)
        self._chain.extend(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_hashes(self):
        return self._chain.hashes

    def append(self, tokens: Sequence[int]) -> None:
        self.token_ids += tokens
        self._chain.extend(tokens)


@dataclass
class Popped:
    """Blocks that something still copies from, or to."""

    blocks: list
    unfilled: list[int]
    """What a load was still to write."""


# --- The machine -----------------------------------------------------------------------------------------------------


class BlockManagerMachine(RuleBasedStateMachine):
    model: ClassVar[Model]

    @initialize(num_blocks=st.sampled_from([30, 60, 12, 100, 8]))
    def start(self, num_blocks: int) -> None:
        groups = tuple(
            KVCacheGroupSpec((f"layer {index}",), group.spec) for index, group in enumerate(self.model.groups)
        )
        self.groups = self.model.groups
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, groups),
            MAX_MODEL_LEN,
            use_eagle=self.model.use_eagle,
            enable_kv_cache_events=True,
        )
        self.num_blocks = num_blocks
        self.memory: dict[int, dict[int, tuple]] = {block_id: {} for block_id in range(1, num_blocks)}
        self.prefix_of: dict[bytes, tuple[int, ...]] = {}
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.step: list[Request] = []
        self.popped: list[Popped] = []
        self.evicted: set[int] = set()
        self.written_in_step: set[int] = set()
        """Blocks of recurrent states."""
        self.states_came = False
        self.count = 0
        self.stored: Counter[tuple[bytes, int]] = Counter()
        self.believed: set[tuple[bytes, int]] = set()

    # What is in memory

    def content(self, group: int, tokens: Sequence[int], length: int) -> tuple:
        """The KV of the last of so many tokens, or the state behind it."""
        return (group, *tokens[:length])

    def can_go_on(self, tokens: Sequence[int], length: int, tables: Sequence[Sequence[int]]) -> str | None:
        """None when the blocks hold all that token ``length`` needs; else what is missing."""
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            size = group.block_size
            if group.is_recurrent:
                places = [(length - 1) // size] if length else []
                wanted = {place: {0: length} for place in places}
            else:
                wanted = {}
                for token in range(group.first_needed(length), length):
                    wanted.setdefault(token // size, {})[token % size] = token + 1
            for place, slots in wanted.items():
                if place >= len(table) or table[place] == NULL:
                    return f"group {number} has no block at place {place} for token {length}"
                if table[place] == REMOTE:
                    continue
                for slot, end in slots.items():
                    if self.memory[table[place]].get(slot) != self.content(number, tokens, end):
                        return f"group {number}: block {table[place]} does not hold token {end - 1}"
        return None

    def write(self, request: Request, first: int, last: int) -> None:
        """Computes tokens of a request, which has slots for them."""
        tokens = request.token_ids + request.drafts
        tables = self.manager.get_block_ids(request.request_id)
        held = self.holders()
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            ends = range(first + 1, last + 1)
            if group.kind == "mamba all":
                ends = [end for end in ends if end % group.block_size == 0 or end == last]
            elif group.kind == "mamba align":
                ends = [last]
            for end in ends:
                block_id = table[(end - 1) // group.block_size]
                assert block_id != NULL, f"group {number} has no block for token {end - 1}"
                assert held[block_id] == 1, f"token {end - 1} is written to block {block_id} that others hold too"
                slot = 0 if group.is_recurrent else (end - 1) % group.block_size
                self.memory[block_id][slot] = self.content(number, tokens, end)
                if group.is_recurrent:
                    self.written_in_step.add(block_id)
                    self.states_came = True

    def fill(self, request: Request, invalid: set[int]) -> None:
        """Pages of the level below arrive, but for those that don't."""
        for number, (group, blocks) in enumerate(
            zip(self.groups, self.manager.get_blocks_to_load(request.request_id), strict=True)
        ):
            size = group.block_size
            for place, block in blocks:
                for slot in range(size):
                    end = place * size + slot + 1
                    if group.is_recurrent:
                        slot, end = 0, min((place + 1) * size, request.num_computed_tokens)
                    good = block.block_id not in invalid and end <= request.num_computed_tokens
                    self.memory[block.block_id][slot] = (
                        self.content(number, request.token_ids, end) if good else GARBAGE
                    )

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Something was written to these blocks, and no one knows what."""
        for block_id in block_ids:
            self.memory[block_id] = dict.fromkeys(range(8), GARBAGE)

    def holders(self) -> Counter[int]:
        held: Counter[int] = Counter()
        for request in self.loading + self.running:
            for table in self.manager.get_block_ids(request.request_id):
                held.update(block_id for block_id in table if block_id != NULL)
        for popped in self.popped:
            held.update(block.block_id for block in popped.blocks)
        return held

    # What a lookup has to find

    def longest(self, limit: int, is_there: Callable[[int, int], bool]) -> int:
        """The longest prefix of whole blocks of which every group has what the next token needs."""
        unit = self.manager.scheduler_block_size
        for length in range(limit // unit * unit, 0, -unit):
            if all(
                is_there(number, place)
                for number, group in enumerate(self.groups)
                for place in group.needed_blocks(length)
            ):
                return length
        return 0

    def is_cached(self, request: Request, number: int, place: int) -> bool:
        per_block = self.groups[number].block_size // self.manager.hash_block_size
        block_hash = request.block_hashes[(place + 1) * per_block - 1]
        return self.manager.pool.get_cached_block(block_hash, number) is not None

    def look_up(self, request: Request) -> tuple[KVCacheBlocks, int]:
        blocks, length = self.manager.get_computed_blocks(request)
        if request.skip_reading_prefix_cache:
            assert length == 0
            return blocks, length
        self.check_hit(request, blocks, length)
        if not self.model.use_eagle:
            assert length == self.longest(request.num_tokens - 1, lambda *where: self.is_cached(request, *where))
        return blocks, length

    def look_up_with(self, request: Request, presence: dict[int, list[bool]]) -> tuple[KVCacheBlocks, int, int]:
        blocks, local, external = self.manager.get_computed_blocks_with(request, presence)
        if request.skip_reading_prefix_cache:
            assert (local, external) == (0, 0)
            return blocks, local, external
        plain = self.look_up(request)[1]
        if self.model.use_eagle and not external:  # a page below that was matched and dropped again
            assert local >= plain
        else:
            assert local == plain
        self.check_hit(request, blocks, local + external)

        def is_below(number: int, place: int) -> bool:
            pages = presence.get(number, [])
            return place < len(pages) and pages[place]

        for number, table in enumerate(blocks.get_block_ids()):
            for place, block_id in enumerate(table):
                assert block_id != REMOTE or is_below(number, place)
                assert block_id != REMOTE or not self.is_cached(request, number, place)
        if not self.model.use_eagle:
            assert local + external == self.longest(
                request.num_tokens - 1, lambda *where: self.is_cached(request, *where) or is_below(*where)
            )
        return blocks, local, external

    def check_hit(self, request: Request, blocks: KVCacheBlocks, length: int) -> None:
        assert length < request.num_tokens
        assert length % self.manager.scheduler_block_size == 0
        tables = blocks.get_block_ids()
        for group, table in zip(self.groups, tables, strict=True):
            assert len(table) * group.block_size == length
        missing = self.can_go_on(request.token_ids, length, tables)
        assert missing is None, missing

    # A request's way

    @rule(data=st.data())
    def anything(self, data: st.DataObject) -> None:
        """One operation. A rule for each would leave out half of them in each run, and mostly one that all need."""
        active = len(self.running) + len(self.loading)
        weights = {
            self.arrive: 3 * (len(self.waiting) < 3),
            self.admit: 6 * bool(self.waiting and active < 5),
            self.admit_with_pages_below: 6 * bool(self.waiting and active < 5),
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

    def admit_with_pages_below(self) -> None:
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
        if not any(group.is_recurrent for group in self.groups):
            external -= self.draw(st.sampled_from([0, 0, 1]))
        if external > 0 and not request.skip_reading_prefix_cache:
            self.load(request, hit, num_hit, external)

    def load(self, request: Request, blocks: KVCacheBlocks, local: int, external: int) -> None:
        room = self.allocate(request, 0, local, blocks, num_external_computed_tokens=external, delay_cache_blocks=True)
        if not room:
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
        stranger = self.draw(st.integers(0, self.num_blocks + 2))  # whose block it is, is not this load's business
        strangers = set() if any(stranger in table for table in tables) else {stranger}
        length = self.manager.complete_load(request, invalid | strangers)

        def is_there(number: int, place: int) -> bool:
            return tables[number][place] not in (NULL, *invalid)

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
        is_idle = not self.running and not self.loading and not self.popped
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
        return min(remaining, chunk)

    def allocate(self, request: Request, num_new: int, num_hit: int = 0, hit: KVCacheBlocks | None = None, **options):
        manager = self.manager
        pool = manager.pool
        tables = manager.get_block_ids(request.request_id)
        free, cached = pool.free_block_ids(), [list(found) for found in pool.cached]
        held = self.holders()
        given = manager.allocate_slots(request, num_new, num_hit, hit, **options)
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
            self.check_lack_of_room(request, num_new, num_hit, hit, **options)
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

    def check_lack_of_room(
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

    def name(self, request: Request) -> None:
        """Notes which tokens each of its hashes stands for."""
        size = self.manager.hash_block_size
        for index, block_hash in enumerate(request.block_hashes):
            self.prefix_of[block_hash] = tuple(request.token_ids[: (index + 1) * size])

    # What holds at any time

    @invariant()
    def all_is_counted(self) -> None:
        self.manager.check_integrity()
        held = self.holders()
        free = set(self.manager.pool.free_block_ids())
        assert free == {block_id for block_id in range(1, self.num_blocks) if not held[block_id]}

    @invariant()
    def every_request_can_go_on(self) -> None:
        for request in self.running:
            tables = self.manager.get_block_ids(request.request_id)
            tokens = request.token_ids + request.drafts
            missing = self.can_go_on(tokens, request.num_computed_tokens, tables)
            assert missing is None, f"{request.request_id}: {missing}"
            if request.drafts:  # which may all be wrong
                missing = self.can_go_on(tokens, request.num_computed_tokens - len(request.drafts), tables)
                assert missing is None, f"{request.request_id}: {missing}"

    @invariant()
    def what_can_be_found_is_what_its_hash_names(self) -> None:
        for number, (group, found) in enumerate(zip(self.groups, self.manager.pool.cached, strict=True)):
            for block_hash, block in found:
                prefix = self.prefix_of[block_hash]
                slots = self.memory[block.block_id]
                length = len(prefix)
                if group.is_recurrent:
                    assert slots.get(0) == self.content(number, prefix, length)
                    continue
                start = (length - 1) // group.block_size * group.block_size  # a prompt's tail may end inside the block
                for slot in range(length - start):
                    assert slots.get(slot) == self.content(number, prefix, start + slot + 1)

    @invariant()
    def shared_blocks_mean_the_same_to_all(self) -> None:
        meaning: dict[int, tuple] = {}
        for request in self.loading + self.running:
            tables = self.manager.get_block_ids(request.request_id)
            for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
                for place, block_id in enumerate(table):
                    if block_id != NULL:
                        here = (number, place, *request.token_ids[: (place + 1) * group.block_size])
                        assert meaning.setdefault(block_id, here) == here

    @invariant()
    def blocks_that_are_loaded_are_found_by_no_one_and_held_once(self) -> None:
        held = self.holders()
        for request in self.loading:
            for blocks in self.manager.get_blocks_to_load(request.request_id):
                for _, block in blocks:
                    assert block.block_hash is None
                    assert held[block.block_id] == 1

    @invariant()
    def what_a_request_has_computed_can_be_hit(self) -> None:
        for request in self.running:
            _, found = self.manager.get_computed_blocks(request)
            if self.model.use_eagle or request.skip_reading_prefix_cache:
                continue
            tables = self.manager.get_block_ids(request.request_id)

            def is_there(number: int, place: int, tables=tables) -> bool:
                return tables[number][place] != NULL and tables[number][place] not in self.evicted

            limit = min(request.num_cacheable, request.num_tokens - 1)
            if any(group.kind == "mamba align" for group in self.groups):
                # Between the end of its prompt and the end of a block only the running state is there.
                limit = min(limit, request.num_computed_tokens)
            assert found >= self.longest(limit, is_there)

    @invariant()
    def common_prefixes_are_held_by_all(self) -> None:
        active = [request.request_id for request in self.running + self.loading]
        for request_id in active:
            common = self.manager.get_num_common_prefix_blocks(request_id)
            for number, group in enumerate(self.groups):
                tables = [self.manager.get_block_ids(other)[number] for other in active]
                mine = self.manager.get_block_ids(request_id)[number]
                expected = 0
                while expected < len(mine) and all(
                    table[expected : expected + 1] == [mine[expected]] for table in tables
                ):
                    expected += 1
                assert common[number] == (expected if group.kind == "full" else 0)

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        """Who follows them never believes in a block that is gone, and never misses one that came."""
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                keys = [(block_hash, event.group_idx) for block_hash in event.block_hashes]
                self.stored.update(keys)
                self.believed.update(keys)
            elif isinstance(event, BlockRemoved):
                self.stored[event.block_hash, event.group_idx] -= 1
                self.believed.discard((event.block_hash, event.group_idx))
            else:
                self.stored.clear()
                self.believed.clear()
        carried = Counter(
            (block_hash, number) for number, found in enumerate(self.manager.pool.cached) for block_hash, _ in found
        )
        assert self.believed <= carried.keys()
        assert all(self.stored[key] >= count for key, count in carried.items())

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in self.running + self.loading:
            self.manager.free(request)
        for popped in self.popped:
            self.manager.free_popped(popped.blocks)
        self.manager.new_step_starts()
        self.running, self.loading, self.popped = [], [], []
        self.all_is_counted()
        assert self.manager.usage == 0.0
        assert self.manager.reset_prefix_cache()
        # Nothing is left in the way of a request that fills everything.
        last = Request("the last one", [0], self.manager.hash_block_size)
        if sum(1 + group.speculative for group in self.groups) < self.num_blocks:
            assert self.manager.allocate_slots(last, 1) is not None
            self.manager.free(last)
        assert self.manager.usage == 0.0


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
