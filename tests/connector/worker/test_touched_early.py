"""Engines that write to blocks before they tell that a step gives them out: what is read meanwhile is not published."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from worker_pages import NOTHING, PAGE_BYTES

from kvstore.connector import unconfirmed_copies
from kvstore.connector.plan import StepPlan
from kvstore.connector.worker import STORE_DEADLINE, WorkerConnector
from kvstore.errors import UnavailableError
from kvstore.gpu.begun import DoneCopy

NEXT_STEP = StepPlan()
MOST_STEPS = 100_000


@pytest.fixture
def worker(namespace, kv, clock, gates) -> Iterator[WorkerConnector]:
    worker = WorkerConnector([namespace], [kv], clock=clock, touched_early=True)
    yield worker
    for gate in gates.values():
        gate.open()
    worker.shutdown()
    assert not worker._stores._thread.is_alive()
    assert namespace.held == 0


@pytest.fixture
def copied_all(worker, settled) -> Callable[[], None]:
    """Waits until the queue's thread can do nothing more before the engine tells of a step."""

    def run() -> None:
        settled()
        queue = worker._stores
        with queue._changed:
            assert queue._changed.wait_for(lambda: not any(copy.confirmed for copy in queue._copies._copies), 20)

    return run


def contents(namespace) -> dict[bytes, int]:
    return {key: int(page[0]) for key, page in namespace.pages.items()}


def test_what_was_copied_before_the_next_step_is_published_behind_it(worker, store, copied_all, namespace, hashes):
    store(count=3, finished=["a"])
    copied_all()
    assert not namespace.pages
    assert worker.get_finished() == NOTHING
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert contents(namespace) == {hashes[0]: 1, hashes[1]: 2, hashes[2]: 3}
    assert worker.get_finished() == ({"a"}, set())
    statistics = worker.statistics()
    assert (statistics.pages_stored, statistics.pages_dropped) == (3, 0)
    assert statistics.bytes_stored == 3 * PAGE_BYTES
    assert namespace.touched == [tuple(hashes[:3])]


def test_blocks_that_were_zeroed_before_the_engine_said_so_are_not_published(
    worker, store, copied_all, namespace, kv, gates
):
    gates["prepare_store"].close()
    store("a", count=2)
    gates["prepare_store"].wait_reached()
    kv.blocks[1:3] = 0  # the next step's, which has preempted the request
    gates["prepare_store"].open()
    copied_all()
    worker.handle_preemptions(StepPlan(preempted=("a",)))
    copied_all()
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert not namespace.pages
    worker.get_finished()
    assert worker.statistics().pages_dropped == 2


def test_a_copy_that_ends_behind_a_step_waits_for_the_one_behind_it(worker, store, copied_all, namespace, gates):
    gates["gather"].close()
    store("a", count=1)
    gates["gather"].wait_reached()
    worker.handle_preemptions(NEXT_STEP)
    gates["gather"].open()
    copied_all()
    assert not namespace.pages
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert len(namespace.pages) == 1


def test_blocks_that_go_to_others_take_their_pages_along_and_the_rest_is_read_again(
    worker, store, copied_all, namespace, hashes, kv
):
    store("a", count=5)
    store("b", count=6)
    copied_all()
    kv.blocks[2] = kv.blocks[6] = 0
    worker.handle_preemptions(StepPlan(overwritten=(2, 6)))
    copied_all()
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    worker.get_finished()
    assert contents(namespace) == {hashes[0]: 1, hashes[2]: 3, hashes[3]: 4, hashes[4]: 5}
    assert worker.statistics().pages_dropped == 3


def test_others_do_not_wait_behind_copies_that_wait(worker, store, copied_all, namespace, kv):
    for name in "abc":
        store(name, count=5)
    copied_all()
    assert [what for what, _ in kv.calls].count("gather") == 9
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert len(namespace.pages) == 5


def test_what_waits_is_bounded(worker, store, namespace, gates, monkeypatch, hashes):
    monkeypatch.setattr(unconfirmed_copies, "MOST_BYTES", 2 * PAGE_BYTES)
    most = 0
    prepare = namespace.prepare_store

    def counted(*arguments, **named):
        nonlocal most
        pending = prepare(*arguments, **named)
        most = max(most, namespace.held)
        return pending

    namespace.prepare_store = counted
    store("a", count=12, finished=["a"])
    for _ in range(MOST_STEPS):
        worker.handle_preemptions(NEXT_STEP)
        if worker.get_finished()[0]:
            break
    assert set(namespace.pages) == set(hashes)
    assert most == 1


def test_a_copy_that_waits_lets_its_request_go_at_the_deadline(worker, store, copied_all, namespace, clock):
    store(count=3, finished=["a"])
    copied_all()
    clock.advance(STORE_DEADLINE)
    assert worker.get_finished() == ({"a"}, set())
    worker.handle_preemptions(NEXT_STEP)
    assert worker.statistics().stores_late == 1
    assert worker.statistics().pages_dropped == 3
    assert not namespace.pages


def test_blocks_that_a_request_holds_which_is_over_need_no_further_step(
    worker, store, copied_all, namespace, hashes, gates
):
    """But those that it has given back before."""
    store(count=4)
    copied_all()
    gates["gather"].close()
    store(count=6)
    gates["gather"].wait_reached()
    worker.start_save_kv(StepPlan(finished=("a",), held=((2, 3, 4, 5, 6),)))
    gates["gather"].open()
    copied_all()
    assert set(namespace.pages) == set(hashes[2:6])
    assert worker.get_finished() == NOTHING
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert set(namespace.pages) == set(hashes[:6])
    assert worker.get_finished() == ({"a"}, set())


def test_a_block_that_was_given_back_goes_to_others_while_what_is_held_behind_it_is_published(
    worker, store, copied_all, namespace, hashes, kv
):
    """The second batch is right at once, the first one waits: its block must be known to be still on its way."""
    store(count=4)
    copied_all()
    worker.start_save_kv(StepPlan(finished=("a",), held=((2, 3, 4),)))
    copied_all()
    assert set(namespace.pages) == set(hashes[2:4])
    kv.blocks[1] = 0
    worker.handle_preemptions(StepPlan(overwritten=(1,)))
    worker.wait_for_save()
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert contents(namespace) == {hashes[1]: 2, hashes[2]: 3, hashes[3]: 4}
    assert worker.get_finished() == ({"a"}, set())
    assert worker.statistics().pages_dropped == 1


def test_a_request_that_was_reported_holds_nothing(worker, store, copied_all, namespace):
    worker.start_save_kv(StepPlan(finished=("a",), held=((1, 2, 3),)))
    assert worker.get_finished() == ({"a"}, set())
    store(count=3)
    copied_all()
    assert not namespace.pages


def test_nothing_is_read_again_behind_a_rest(worker, store, copied_all, namespace, kv):
    store(count=3, finished=["a"])
    copied_all()
    worker.rest()
    kv.blocks[1:4] = 99
    worker.wake()
    worker.handle_preemptions(StepPlan(overwritten=(2,)))
    copied_all()
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert not namespace.pages
    assert worker.get_finished() == ({"a"}, set())


def test_nobody_else_publishes(worker, store, copied_all, namespace):
    """An engine may have failed in a step of which it never told."""
    store(count=3)
    copied_all()
    worker.wait_for_save()
    worker.rest()
    worker.wake()
    worker.get_finished()
    worker.start_save_kv(NEXT_STEP)
    worker.start_load_kv(NEXT_STEP)
    worker.shutdown()
    assert not namespace.pages
    assert namespace.held == 0


def test_a_wait_for_stores_waits_for_what_is_being_published(worker, store, copied_all, namespace, gates):
    store(count=1)
    copied_all()
    gates["complete_store"].close()
    worker.handle_preemptions(NEXT_STEP)
    gates["complete_store"].wait_reached()
    opener = threading.Thread(target=gates["complete_store"].open)
    with worker._stores._changed:
        opener.start()
        worker.wait_for_save()
    opener.join()
    assert len(namespace.pages) == 1


def test_a_failure_to_publish_gives_the_rest_up(worker, store, copied_all, namespace, gates):
    store(count=5, finished=["a"])
    copied_all()
    gates["complete_store"].error = UnavailableError("gone")
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert worker.get_finished() == ({"a"}, set())
    assert worker.statistics().store_failures == 1
    assert worker.statistics().pages_dropped == 5
    assert not namespace.pages


def test_a_copy_that_fails_leaves_those_before_it(worker, store, copied_all, namespace, hashes, kv):
    begin_gather = kv.begin_gather

    def failing(block_ids, out, after=None) -> DoneCopy:
        if 5 in block_ids:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return begin_gather(block_ids, out, after)

    kv.begin_gather = failing
    store(count=6, finished=["a"])
    copied_all()
    worker.handle_preemptions(NEXT_STEP)
    worker.wait_for_save()
    assert worker.get_finished() == ({"a"}, set())
    assert set(namespace.pages) == set(hashes[:4])
    assert worker.statistics().pages_dropped == 2
