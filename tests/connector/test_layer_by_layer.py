"""Loads that an engine waits for layer by layer: what is late fails its pages, not the step. Two pages a batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.connector.plan import LoadPlan, StepPlan
from kvstore.connector.worker import LOAD_DEADLINE, WorkerConnector


@pytest.fixture
def worker(namespace, kv, clock) -> Iterator[WorkerConnector]:
    worker = WorkerConnector([namespace], [kv], clock=clock, by_layer=True)
    yield worker
    for gate in (namespace.borrow_gate, namespace.complete_load_gate, kv.scatter_gate, *kv.layer_gates):
        gate.open()
    worker.shutdown()


@pytest.fixture
def load(worker, namespace, hashes):
    """Begins a load of a request's first pages into blocks 20, 21, …; kvstore has them."""

    def run(request_id="a", count=2):
        for number, block_hash in enumerate(hashes[:count]):
            namespace.pages[block_hash] = np.full(64, 100 + number, np.uint8)
        plan = LoadPlan(request_id, tuple(hashes[:count]), tuple(range(20, 20 + count)))
        worker.start_load_kv(StepPlan(loads=(plan,)))

    return run


def received(worker) -> tuple[set[str], set[int]]:
    return worker.get_finished()[1], worker.get_block_ids_with_load_errors()


def test_a_layer_is_waited_for_and_those_behind_it_are_not(worker, load, kv, eventually):
    kv.layer_gates[1].close()
    load()

    assert worker.wait_for_layer_load(0) == set()

    kv.layer_gates[1].open()
    assert worker.wait_for_layer_load(2) == set()
    eventually(lambda: received(worker) == ({"a"}, set()))


def test_batches_before_the_last_one_are_there_as_a_whole(worker, load, kv):
    kv.layer_gates[0].close()
    load(count=3)
    kv.layer_gates[0].wait_reached()

    assert (kv.blocks[20:22, 0] == [100, 101]).all()
    kv.layer_gates[0].open()
    assert worker.wait_for_layer_load(2) == set()


def test_a_late_copy_is_given_up_and_reported_when_it_no_longer_writes(worker, load, kv, clock, eventually):
    kv.layer_gates[1].close()
    load()
    assert worker.wait_for_layer_load(0) == set()
    kv.layer_gates[1].wait_reached()

    clock.advance(LOAD_DEADLINE)
    assert worker.wait_for_layer_load(1) == {"a"}
    assert worker.wait_for_layer_load(2) == set(), "it was given up before"

    assert received(worker) == (set(), set()), "it still writes to its blocks"
    kv.layer_gates[1].open()
    eventually(lambda: received(worker) == ({"a"}, {20, 21}))
    assert worker.statistics().loads_late == 1


def test_a_late_answer_ends_the_load_at_once_and_the_blocks_are_left_alone(worker, load, namespace, kv, clock):
    namespace.borrow_gate.close()
    load()
    namespace.borrow_gate.wait_reached()

    clock.advance(LOAD_DEADLINE)
    assert worker.wait_for_layer_load(0) == {"a"}

    assert received(worker) == ({"a"}, {20, 21})
    namespace.borrow_gate.open()
    worker.shutdown()
    assert (kv.blocks[20:22, 0] == [20, 21]).all()


def test_a_load_that_failed_is_not_waited_for(worker, load, namespace, eventually):
    namespace.borrow_gate.error = RuntimeError("gone")
    load()

    assert worker.wait_for_layer_load(2) == set()
    assert received(worker) == ({"a"}, {20, 21})


def test_behind_the_step_every_load_is_known_to_be_good_or_not(worker, load, kv, clock):
    kv.layer_gates[1].close()
    load()
    assert worker.wait_for_layer_load(0) == set()
    kv.layer_gates[1].wait_reached()
    clock.advance(LOAD_DEADLINE)
    assert worker.wait_for_layer_load(1) == {"a"}
    waiting = threading.Thread(target=worker.wait_for_load)
    waiting.start()

    kv.layer_gates[1].open()
    waiting.join()

    assert received(worker) == ({"a"}, {20, 21})


def test_no_layer_is_there_while_a_page_is_awaited(worker, namespace, kv, hashes, clock, eventually):
    """Of a batch whose last page comes later, what has come is no layer yet."""
    namespace.pages[hashes[0]] = np.full(64, 100, np.uint8)
    plan = LoadPlan("a", tuple(hashes[:2]), (20, 21), wait=1.0)
    worker.start_load_kv(StepPlan(loads=(plan,)))
    eventually(lambda: kv.blocks[20, 0] == 100)
    waiting = threading.Thread(target=worker.wait_for_layer_load, args=(0,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()

    namespace.pages[hashes[1]] = np.full(64, 101, np.uint8)
    clock.advance(0.5)
    worker.start_load_kv(StepPlan(loads=(LoadPlan("b", (hashes[0],), (22,)),)))  # which wakes the queue up
    waiting.join(20)
    assert kv.blocks[21, 0] == 101


def test_a_page_that_a_step_may_have_computed_on_is_not_loaded_again(worker, load, namespace, kv, hashes, eventually):
    namespace.valid = 1
    for number, block_hash in enumerate(hashes[:2]):
        namespace.pages[block_hash] = np.full(64, 100 + number, np.uint8)
    worker.start_load_kv(StepPlan(loads=(LoadPlan("a", tuple(hashes[:2]), (20, 21), wait=1.0),)))
    assert worker.wait_for_layer_load(2) == set()
    worker.wait_for_load()
    assert received(worker) == ({"a"}, {21})
