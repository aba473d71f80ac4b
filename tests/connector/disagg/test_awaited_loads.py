"""Loads that begin before all their pages are at the node. Two pages a batch; page n is full of 100 + n."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.connector.awaited_pages import LONGEST_PAUSE, PARTIAL_WAIT
from kvstore.connector.plan import LoadPlan, StepPlan
from kvstore.connector.transfers import State
from kvstore.connector.worker import LOAD_DEADLINE, WorkerConnector

PAGE_BYTES = 64
WAIT = 3.0


def not_before(worker: WorkerConnector) -> list[float]:
    """When each load that is queued may be taken up."""
    return [transfer.not_before for transfer in worker._loads._table.in_state(State.QUEUED)]


@pytest.fixture
def worker(namespace, kv, clock) -> Iterator[WorkerConnector]:
    worker = WorkerConnector([namespace], [kv], clock=clock)
    yield worker
    namespace.borrow_gate.open()
    worker.shutdown()
    assert namespace.held == 0


@pytest.fixture
def come(namespace, hashes):
    """These pages are at the node from now on."""

    def run(*numbers):
        for number in numbers:
            namespace.pages[hashes[number]] = np.full(PAGE_BYTES, 100 + number, np.uint8)

    return run


@pytest.fixture
def load(worker, hashes):
    """Begins a load of a request's first pages into blocks 20, 21, …"""

    def run(request_id="a", count=6, wait=WAIT, partial=False):
        plan = LoadPlan(request_id, tuple(hashes[:count]), tuple(range(20, 20 + count)), partial=partial, wait=wait)
        worker.start_load_kv(StepPlan(loads=(plan,)))

    return run


@pytest.fixture
def next_look(worker, clock):
    """When a load waits for pages, it is the moment of its next look, unless that is behind ``end``."""

    def run(end=float("inf")):
        with worker._loads._changed:
            waiting = not_before(worker)
        if waiting and clock() < min(waiting) <= end:
            clock.now = min(waiting)

    return run


@pytest.fixture
def begun(worker, kv, eventually):
    """These blocks are filled, and the load waits for the other pages."""

    def run(*blocks):
        eventually(lambda: filled(kv) == list(blocks) and any(not_before(worker)))

    return run


@pytest.fixture
def outcome(worker, clock, next_look, eventually):
    """The load errors of requests, when these have been reported; time passes meanwhile, ``seconds`` at most."""

    def run(*names, seconds=2.0):
        end = clock() + seconds
        received: set[str] = set()

        def reported() -> bool:
            next_look(end)
            received.update(worker.get_finished()[1])
            return received == set(names)

        eventually(reported)
        return worker.get_block_ids_with_load_errors()

    return run


def filled(kv) -> list[int]:
    """Of the blocks 20 and later, those that a page came into."""
    return [block_id for block_id in range(20, 32) if kv.blocks[block_id, 0] >= 100]


def test_the_first_pages_are_copied_while_the_others_are_on_their_way(worker, load, come, kv, outcome, begun):
    come(0, 1, 2)
    load()
    begun(20, 21, 22)
    assert worker.get_finished() == (set(), set())
    come(3, 4, 5)
    assert outcome("a") == set()
    assert [int(row[0]) for row in kv.blocks[20:26]] == [100, 101, 102, 103, 104, 105]
    assert worker.statistics().pages_loaded == {"arena": 6}


def test_other_loads_pass_one_that_waits(load, come, outcome, begun):
    come(0)
    load("a")
    begun(20)
    load("b", count=1, wait=0)
    assert outcome("b") == set()
    come(*range(1, 6))
    assert outcome("a") == set()


def test_what_does_not_come_is_a_load_error_when_the_wait_is_over(load, come, clock, outcome, begun):
    come(0, 1, 2)
    load()
    begun(20, 21, 22)
    clock.advance(WAIT)
    assert outcome("a", seconds=1.0) == {23, 24, 25}


def test_what_was_refused_is_not_waited_for(load, come, outcome):
    come(0, 1, 2, 5)
    load()
    assert outcome("a", seconds=0) == {23, 24, 25}


def test_a_partial_block_alone_is_waited_for_but_a_moment(load, come, clock, outcome, begun):
    come(*range(5))
    load(partial=True)
    begun(20, 21, 22, 23, 24)
    clock.advance(PARTIAL_WAIT)
    assert outcome("a", seconds=2 * LONGEST_PAUSE) == {25}


def test_a_load_that_waits_is_given_up_at_its_deadline(worker, load, come, clock, begun, eventually):
    come(0)
    load(wait=10 * LOAD_DEADLINE)
    begun(20)
    clock.advance(LOAD_DEADLINE)
    eventually(lambda: worker.get_finished() == (set(), {"a"}))
    assert worker.get_block_ids_with_load_errors() == {21, 22, 23, 24, 25}
    assert worker.statistics().loads_late == 1


def test_a_load_that_waits_ends_with_the_worker(worker, load, come, begun):
    come(0)
    load()
    begun(20)
    worker.shutdown()
    assert worker.get_finished() == (set(), {"a"})


def test_a_node_that_dies_while_pages_are_waited_for(worker, load, come, namespace, begun, next_look, eventually):
    come(0)
    load()
    begun(20)
    namespace.borrow_gate.error = ConnectionError("gone")
    eventually(lambda: next_look() or worker.get_finished() == (set(), {"a"}))
    assert worker.get_block_ids_with_load_errors() == {21, 22, 23, 24, 25}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_partial_block_is_dropped_where_the_token_may(worker, load, come, namespace, hashes, outcome, read_only):
    namespace.read_only = read_only
    come(*range(6))
    load(partial=True)
    assert outcome("a", seconds=0) == set()
    load("b", count=1)
    assert outcome("b", seconds=0) == set()  # nothing has failed: the node is not left alone
    assert worker.statistics().load_failures == 0
    assert (hashes[5] in namespace.pages) is read_only
