"""Block manager, both connector halves, page copies and a real store: an engine without a model.

Instead of computing, it writes into each block what only its tokens determine, so that a block that holds anything else
is noticed.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import kvstore
from kvstore.config.rules import TenantRule
from kvstore.connector.blocks import (
    BlockHashChain,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    PrefixKeys,
    SharedPrefix,
    SlidingWindowSpec,
)
from kvstore.connector.plan import StepPlan
from kvstore.connector.scheduler import SchedulerConnector
from kvstore.connector.worker import WorkerConnector
from kvstore.errors import LimitExceededError
from kvstore.gpu.begun import BegunCopy
from kvstore.gpu.paged_kv import PagedKV

BLOCK_SIZE = 4
HEAD_SIZE = 8
NUM_BLOCKS = 64
CHUNK = 16
"""Most tokens that an engine computes in one step."""
MOST_STEPS = 1_000_000

FULL = FullAttentionSpec(block_size=BLOCK_SIZE, token_bytes=2 * 2 * HEAD_SIZE * 4)
WINDOW = SlidingWindowSpec(block_size=2 * BLOCK_SIZE, token_bytes=2 * 3 * HEAD_SIZE * 4, sliding_window=12)


class TinyRequest:
    num_in_flight_tokens = 0
    num_preemptions = 0
    skip_reading_prefix_cache = False
    prefix_keys = None

    def __init__(
        self, request_id: str, tokens: Sequence[int], hash_block_size: int = BLOCK_SIZE, keys: PrefixKeys | None = None
    ) -> None:
        chain = BlockHashChain(hash_block_size, keys or ())
        chain.extend(tokens)
        self.request_id = request_id
        self.token_ids = tokens
        self.num_tokens = self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.block_hashes = chain.hashes
        self._hash_block_size = hash_block_size

    def hashes(self, block_size: int) -> Sequence[bytes]:
        """Of its blocks of ``block_size`` tokens."""
        step = block_size // self._hash_block_size
        return self.block_hashes[step - 1 :: step]


class Group:
    """One cache group's layers: two, with as many heads as its spec has room for."""

    def __init__(self, client: kvstore.Client, number: int, spec: KVCacheSpec, num_blocks: int) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        heads = spec.page_size_bytes // (2 * self.block_size * HEAD_SIZE * 4)
        self.layers = [torch.zeros(2, num_blocks, self.block_size, heads, HEAD_SIZE) for _ in range(2)]
        self.pages = PagedKV(self.layers)
        self.namespace = client.namespace(
            kvstore.Layout(model="tiny", block_size=self.block_size, page_bytes=self.pages.page_bytes, group=number)
        )

    def needed(self, num_computed_tokens: int) -> range:
        """Which full blocks the next token attends to."""
        first = 0
        if isinstance(self.spec, SlidingWindowSpec):
            first = max(0, num_computed_tokens - self.spec.sliding_window + 1)
        return range(first // self.block_size, num_computed_tokens // self.block_size)

    def content(self, block_hash: bytes) -> list[torch.Tensor]:
        """What a block of each layer holds, which its tokens alone determine."""
        shape = (2, *self.layers[0].shape[2:])
        numbers = torch.arange(self.layers[0][:, 0].numel()).reshape(shape) % 1000
        return [numbers + float(int.from_bytes(block_hash[:2]) + layer) for layer in range(len(self.layers))]

    def check(self, block_id: int, block_hash: bytes) -> None:
        for layer, expected in zip(self.layers, self.content(block_hash), strict=True):
            assert torch.equal(layer[:, block_id], expected)

    def write(self, block_id: int, block_hash: bytes) -> None:
        assert block_id != 0
        for layer, content in zip(self.layers, self.content(block_hash), strict=True):
            layer[:, block_id] = content


class TinyEngine:
    """With ``zeroes`` new blocks are zeroed before the connector is told of the step."""

    def __init__(
        self,
        client: kvstore.Client,
        specs: Sequence[KVCacheSpec] = (FULL,),
        num_blocks: int = NUM_BLOCKS,
        *,
        zeroes: bool = False,
    ) -> None:
        self.zeroes = zeroes
        self.groups = [Group(client, number, spec, num_blocks) for number, spec in enumerate(specs)]
        self.namespaces = [group.namespace for group in self.groups]
        layers = tuple(KVCacheGroupSpec((f"layer {number}",), spec) for number, spec in enumerate(specs))
        self.manager = KVCacheManager(KVCacheConfig(num_blocks, layers), 256, max_in_flight_tokens=CHUNK)
        # A budget that no machine is too slow for: whether a page is found must not depend on the load of this one.
        self.scheduler = SchedulerConnector(client, self.namespaces, lookup_budget=60.0, touched_early=zeroes)
        pages = [group.pages for group in self.groups]
        self.worker = WorkerConnector(
            self.namespaces, pages, load_deadline=60.0, store_deadline=60.0, touched_early=zeroes
        )
        self.tokens_computed = 0
        self.tokens_loaded = 0

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        self.manager.check_integrity()
        assert self.manager.usage == 0.0

    def run(
        self,
        request: TinyRequest,
        before_load: Callable[[], object] = lambda: None,
        before_end: Callable[[], object] = lambda: None,
    ) -> None:
        """One request from its arrival to its end, with every block checked on the way."""
        request_id = request.request_id
        hit, num_hit, num_external = self.manager.get_computed_blocks_with(request, self._presence(request))
        new = self.manager.allocate_slots(
            request,
            0 if num_external else min(request.num_tokens - num_hit, CHUNK),
            num_hit,
            hit,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=num_external > 0,
        )
        assert new is not None
        self.scheduler.blocks_allocated([block_id for ids in new.get_block_ids() for block_id in ids])
        request.num_computed_tokens = num_hit + num_external
        loads = {
            group: [(index, block.block_id) for index, block in blocks]
            for group, blocks in enumerate(self.manager.get_blocks_to_load(request_id))
        }
        self.scheduler.blocks_allocated([block_id for pages in loads.values() for _, block_id in pages])
        self.scheduler.update_state_after_alloc(request_id, loads)
        if num_external:
            before_load()
            self._load(request)
            self.tokens_loaded += max(request.num_computed_tokens - num_hit, 0)
        self._compute(request)
        before_end()
        self._end(request)

    def _presence(self, request: TinyRequest) -> dict[int, tuple[bool, ...]]:
        hashes = [
            request.hashes(group.block_size)[: (request.num_tokens - 1) // group.block_size] for group in self.groups
        ]
        for _ in range(MOST_STEPS):
            presence = self.scheduler.get_presence(request.request_id, hashes)
            if presence is not None:
                return presence
        raise AssertionError("the lookup never ended")

    def _step(self, compute: Callable[[], object] = lambda: None) -> tuple[set[str], set[str], set[int]]:
        plan = StepPlan.from_bytes(self.scheduler.build_connector_meta().to_bytes())
        if self.zeroes:
            for layer in [layer for group in self.groups for layer in group.layers]:
                layer[:, list(plan.overwritten)] = 0.0
        self.worker.handle_preemptions(plan)
        self.worker.start_load_kv(plan)
        compute()
        self.worker.start_save_kv(plan)
        sent, received = self.worker.get_finished()
        errors = self.worker.get_block_ids_with_load_errors()
        self.scheduler.update_connector_output(sent, received, errors)
        return sent, received, errors

    def _load(self, request: TinyRequest) -> None:
        for _ in range(MOST_STEPS):
            _, received, errors = self._step()
            if received:
                assert received == {request.request_id}
                request.num_computed_tokens = self.manager.complete_load(request, errors)
                return
        raise AssertionError("the load never ended")

    def _compute(self, request: TinyRequest) -> None:
        """The rest of the prompt, in chunks."""
        while request.num_computed_tokens < request.num_tokens:
            start = request.num_computed_tokens
            end = min(start + CHUNK, request.num_tokens)
            self.manager.new_step_starts()
            new = self.manager.allocate_slots(request, end - start)
            assert new is not None
            self.scheduler.blocks_allocated([block_id for ids in new.get_block_ids() for block_id in ids])
            by_group = self.manager.get_block_ids(request.request_id)
            for number, (group, block_ids) in enumerate(zip(self.groups, by_group, strict=True)):
                full = end // group.block_size
                self.scheduler.save_blocks(
                    request.request_id, number, request.hashes(group.block_size)[:full], block_ids[:full]
                )
            self._step(lambda: self._forward(request, by_group, start, end))  # noqa: B023
            self.tokens_computed += end - start
            request.num_computed_tokens = end

    def _forward(self, request: TinyRequest, by_group: Sequence[Sequence[int]], start: int, end: int) -> None:
        for group, block_ids in zip(self.groups, by_group, strict=True):
            hashes = request.hashes(group.block_size)
            for index in group.needed(start):
                group.check(block_ids[index], hashes[index])
            for index in range(start // group.block_size, end // group.block_size):
                group.write(block_ids[index], hashes[index])

    def _end(self, request: TinyRequest) -> None:
        by_group = self.manager.get_block_ids(request.request_id)
        held = self.scheduler.request_finished(request.request_id, [each for ids in by_group for each in ids])
        for _ in range(MOST_STEPS):
            sent, _, _ = self._step()
            if sent or not held:
                self.manager.free(request)
                return
        raise AssertionError("the store never ended")


@pytest.fixture
def client(tmp_path: Path, shm_folder: Path) -> Iterator[kvstore.Client]:
    url = f"embedded://{tmp_path}/store?arena=8MiB&disk_limit=64MiB&arena_dir={shm_folder}/arena"
    with kvstore.connect(url) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["told first", "zeroed first"])
def new_engine(client: kvstore.Client, request: pytest.FixtureRequest) -> Iterator[Callable[..., TinyEngine]]:
    engines: list[TinyEngine] = []

    def start(*specs: KVCacheSpec, num_blocks: int = NUM_BLOCKS) -> TinyEngine:
        engines.append(TinyEngine(client, specs or (FULL,), num_blocks, zeroes=request.param))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


SYSTEM = list(range(100, 122))
FIRST_TURN = [*SYSTEM, *range(40)]
SECOND_TURN = [*FIRST_TURN, *range(60, 90)]


def test_an_engine_computes_only_what_none_has_computed_before(new_engine):
    first = new_engine()
    first.run(TinyRequest("a", FIRST_TURN))
    assert (first.tokens_computed, first.tokens_loaded) == (62, 0)

    second = new_engine()
    second.run(TinyRequest("b", SECOND_TURN))
    assert (second.tokens_computed, second.tokens_loaded) == (92 - 60, 60)
    assert second.worker.statistics().pages_loaded == {"arena": 15}
    # The 15 pages that came from kvstore did not go back to it.
    assert second.worker.statistics().pages_stored == 23 - 15
    assert second.worker.statistics().pages_present == 0

    third = new_engine()
    third.run(TinyRequest("c", SECOND_TURN))
    assert third.tokens_computed == 4  # everything is there, and the last token has to be computed


def test_a_prefix_that_salts_share_is_computed_once_and_what_comes_behind_by_each(new_engine):
    def run(name: str, salt: str, shared: SharedPrefix | None) -> tuple[int, int]:
        engine = new_engine()
        engine.run(TinyRequest(name, FIRST_TURN, keys=PrefixKeys(cache_salt=salt, shared_prefix=shared)))
        return engine.tokens_computed, engine.tokens_loaded

    shared = SharedPrefix(identifier="assistant", num_tokens=len(SYSTEM))
    assert run("a", "mine", shared) == (62, 0)
    assert run("b", "yours", shared) == (62 - 20, 20)
    assert run("c", "yours", shared) == (2, 60)
    assert run("d", "mine", None) == (62, 0)
    assert run("e", "", None) == (62, 0)


def test_kvstore_continues_where_the_local_cache_ends(new_engine):
    new_engine().run(TinyRequest("a", SECOND_TURN))
    engine = new_engine()
    engine.run(TinyRequest("b", SYSTEM))
    computed = engine.tokens_computed
    engine.run(TinyRequest("c", SECOND_TURN))
    assert engine.tokens_computed - computed == 4
    assert engine.tokens_loaded == (20 + 88 - 20)


def test_pages_that_vanish_between_lookup_and_load_are_computed_and_stored_again(new_engine):
    first = new_engine()
    request = TinyRequest("a", FIRST_TURN)
    first.run(request)

    second = new_engine()
    second.run(TinyRequest("b", FIRST_TURN), before_load=lambda: first.namespaces[0].evict(request.block_hashes[3:5]))
    assert second.tokens_loaded == 12
    assert second.tokens_computed == 62 - 12
    assert second.worker.statistics().pages_stored == 2

    third = new_engine()
    third.run(TinyRequest("c", FIRST_TURN))
    assert third.tokens_loaded == 60


def test_a_load_that_fails_altogether_starts_the_request_over(new_engine):
    first = new_engine()
    request = TinyRequest("a", FIRST_TURN)
    first.run(request)
    second = new_engine()
    second.run(TinyRequest("b", FIRST_TURN), before_load=lambda: first.namespaces[0].evict(request.block_hashes))
    assert (second.tokens_loaded, second.tokens_computed) == (0, 62)


def test_pages_of_another_model_are_never_taken(client, new_engine):
    engine = new_engine()
    request = TinyRequest("a", FIRST_TURN)
    engine.run(request)
    page_bytes = engine.namespaces[0].layout.page_bytes
    other = client.namespace(kvstore.Layout(model="other", block_size=BLOCK_SIZE, page_bytes=page_bytes))
    assert other.lookup(request.block_hashes).prefix == 0
    assert engine.namespaces[0].lookup(request.block_hashes).prefix == 15
    into = np.zeros(15 * page_bytes, np.uint8)
    assert engine.namespaces[0].load(request.block_hashes, into) == 15


@contextmanager
def served(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A node as a process of its own, in a folder that may have been another's before."""
    flags = {"socket": folder / "socket", "arena": "16MiB", "arena-dir": folder / "arena", "disk-limit": "0"}
    command = [sys.executable, "-m", "kvstore.cli", "serve"]
    with subprocess.Popen(
        command + [f"--{name}={value}" for name, value in flags.items()], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert "ready" in process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("mapped", [True, False])
def test_a_node_that_dies_costs_misses_only_and_is_used_again_when_it_is_back(tmp_path, mapped, monkeypatch):
    """Not even misses where the arena is mapped: what is in it needs no node."""
    monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.CAN_READ", mapped)
    with ExitStack() as stack:
        node = stack.enter_context(served(tmp_path))
        client = stack.enter_context(kvstore.connect(f"unix://{tmp_path}/socket"))
        first, second = TinyEngine(client), TinyEngine(client)
        stack.callback(first.shutdown)
        stack.callback(second.shutdown)
        first.run(TinyRequest("a", FIRST_TURN))

        def kill() -> None:
            node.kill()
            node.wait()

        second.run(TinyRequest("b", FIRST_TURN), before_load=kill)
        loaded = 60 * mapped
        assert (second.tokens_loaded, second.tokens_computed) == (loaded, 62 - loaded)
        second.run(TinyRequest("c", SECOND_TURN))
        assert (second.tokens_loaded, second.tokens_computed) == (loaded, 62 - loaded + 92 - 60)

        stack.enter_context(served(tmp_path))
        deadline = time.monotonic() + 60
        attempts = 0
        while second.tokens_loaded == loaded:
            assert time.monotonic() < deadline, "the node is back and is not used"
            attempts += 1
            assert second.manager.reset_prefix_cache()
            second.run(TinyRequest(f"again {attempts}", FIRST_TURN))
        assert second.tokens_loaded == loaded + 60


class TestGroups:
    """Full attention in blocks of 4 tokens beside a window of 12 tokens in blocks of 8, with pages of other sizes.

    Of a prompt of 62 tokens, 56 can be loaded: 14 pages of the one group, and the two that the window reaches back to.
    """

    @pytest.fixture(params=["embedded", "unix"])
    def client(self, tmp_path: Path, shm_folder: Path, request: pytest.FixtureRequest) -> Iterator[kvstore.Client]:
        with ExitStack() as stack:
            url = f"embedded://{tmp_path}/store?arena=8MiB&disk_limit=64MiB&arena_dir={shm_folder}/arena"
            if request.param == "unix":
                stack.enter_context(served(tmp_path))
                url = f"unix://{tmp_path}/socket"
            yield stack.enter_context(kvstore.connect(url))

    def test_each_group_loads_what_its_attention_needs(self, new_engine):
        first = new_engine(FULL, WINDOW)
        first.run(TinyRequest("a", FIRST_TURN))
        assert (first.tokens_computed, first.tokens_loaded) == (62, 0)
        assert first.worker.statistics().pages_stored == 15 + 7

        second = new_engine(FULL, WINDOW)
        second.run(TinyRequest("b", FIRST_TURN))
        assert (second.tokens_computed, second.tokens_loaded) == (6, 56)
        assert second.worker.statistics().pages_loaded == {"arena": 14 + 2}
        assert second.worker.statistics().pages_present == 0

        third = new_engine(FULL, WINDOW)
        third.run(TinyRequest("c", SECOND_TURN))
        assert (third.tokens_computed, third.tokens_loaded) == (92 - 56, 56)

    def test_kvstore_adds_what_the_local_cache_lacks(self, new_engine):
        new_engine(FULL, WINDOW).run(TinyRequest("a", SECOND_TURN))
        engine = new_engine(FULL, WINDOW)
        engine.run(TinyRequest("b", SYSTEM))
        assert engine.tokens_loaded == 16
        engine.run(TinyRequest("c", SECOND_TURN))
        assert engine.tokens_loaded == 88
        # The 16 tokens that both prompts begin with came once: four pages of the one group are not loaded again.
        assert engine.worker.statistics().pages_loaded == {"arena": (4 + 2) + (22 - 4 + 2)}

    @pytest.mark.parametrize("group", [0, 1])
    def test_pages_of_either_group_that_vanish_are_computed_and_stored_again(self, new_engine, group):
        first = new_engine(FULL, WINDOW)
        request = TinyRequest("a", FIRST_TURN)
        first.run(request)

        def evict() -> None:
            hashes = request.hashes(first.groups[group].block_size)
            assert first.namespaces[group].evict([hashes[8 if group == 0 else 6]]) == 1

        second = new_engine(FULL, WINDOW)
        second.run(TinyRequest("b", FIRST_TURN), before_load=evict)
        assert second.tokens_loaded + second.tokens_computed == 62
        assert second.tokens_loaded < 40
        assert second.worker.statistics().pages_not_loaded > 0

        third = new_engine(FULL, WINDOW)
        third.run(TinyRequest("c", FIRST_TURN))
        assert third.tokens_loaded == 56

    def test_a_window_alone_needs_nothing_of_the_prompts_beginning(self, new_engine):
        first = new_engine(WINDOW)
        request = TinyRequest("a", FIRST_TURN, WINDOW.block_size)
        first.run(request)
        assert first.namespaces[0].evict(request.hashes(8)[:5]) == 5
        second = new_engine(WINDOW)
        second.run(TinyRequest("b", FIRST_TURN, WINDOW.block_size))
        assert second.tokens_loaded == 56
        assert second.worker.statistics().pages_loaded == {"arena": 2}

    def test_a_store_never_reads_a_block_that_left_the_window_and_was_given_away(self, new_engine, monkeypatch):
        """So few blocks that those of the window are used again while their stores wait."""
        engine = new_engine(FULL, WINDOW, num_blocks=30)
        window = engine.groups[1]
        go_on = threading.Event()
        begin_gather = window.pages.begin_gather

        def begin_late(block_ids, out, after=None) -> BegunCopy:
            assert go_on.wait(60)
            return begin_gather(block_ids, out, after)

        monkeypatch.setattr(window.pages, "begin_gather", begin_late)
        request = TinyRequest("a", SECOND_TURN)
        engine.run(request, before_end=go_on.set)
        hashes = request.hashes(8)
        here = window.namespace.lookup(hashes).present
        assert here[-1]
        assert not all(here)
        for block_hash in [block_hash for block_hash, present in zip(hashes, here, strict=True) if present]:
            page = np.zeros(window.pages.page_bytes, np.uint8)
            assert window.namespace.load([block_hash], page) == 1
            expected = torch.stack(window.content(block_hash)).numpy().tobytes()
            assert page.tobytes() == expected
        assert engine.worker.statistics().pages_dropped == here.count(False)

        second = new_engine(FULL, WINDOW)
        second.run(TinyRequest("b", SECOND_TURN))
        assert second.tokens_loaded == 88


def test_a_tenant_beyond_its_limits_computes_and_nothing_fails(start_node, tmp_path):
    """Whatever is refused is a miss; when there is room again, pages are loaded again."""
    tokens = tmp_path / "tokens"
    tokens.write_text("engine:token-of-the-engine tenant=\n")
    tokens.chmod(0o600)
    node = start_node(token_file=tokens)
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=20.0, token_file=tokens) as client:
        first, second, third = (TinyEngine(client) for _ in range(3))
        first.run(TinyRequest("a", FIRST_TURN))
        now = time.monotonic()
        node.limits._clock = lambda: now  # however late the calls below are, there is no room for them
        node.limits.replace([TenantRule(name="", requests_per_second=1)])
        with pytest.raises(LimitExceededError, match="limit of 1 requests a second"):
            while True:
                client.status()
        second.run(TinyRequest("b", SECOND_TURN))
        assert second.tokens_computed + second.tokens_loaded == len(SECOND_TURN)
        assert node.limits.refused()["", "requests"] > 1
        node.limits.replace([])
        third.run(TinyRequest("c", FIRST_TURN))
        assert third.tokens_loaded == 60
        for engine in (first, second, third):
            engine.shutdown()
