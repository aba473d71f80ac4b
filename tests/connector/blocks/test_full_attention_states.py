"""One group of full attention against a model so plain that it can be checked by reading: lists, and searches through
them. Which block is given, hit and evicted when is known exactly here; ``test_manager_states`` knows what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from dice import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvstore.connector.blocks import (
    BlockHashChain,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
)

BLOCK_SIZE = 2

# Few different tokens, one of them frequent, so that prefixes are shared.
TOKEN = st.sampled_from([0, 0, 0, 1])


@dataclass
class SimpleRequest:
    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    prefix_keys: None = None
    chain: BlockHashChain = field(default_factory=lambda: BlockHashChain(BLOCK_SIZE))

    def __post_init__(self) -> None:
        self.chain.extend(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.chain.extend([token])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> list[int]:
        return self.tokens

    @property
    def block_hashes(self):
        return self.chain.hashes

    def prefix(self, block: int) -> tuple[int, ...]:
        """What names a block here: all tokens up to its end."""
        return tuple(self.tokens[: (block + 1) * BLOCK_SIZE])


class Model:
    """Which block holds what. ``free`` is in order of eviction, ``cached`` in order of caching."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.cached: list[tuple[tuple[int, ...], int]] = []
        self.held: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}

    def hit(self, request: SimpleRequest) -> list[int]:
        found: list[int] = []
        for block in range((request.num_tokens - 1) // BLOCK_SIZE):
            ids = [block_id for prefix, block_id in self.cached if prefix == request.prefix(block)]
            if not ids:
                break
            found.append(ids[0])
        return found

    def allocate(self, request: SimpleRequest, num_slots: int, hit: list[int]) -> bool:
        held = self.held.get(request.request_id, hit)
        missing = max(-(-num_slots // BLOCK_SIZE) - len(held), 0)
        free = [block_id for block_id in self.free if block_id not in hit]
        if missing > len(free):
            return False
        new, self.free = free[:missing], free[missing:]
        self.cached = [(prefix, block_id) for prefix, block_id in self.cached if block_id not in new]
        self.held[request.request_id] = [*held, *new]
        self.num_cached.setdefault(request.request_id, len(hit))
        return True

    def cache(self, request: SimpleRequest, num_tokens: int) -> None:
        first, last = self.num_cached[request.request_id], num_tokens // BLOCK_SIZE
        for block in range(first, last):
            self.cached.append((request.prefix(block), self.held[request.request_id][block]))
        self.num_cached[request.request_id] = max(first, last)

    def release(self, request: SimpleRequest) -> None:
        del self.num_cached[request.request_id]
        mine = self.held.pop(request.request_id)
        others = {block_id for block_ids in self.held.values() for block_id in block_ids}
        cached = {block_id for _, block_id in self.cached}
        freed = [block_id for block_id in reversed(mine) if block_id not in others]
        unhashed = [block_id for block_id in freed if block_id not in cached]
        self.free = unhashed + self.free + [block_id for block_id in freed if block_id in cached]


class BlockManagerMachine(RuleBasedStateMachine):
    """``running`` requests hold blocks; ``loading`` ones hold blocks whose content is still to come from kvstore."""

    running = Bundle("running")
    loading = Bundle("loading")

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        group = KVCacheGroupSpec(("layer",), FullAttentionSpec(block_size=BLOCK_SIZE, token_bytes=8))
        self.manager = KVCacheManager(KVCacheConfig(num_blocks, (group,)), max_model_len=1000)
        self.model = Model(num_blocks)
        self.num_blocks = num_blocks
        self.count = 0

    def _admit(self, tokens: list[int], num_external: int, delay: bool):
        """A new request as a scheduler treats it; None when too few blocks are free."""
        self.count += 1
        request = SimpleRequest(f"request {self.count}", tokens)
        blocks, num_hit = self.manager.get_computed_blocks(request)
        hit = self.model.hit(request)
        assert blocks.get_block_ids() == (hit,)
        assert num_hit == len(hit) * BLOCK_SIZE
        most = (request.num_tokens - 1) // BLOCK_SIZE - len(hit)
        external = min(num_external, most) * BLOCK_SIZE
        delay = delay and external > 0
        num_new = 0 if delay else request.num_tokens - num_hit - external
        given = self.manager.allocate_slots(
            request, num_new, num_hit, blocks, num_external_computed_tokens=external, delay_cache_blocks=delay
        )
        assert (given is not None) == self.model.allocate(request, num_hit + external + num_new, hit)
        if given is None:
            return None, delay
        request.num_computed_tokens = num_hit + external + num_new
        if not delay:
            self.model.cache(request, request.num_computed_tokens)
        return request, delay

    @rule(target=running, tokens=st.lists(TOKEN, min_size=1, max_size=12), num_external=st.sampled_from([0, 0, 1, 3]))
    def arrive(self, tokens, num_external):
        request, _ = self._admit(tokens, num_external, delay=False)
        return multiple() if request is None else request

    @rule(target=loading, tokens=st.lists(TOKEN, min_size=3, max_size=12), num_external=st.integers(1, 4))
    def arrive_and_load(self, tokens, num_external):
        request, delayed = self._admit(tokens, num_external, delay=True)
        if request is None:
            return multiple()
        if not delayed:  # everything was a local hit
            self._release(request)
            return multiple()
        return request

    @rule(target=running, request=consumes(loading), data=st.data())
    def load_ends(self, request, data):
        held = self.model.held[request.request_id]
        num_local = self.model.num_cached[request.request_id]
        bad = data.draw(st.sets(st.sampled_from(held[num_local:])))
        good = next((index for index, block_id in enumerate(held) if block_id in bad), None)
        expected = request.num_computed_tokens if good is None else good * BLOCK_SIZE
        assert self.manager.complete_load(request, bad) == expected
        request.num_computed_tokens = expected
        if not expected:
            self.model.release(request)
            return multiple()
        self.model.cache(request, expected)
        return request

    @rule(request=running, token=TOKEN)
    def step(self, request, token):
        if request.request_id not in self.model.held:
            return
        if request.num_computed_tokens == request.num_tokens:
            request.append(token)
        num_new = request.num_tokens - request.num_computed_tokens
        before = len(self.model.held[request.request_id])
        given = self.manager.allocate_slots(request, num_new)
        assert (given is not None) == self.model.allocate(request, request.num_tokens, [])
        if given is not None:
            assert given.get_block_ids() == (self.model.held[request.request_id][before:],)
            request.num_computed_tokens = request.num_tokens
            self.model.cache(request, request.num_tokens)

    def _release(self, request):
        self.manager.free(request)
        self.model.release(request)

    @rule(request=consumes(running))
    def finish(self, request):
        self._release(request)

    @rule(request=consumes(loading))
    def abort_after_a_load(self, request):
        self._release(request)

    @rule(data=st.data())
    def evict(self, data):
        block_ids = data.draw(st.sets(st.integers(0, self.num_blocks - 1), max_size=3))
        self.manager.evict_blocks(block_ids)
        self.model.cached = [(prefix, block_id) for prefix, block_id in self.model.cached if block_id not in block_ids]

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.model.held)
        if not self.model.held:
            self.model.cached = []

    @invariant()
    def everything_agrees(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert self.manager.pool.free_block_ids() == self.model.free
        for request_id, block_ids in self.model.held.items():
            assert self.manager.get_block_ids(request_id) == (block_ids,)
        cached = {block_hash for block_hash, _ in self.manager.pool.cached[0]}
        assert len(cached) == len({prefix for prefix, _ in self.model.cached})

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for request_id in list(self.model.held):
            self._release(SimpleRequest(request_id, []))
        assert self.manager.usage == 0.0
        assert self.manager.reset_prefix_cache()


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
