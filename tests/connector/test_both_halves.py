"""Block manager, both connector halves, page copies and a real store: an engine without a model.

Instead of computing, it writes into each block what only its tokens determine, so that a block that holds anything else
is noticed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import kvstore
from connector.blocks import BlockHashChain, CacheConfig, FullAttentionSpec, KVCacheManager
from connector.plan import StepPlan
from connector.scheduler import SchedulerConnector
from connector.worker import WorkerConnector
from gpu.pages import PagedKV

BLOCK_SIZE = 4
LAYERS = 2
NUM_BLOCKS = 64
MOST_STEPS = 1_000_000


class TinyRequest:
    def __init__(self, request_id: str, tokens: Sequence[int]) -> None:
        chain = BlockHashChain(BLOCK_SIZE)
        chain.extend(tokens)
        self.request_id = request_id
        self.num_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.block_hashes = chain.hashes


class TinyEngine:
    def __init__(self, client: kvstore.Client) -> None:
        self.layers = [torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, 2, 8) for _ in range(LAYERS)]
        pages = PagedKV(self.layers)
        layout = kvstore.Layout(model="tiny", block_size=BLOCK_SIZE, page_bytes=pages.page_bytes)
        self.namespace = client.namespace(layout)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, page_bytes=pages.page_bytes)
        self.manager = KVCacheManager(CacheConfig(num_blocks=NUM_BLOCKS, groups=(spec,)))
        # A budget that no machine is too slow for: whether a page is found must not depend on the load of this one.
        self.scheduler = SchedulerConnector(client, self.namespace, lookup_budget=60.0)
        self.worker = WorkerConnector(self.namespace, pages, load_deadline=60.0, store_deadline=60.0)
        self.tokens_computed = 0
        self.tokens_loaded = 0

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        self.manager.check_integrity()
        assert self.manager.usage == 0.0

    def run(self, request: TinyRequest, before_load: Callable[[], object] = lambda: None) -> None:
        """One request from its arrival to its end, with every block checked on the way."""
        hit, num_hit = self.manager.get_computed_blocks(request)
        num_external = self._matched(request, num_hit)
        if num_external:
            assert self.manager.allocate_slots(request, 0, num_hit, hit, num_external, delay_cache_blocks=True)
            request.num_computed_tokens = num_hit + num_external
            (block_ids,) = self.manager.get_block_ids(request.request_id)
            self.scheduler.update_state_after_alloc(
                request.request_id, block_ids[num_hit // BLOCK_SIZE :], num_external
            )
            before_load()
            self._load(request)
            self.tokens_loaded += max(request.num_computed_tokens - num_hit, 0)
        else:
            self.scheduler.update_state_after_alloc(request.request_id, [], 0)
            assert self.manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hit)
            request.num_computed_tokens = num_hit
        self._compute(request)
        self._end(request)

    def _matched(self, request: TinyRequest, num_hit: int) -> int:
        for _ in range(MOST_STEPS):
            matched, _ = self.scheduler.get_num_new_matched_tokens(
                request.request_id, request.block_hashes, request.num_tokens, num_hit
            )
            if matched is not None:
                return matched
        raise AssertionError("the lookup never ended")

    def _step(self, plan: StepPlan) -> tuple[set[str], set[str], set[int]]:
        plan = StepPlan.from_bytes(plan.to_bytes())
        self.worker.start_load_kv(plan)
        self.worker.start_save_kv(plan)
        sent, received = self.worker.get_finished()
        errors = self.worker.get_block_ids_with_load_errors()
        self.scheduler.update_connector_output(sent, received, errors)
        return sent, received, errors

    def _load(self, request: TinyRequest) -> None:
        for _ in range(MOST_STEPS):
            _, received, errors = self._step(self.scheduler.build_connector_meta())
            if received:
                assert received == {request.request_id}
                request.num_computed_tokens = self.manager.complete_load(request, errors)
                return
        raise AssertionError("the load never ended")

    def _compute(self, request: TinyRequest) -> None:
        num_computed = request.num_computed_tokens
        self.tokens_computed += request.num_tokens - num_computed
        assert self.manager.allocate_slots(request, request.num_tokens - num_computed)
        (block_ids,) = self.manager.get_block_ids(request.request_id)
        for index, block_hash in enumerate(request.block_hashes):
            expected = torch.tensor(list(block_hash * 4), dtype=torch.float32).reshape(2, BLOCK_SIZE, 2, 8)
            for number, layer in enumerate(self.layers):
                if index < num_computed // BLOCK_SIZE:
                    assert torch.equal(layer[:, block_ids[index]], expected + number)
                else:
                    layer[:, block_ids[index]] = expected + number
        request.num_computed_tokens = request.num_tokens
        full = len(request.block_hashes)
        self.scheduler.save_blocks(request.request_id, request.block_hashes, block_ids[:full])

    def _end(self, request: TinyRequest) -> None:
        held = self.scheduler.request_finished(request.request_id)
        for _ in range(MOST_STEPS):
            sent, _, _ = self._step(self.scheduler.build_connector_meta())
            if sent or not held:
                self.manager.free(request)
                return
        raise AssertionError("the store never ended")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[kvstore.Client]:
    with kvstore.connect(f"embedded://{tmp_path}/store?arena=8MiB&disk_limit=64MiB") as client:
        yield client


@pytest.fixture
def new_engine(client: kvstore.Client) -> Iterator[Callable[[], TinyEngine]]:
    engines: list[TinyEngine] = []

    def start() -> TinyEngine:
        engines.append(TinyEngine(client))
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
    second.run(TinyRequest("b", FIRST_TURN), before_load=lambda: first.namespace.evict(request.block_hashes[3:5]))
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
    second.run(TinyRequest("b", FIRST_TURN), before_load=lambda: first.namespace.evict(request.block_hashes))
    assert (second.tokens_loaded, second.tokens_computed) == (0, 62)


def test_pages_of_another_model_are_never_taken(client, new_engine):
    engine = new_engine()
    request = TinyRequest("a", FIRST_TURN)
    engine.run(request)
    page_bytes = engine.namespace.layout.page_bytes
    other = client.namespace(kvstore.Layout(model="other", block_size=BLOCK_SIZE, page_bytes=page_bytes))
    assert other.lookup(request.block_hashes).prefix == 0
    assert engine.namespace.lookup(request.block_hashes).prefix == 15
    into = np.zeros(15 * page_bytes, np.uint8)
    assert engine.namespace.load(request.block_hashes, into) == 15


@contextmanager
def served(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A node as a process of its own, in a folder that may have been another's before."""
    flags = {"socket": folder / "socket", "arena": "16MiB", "arena-dir": folder / "arena", "disk-limit": "0"}
    command = [sys.executable, "-c", "import sys; from kvstore.cli import main; sys.exit(main())", "serve"]
    with subprocess.Popen(
        command + [f"--{name}={value}" for name, value in flags.items()], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert "ready" in process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_node_that_dies_costs_misses_only_and_is_used_again_when_it_is_back(tmp_path):
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
        assert (second.tokens_loaded, second.tokens_computed) == (0, 62)
        second.run(TinyRequest("c", SECOND_TURN))
        assert (second.tokens_loaded, second.tokens_computed) == (0, 62 + 92 - 60)

        stack.enter_context(served(tmp_path))
        deadline = time.monotonic() + 60
        attempts = 0
        while not second.tokens_loaded:
            assert time.monotonic() < deadline, "the node is back and is not used"
            attempts += 1
            assert second.manager.reset_prefix_cache()
            second.run(TinyRequest(f"again {attempts}", FIRST_TURN))
        assert second.tokens_loaded == 60
