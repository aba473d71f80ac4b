"""The worker half's stores: what fails, what is preempted, what is overwritten."""

from __future__ import annotations

import pytest
from worker_pages import NOTHING, PAGE_BYTES, outcome

from kvstore.connector import worker as worker_module
from kvstore.connector.plan import StepPlan, StorePlan
from kvstore.connector.transfers import State
from kvstore.connector.worker import STORE_DEADLINE, WorkerConnector
from kvstore.connector.worker_statistics import WorkerStatistics
from kvstore.errors import DeadlineError, InvalidRequestError, UnavailableError


class TestStores:
    def test_blocks_become_pages(self, worker, store, settled, namespace, hashes):
        store(count=3)
        settled()
        assert {key: int(page[0]) for key, page in namespace.pages.items()} == {
            hashes[0]: 1,
            hashes[1]: 2,
            hashes[2]: 3,
        }
        statistics = worker.statistics()
        assert statistics == WorkerStatistics(
            pages_stored=3, bytes_stored=3 * PAGE_BYTES, store_seconds=statistics.store_seconds
        )

    def test_nothing_is_reserved_before_the_engine_has_computed_the_blocks(
        self, worker, store, settled, namespace, hashes, kv
    ):
        kv.computed.close()
        store(count=3)
        kv.computed.wait_reached()
        assert not namespace.prepare_store_gate.reached
        worker.handle_preemptions(StepPlan(overwritten=(2,)))

        kv.blocks[1:4] = 7
        kv.computed.open()
        settled()
        assert {key: int(page[0]) for key, page in namespace.pages.items()} == {hashes[0]: 7, hashes[2]: 7}

    def test_a_device_that_failed_is_a_store_that_failed(self, worker, store, settled, namespace, kv):
        kv.computed.error = RuntimeError("CUDA error: an illegal memory access was encountered")
        store(count=3)
        settled()
        assert not namespace.pages
        assert worker.statistics().store_failures == 1

    def test_pages_that_are_there_or_refused_are_not_copied(self, worker, store, settled, stocked, hashes):
        del stocked.pages[hashes[1]]
        del stocked.pages[hashes[2]]
        stocked.refuse.add(hashes[2])
        store(count=4)
        settled()
        assert int(stocked.pages[hashes[0]][0]) == 100
        assert int(stocked.pages[hashes[1]][0]) == 2
        statistics = worker.statistics()
        assert (statistics.pages_stored, statistics.pages_present, statistics.pages_refused) == (1, 2, 1)

    @pytest.mark.parametrize("step", ["prepare_store", "gather", "complete_store"])
    @pytest.mark.parametrize("error", [UnavailableError("gone"), DeadlineError("slow"), MemoryError()])
    def test_a_failure_at_any_step_is_counted_and_the_request_let_go(
        self, worker, store, settled, namespace, gates, step, error
    ):
        gates[step].error = error
        store(finished=["a"])
        settled()
        assert worker.get_finished() == ({"a"}, set())
        assert namespace.pages == {}
        assert worker.statistics().store_failures == 1
        assert worker.statistics().pages_dropped == 3

    def test_a_failing_store_does_not_keep_loads_from_working(self, worker, store, load, settled, stocked, gates):
        gates["prepare_store"].error = UnavailableError("gone")
        store()
        settled()
        load()
        settled()
        assert outcome(worker) == ({"a"}, set())

    def test_a_full_queue_drops_and_counts_and_still_reports(
        self, worker, store, settled, gates, namespace, monkeypatch
    ):
        monkeypatch.setattr(worker._stores._table, "_capacity", 1)
        gates["prepare_store"].close()
        store("a")
        gates["prepare_store"].wait_reached()
        store("b")
        store("c", finished=["c"])
        assert worker.get_finished() == ({"c"}, set())
        assert worker.statistics().pages_dropped == 3
        gates["prepare_store"].open()
        settled()
        assert len(namespace.pages) == 3

    def test_a_finished_request_is_reported_when_its_last_store_is_over(self, worker, store, settled, gates):
        gates["prepare_store"].close()
        store("a", count=1)
        store("a", count=2)
        worker.start_save_kv(StepPlan(finished=("a",)))
        assert worker.get_finished() == NOTHING
        gates["prepare_store"].open()
        settled()
        assert worker.get_finished() == ({"a"}, set())
        assert worker.get_finished() == NOTHING

    def test_a_request_that_goes_on_is_not_reported(self, worker, store, settled):
        store("a")
        settled()
        assert worker.get_finished() == NOTHING
        worker.start_save_kv(StepPlan(finished=("a",)))
        assert worker.get_finished() == ({"a"}, set())

    def test_a_store_that_hangs_lets_its_request_go_at_the_deadline(self, worker, store, gates, clock):
        gates["prepare_store"].close()
        store(finished=["a"])
        gates["prepare_store"].wait_reached()
        assert worker.get_finished() == NOTHING
        clock.advance(STORE_DEADLINE)
        assert worker.get_finished() == ({"a"}, set())
        assert worker.statistics().stores_late == 1

    def test_pages_of_a_store_given_up_are_never_read_from_its_blocks(
        self, worker, store, settled, gates, clock, namespace
    ):
        gates["prepare_store"].close()
        store(finished=["a"])
        gates["prepare_store"].wait_reached()
        clock.advance(STORE_DEADLINE)
        worker.get_finished()
        gates["prepare_store"].open()
        settled()
        assert namespace.pages == {}
        assert namespace.held == 0


class TestPreemption:
    """A preempted request's blocks are overwritten by others: what is read from them must not be published."""

    @pytest.mark.parametrize("step", ["prepare_store", "gather"])
    def test_stores_under_way_are_never_published(self, worker, store, settled, gates, namespace, kv, step):
        gates[step].close()
        store("a")
        gates[step].wait_reached()
        store("b", count=1)
        worker.handle_preemptions(StepPlan(preempted=("a",)))
        kv.blocks[1:4] = 99
        gates[step].open()
        settled()
        assert len(namespace.pages) == 1
        assert worker.statistics().pages_dropped == 0
        worker.get_finished()
        assert worker.statistics().pages_dropped == 3

    def test_a_copy_that_ended_before_may_be_published(self, worker, store, settled, gates, namespace, hashes, kv):
        gates["complete_store"].close()
        store("a", count=1)
        gates["complete_store"].wait_reached()
        worker.handle_preemptions(StepPlan(preempted=("a",)))
        kv.blocks[1:4] = 99
        gates["complete_store"].open()
        settled()
        assert int(namespace.pages[hashes[0]][0]) == 1

    def test_a_request_scheduled_again_stores_again(self, worker, store, settled, gates, namespace):
        gates["prepare_store"].close()
        store("a")
        gates["prepare_store"].wait_reached()
        worker.handle_preemptions(StepPlan(preempted=("a",)))
        store("a", finished=["a"])
        gates["prepare_store"].open()
        settled()
        assert worker.get_finished() == ({"a"}, set())
        assert len(namespace.pages) == 3


class TestOverwrittenBlocks:
    """Blocks that leave a running request, and that another one gets, while a store still reads from them."""

    @pytest.mark.parametrize("step", ["prepare_store", "gather"])
    def test_their_pages_are_never_published_and_the_others_are(
        self, worker, store, settled, gates, namespace, hashes, kv, step
    ):
        gates[step].close()
        store("a", count=5)
        gates[step].wait_reached()
        worker.handle_preemptions(StepPlan(overwritten=(1, 4, 31)))
        kv.blocks[1] = kv.blocks[4] = 99
        gates[step].open()
        settled()
        assert {key: int(page[0]) for key, page in namespace.pages.items()} == {
            hashes[1]: 2,
            hashes[2]: 3,
            hashes[4]: 5,
        }
        worker.get_finished()
        assert (worker.statistics().pages_stored, worker.statistics().pages_dropped) == (3, 2)

    def test_pages_that_were_published_before_stay(self, worker, store, settled, gates, namespace, hashes):
        gates["complete_store"].close()
        store("a", count=4)
        gates["complete_store"].wait_reached()
        gates["prepare_store"].close()
        gates["complete_store"].open()
        gates["prepare_store"].wait_reached()
        worker.handle_preemptions(StepPlan(overwritten=(1, 2)))
        gates["prepare_store"].open()
        settled()
        assert set(namespace.pages) == set(hashes[:4])
        assert worker.statistics().pages_dropped == 0

    def test_stores_that_wait_lose_theirs_and_keep_their_order(
        self, worker, store, settled, gates, namespace, hashes, kv
    ):
        gates["prepare_store"].close()
        store("first", count=1)
        gates["prepare_store"].wait_reached()
        store("a", count=3)
        store("b", count=6)
        worker.handle_preemptions(StepPlan(overwritten=(2,)))
        kv.blocks[2] = 99
        assert [transfer.plan.request_id for transfer in worker._stores._table.in_state(State.QUEUED)] == ["a", "b"]
        gates["prepare_store"].open()
        settled()
        assert set(namespace.pages) == {*hashes[:6]} - {hashes[1]}

    def test_a_finished_request_is_reported_when_the_rest_is_stored(
        self, worker, store, settled, gates, namespace, hashes
    ):
        gates["gather"].close()
        store("a", finished=["a"])
        gates["gather"].wait_reached()
        worker.handle_preemptions(StepPlan(overwritten=(2,)))
        assert worker.get_finished() == NOTHING
        gates["gather"].open()
        settled()
        assert worker.get_finished() == ({"a"}, set())
        assert worker.get_finished() == NOTHING
        assert set(namespace.pages) == {hashes[0], hashes[2]}

    def test_a_store_of_which_nothing_is_left_is_over_at_once(self, worker, store, gates, namespace, settled):
        gates["prepare_store"].close()
        store("a", finished=["a"])
        gates["prepare_store"].wait_reached()
        worker.handle_preemptions(StepPlan(overwritten=(1, 2, 3)))
        assert worker.get_finished() == ({"a"}, set())
        assert worker.statistics().pages_dropped == 3
        gates["prepare_store"].open()
        settled()
        assert namespace.pages == {}

    def test_the_deadline_stays_that_of_the_store(self, worker, store, gates, clock):
        gates["prepare_store"].close()
        store("a", finished=["a"])
        gates["prepare_store"].wait_reached()
        clock.advance(STORE_DEADLINE / 2)
        worker.handle_preemptions(StepPlan(overwritten=(1,)))
        clock.advance(STORE_DEADLINE / 2)
        assert worker.get_finished() == ({"a"}, set())
        assert worker.statistics().stores_late == 1

    def test_after_shutdown_nothing_is_begun_again(self, worker, store, gates, settled, namespace, monkeypatch):
        monkeypatch.setattr(worker_module, "SHUTDOWN_WAIT", 0.01)
        gates["gather"].close()
        store("a", finished=["a"])
        gates["gather"].wait_reached()
        worker.shutdown()
        worker.handle_preemptions(StepPlan(overwritten=(1,)))
        gates["prepare_store"].error = UnavailableError("nobody should have come here")
        gates["gather"].open()
        settled()
        assert worker.get_finished() == ({"a"}, set())
        assert worker.statistics().store_failures == 0
        assert namespace.pages == {}


class TestWaitingAndShutdown:
    def test_wait_for_save_waits_for_everything_begun(self, worker, store, namespace):
        store("a", count=6)
        worker.wait_for_save()
        assert len(namespace.pages) == 6
        worker.wait_for_save()

    def test_wait_for_save_gives_up_at_the_deadline(self, worker, store, gates, clock):
        gates["prepare_store"].close()
        store("a")
        gates["prepare_store"].wait_reached()
        clock.advance(STORE_DEADLINE)
        worker.wait_for_save()
        assert worker.statistics().stores_late == 1

    def test_wait_for_save_lets_a_running_copy_end(self, worker, store, gates, clock):
        gates["gather"].close()
        store("a", count=1)
        gates["gather"].wait_reached()
        clock.advance(STORE_DEADLINE)
        with worker._stores._changed:  # the copy can't end before the wait has begun
            gates["gather"].open()
            worker.wait_for_save()
        assert worker._stores._table.live() == []

    def test_a_wait_for_stores_ends_also_before_their_deadline(self, namespace, kv, gates, hashes):
        worker = WorkerConnector([namespace], [kv], store_deadline=3600.0)
        gates["prepare_store"].close()
        worker.start_save_kv(StepPlan(stores=(StorePlan("a", tuple(hashes[:1]), (1,)),)))
        gates["prepare_store"].wait_reached()
        worker.wait_for_save(0.01)
        assert worker._stores._table.live()
        gates["prepare_store"].open()
        worker.wait_for_save(3600.0)
        assert not worker._stores._table.live()
        worker.shutdown()

    def test_after_shutdown_loads_are_errors_and_stores_are_dropped(self, worker, load, store, stocked):
        worker.shutdown()
        worker.shutdown()
        load()
        store(finished=["a"])
        assert worker.get_finished() == ({"a"}, {"a"})
        assert worker.get_block_ids_with_load_errors() == {20, 21, 22}

    def test_shutdown_does_not_wait_for_a_node_that_hangs(self, worker, load, stocked, gates, settled, kv, monkeypatch):
        monkeypatch.setattr(worker_module, "SHUTDOWN_WAIT", 0.01)
        gates["borrow"].close()
        load("a")
        gates["borrow"].wait_reached()
        load("b")
        worker.shutdown()
        assert worker.get_finished() == (set(), {"a", "b"})
        gates["borrow"].open()
        settled()
        assert kv.blocks[20, 0] == 20

    def test_a_copy_under_way_at_shutdown_is_the_last(self, worker, load, stocked, gates, settled, kv, monkeypatch):
        monkeypatch.setattr(worker_module, "SHUTDOWN_WAIT", 0.01)
        gates["scatter"].close()
        load("a", count=4)
        gates["scatter"].wait_reached()
        worker.shutdown()
        assert worker.get_finished() == NOTHING
        gates["scatter"].open()
        settled()
        assert outcome(worker) == ({"a"}, {20, 21, 22, 23})
        assert kv.blocks[22, 0] == 22

    def test_pages_of_another_size_are_refused(self, namespace, kv, monkeypatch):
        monkeypatch.setattr(kv, "page_bytes", 32, raising=False)
        with pytest.raises(InvalidRequestError, match="32 bytes, the layout says 64"):
            WorkerConnector([namespace], [kv])
