"""A preempted request's blocks in the order of calls of vLLM's two model runners, over a real store and real copies.

V1 tells of a step before it touches the step's blocks. V2 touches them first: it zeroes them, or copies others into
them, and tells behind. ``touched_early`` is for that; ``tests/vllm/test_runners.py`` reads the orders in vLLM itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import kvstore
from kvstore.connector.plan import StepPlan, StorePlan
from kvstore.connector.worker import WorkerConnector
from kvstore.gpu.paged_kv import PagedKV

COMPUTED = 7
HASHES = tuple(kvstore.hash_blocks(list(range(32)), 16))
BLOCKS = (1, 2)


class Engine:
    """A worker half over an embedded store, which stores a request's two blocks while its next step begins."""

    def __init__(self, client: kvstore.Client, *, touched_early: bool) -> None:
        self.layers = [torch.full((8, 4096), COMPUTED, dtype=torch.uint8) for _ in range(2)]
        kv = PagedKV(self.layers, "block dim")
        self.namespace = client.namespace(
            kvstore.Layout(model="m", block_size=16, page_bytes=kv.page_bytes, format=kv.layout.format)
        )
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._prepare_store: Callable[..., object] = self.namespace.prepare_store
        self.namespace.prepare_store = self._held_prepare_store  # type: ignore[method-assign]
        self.worker = WorkerConnector([self.namespace], [kv], touched_early=touched_early)

    def store(self) -> None:
        """The step that computed the request's blocks is queued; their store is held before it reads them."""
        self.worker.start_save_kv(StepPlan(stores=(StorePlan("a", HASHES, BLOCKS),)))
        assert self.reached.wait(60)

    def zero(self) -> None:
        """What the next step does with blocks that it gives to another request."""
        for layer in self.layers:
            layer[list(BLOCKS)] = 0

    def copy(self) -> None:
        """The store goes on, as far as it comes before the engine tells of a step."""
        self.go_on.set()
        self.worker.wait_for_save(60)

    def tell(self) -> None:
        """The request whose blocks those were is preempted."""
        self.worker.handle_preemptions(StepPlan(preempted=("a",)))

    def end(self) -> None:
        """Steps in which nothing happens to these blocks: what can still be published is."""
        self.copy()
        for _ in range(2):
            self.worker.handle_preemptions(StepPlan())
            self.worker.wait_for_save(60)
            self.worker.get_finished()

    def found(self) -> list[set[int]]:
        """The bytes of each page that a lookup of the computed blocks finds."""
        pages = np.full((len(HASHES), self.namespace.layout.page_bytes), 0xAB, np.uint8)
        count = self.namespace.load(HASHES, list(pages))
        return [set(page.tolist()) for page in pages[:count]]

    def _held_prepare_store(self, *arguments: object, **named: object) -> object:
        self.reached.set()
        assert self.go_on.wait(60)
        return self._prepare_store(*arguments, **named)


@pytest.fixture
def make_engine(tmp_path: Path, shm_folder: Path) -> Iterator[Callable[[bool], Engine]]:
    engines: list[Engine] = []
    url = f"embedded://{tmp_path}/store?arena=16MiB&disk_limit=0&arena_dir={shm_folder}/arena"
    with kvstore.connect(url) as client:

        def make(touched_early: bool) -> Engine:
            engines.append(Engine(client, touched_early=touched_early))
            return engines[-1]

        yield make
        for engine in engines:
            engine.go_on.set()
            engine.worker.shutdown()


@pytest.mark.parametrize("touched_early", [False, True])
def test_told_first_nothing_of_a_preempted_request_is_found(
    make_engine: Callable[[bool], Engine], touched_early: bool
) -> None:
    engine = make_engine(touched_early)
    engine.store()
    engine.tell()
    engine.zero()
    engine.end()
    assert engine.found() == []


def test_touched_first_nothing_of_a_preempted_request_is_found(make_engine: Callable[[bool], Engine]) -> None:
    engine = make_engine(True)
    engine.store()
    engine.zero()
    engine.copy()
    engine.tell()
    engine.end()
    assert engine.found() == []


def test_touched_first_zeros_would_be_found_without_touched_early(make_engine: Callable[[bool], Engine]) -> None:
    """Why an engine has to say so: the copy ends before the engine tells, and nothing else gives it up."""
    engine = make_engine(False)
    engine.store()
    engine.zero()
    engine.copy()
    engine.tell()
    engine.end()
    assert engine.found() == [{0}, {0}]


@pytest.mark.parametrize("touched_early", [False, True])
def test_blocks_that_stay_with_their_request_are_found_as_computed(
    make_engine: Callable[[bool], Engine], touched_early: bool
) -> None:
    engine = make_engine(touched_early)
    engine.store()
    engine.end()
    assert engine.found() == [{COMPUTED}, {COMPUTED}]
