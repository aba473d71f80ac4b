"""The worker half while the engine's memory is taken away and given back."""

from __future__ import annotations

import threading

import pytest
from worker_pages import outcome

from kvstore.connector.plan import StepPlan


@pytest.mark.parametrize("revoked", [False, True])
def test_a_copy_under_way_is_waited_for(worker, store, gates, namespace, revoked):
    gates["gather"].close()
    store("a")
    gates["gather"].wait_reached()
    if revoked:
        worker.handle_preemptions(StepPlan(preempted=("a",)))
    order = []
    resting = threading.Thread(target=lambda: (worker.rest(), order.append("at rest")))
    resting.start()
    resting.join(0.1)
    order.append("copied")
    gates["gather"].open()
    resting.join(20)
    assert order == ["copied", "at rest"]
    assert len(namespace.pages) == (0 if revoked else 3)


def test_what_waits_behind_it_is_stored_before(worker, store, namespace):
    store("a")
    store("b", count=6)
    worker.rest()
    assert len(namespace.pages) == 6


def test_meanwhile_nothing_is_copied_and_afterwards_as_ever(worker, load, store, settled, stocked, kv, hashes):
    worker.rest()
    worker.rest()
    load("a")
    store("b", count=8, finished=["b"])
    sent, received = worker.get_finished()
    assert (sent, received, worker.get_block_ids_with_load_errors()) == ({"b"}, {"a"}, {20, 21, 22})
    assert not {"scatter", "gather"} & {name for name, _ in kv.calls}
    assert hashes[6] not in stocked.pages
    worker.wake()
    worker.wake()
    load("a")
    store("b", count=8)
    settled()
    assert outcome(worker) == ({"a"}, set())
    assert [int(kv.blocks[block, 0]) for block in (20, 21, 22)] == [100, 101, 102]
    assert int(stocked.pages[hashes[6]][0]) == 7
