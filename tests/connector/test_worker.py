"""The worker half against a kvstore that fails at each of its steps. Two pages a batch, 64 bytes a page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from connector import worker as worker_module
from connector.health import BACKOFF
from connector.plan import LoadPlan, StepPlan, StorePlan
from connector.worker import LOAD_DEADLINE, STORE_DEADLINE, WorkerConnector, WorkerStatistics
from kvstore.errors import DeadlineError, InvalidRequestError, UnavailableError

PAGE_BYTES = 64
NOTHING: tuple[set[str], set[str]] = (set(), set())


def page_of(number: int) -> np.ndarray:
    return np.full(PAGE_BYTES, number, np.uint8)


@pytest.fixture
def gates(namespace, kv):
    return {
        "borrow": namespace.borrow_gate,
        "scatter": kv.scatter_gate,
        "complete_load": namespace.complete_load_gate,
        "prepare_store": namespace.prepare_store_gate,
        "gather": kv.gather_gate,
        "complete_store": namespace.complete_store_gate,
    }


@pytest.fixture
def worker(namespace, kv, clock, gates) -> Iterator[WorkerConnector]:
    worker = WorkerConnector([namespace], [kv], clock=clock)
    yield worker
    for gate in gates.values():
        gate.open()
    worker.shutdown()
    assert not worker._loads._thread.is_alive()
    assert not worker._stores._thread.is_alive()
    assert namespace.held == 0


@pytest.fixture
def load(worker, hashes):
    """Begins a load of a request's first pages into blocks 20, 21, …"""

    def run(request_id="a", count=3):
        plan = LoadPlan(request_id, tuple(hashes[:count]), tuple(range(20, 20 + count)))
        worker.start_load_kv(StepPlan(loads=(plan,)))

    return run


@pytest.fixture
def store(worker, hashes):
    """Begins a store of blocks 1, 2, … as a request's first pages."""

    def run(request_id="a", count=3, finished=()):
        plan = StorePlan(request_id, tuple(hashes[:count]), tuple(range(1, 1 + count)))
        worker.start_save_kv(StepPlan(stores=(plan,), finished=tuple(finished)))

    return run


@pytest.fixture
def settled(worker):
    """Waits until both threads have let go of everything that they were given."""

    def run():
        for lane in (worker._loads, worker._stores):
            with lane._changed:
                assert lane._changed.wait_for(lambda lane=lane: not lane._queued and lane._current is None, 20)

    return run


@pytest.fixture
def stocked(namespace, hashes):
    """kvstore has the first six pages: page n is full of 100 + n."""
    for number, block_hash in enumerate(hashes[:6]):
        namespace.pages[block_hash] = page_of(100 + number)
    return namespace


def outcome(worker) -> tuple[set[str], set[int]]:
    """What an engine's step learns of loads."""
    _, received = worker.get_finished()
    return received, worker.get_block_ids_with_load_errors()


class TestLoads:
    def test_pages_come_into_their_blocks(self, worker, load, settled, stocked, kv):
        load(count=5)
        settled()
        assert outcome(worker) == ({"a"}, set())
        assert [int(kv.blocks[block_id, 0]) for block_id in range(19, 26)] == [19, 100, 101, 102, 103, 104, 25]
        assert (kv.blocks[20:25] == kv.blocks[20:25, :1]).all()
        assert outcome(worker) == (set(), set())

    def test_pages_are_counted_by_the_tier_they_came_from(self, worker, load, settled, stocked, hashes):
        stocked.on_disk.update(hashes[1:3])
        load(count=5)
        settled()
        statistics = worker.statistics()
        assert statistics.pages_loaded == {"arena": 3, "disk": 2}
        assert statistics.bytes_loaded == 5 * PAGE_BYTES
        assert statistics.load_seconds > 0

    def test_pages_that_are_gone_are_load_errors_from_the_first_one_on(
        self, worker, load, settled, stocked, hashes, kv
    ):
        del stocked.pages[hashes[3]]
        load(count=6)
        settled()
        assert outcome(worker) == ({"a"}, {23, 24, 25})
        assert kv.blocks[24, 0] == 24
        assert worker.statistics().pages_not_loaded == 3
        assert worker.statistics().load_failures == 0

    def test_requests_whose_load_failed_are_those_of_the_last_report(self, worker, load, settled, hashes):
        """Whoever never asks must not make it remember them all."""
        for request_id in "abc":
            load(request_id)
            settled()
            assert outcome(worker) == ({request_id}, {20, 21, 22})
            assert worker.get_requests_with_load_errors() == {request_id}
        worker.get_finished()
        assert worker.get_requests_with_load_errors() == set()

    @pytest.mark.parametrize("size", [1, 5])
    def test_a_node_that_comes_back_with_another_batch_size_skips_no_page(
        self, worker, load, settled, stocked, hashes, kv, size
    ):
        """Neither are pages counted that were never copied."""
        prepare = stocked.borrow

        def come_back(asked):
            pending = prepare(asked)
            stocked.batch_pages = size
            return pending

        stocked.borrow = come_back
        del stocked.pages[hashes[5]]
        load(count=6)
        settled()
        received, errors = outcome(worker)
        filled = {block_id for block_id in range(20, 26) if int(kv.blocks[block_id, 0]) >= 100}
        assert received == {"a"}
        assert errors >= set(range(20, 26)) - filled

    def test_a_prefix_of_several_batches_is_used_as_a_whole(self, worker, load, settled, stocked, hashes):
        """Batch by batch, its head would count as older than its tail."""
        load(count=stocked.batch_pages)
        load("b", count=stocked.batch_pages + 1)
        settled()
        assert stocked.touched == [tuple(hashes[: stocked.batch_pages + 1])]

    def test_copies_of_pages_that_changed_meanwhile_are_load_errors(self, worker, load, settled, stocked):
        stocked.valid = 1
        load(count=4)
        settled()
        assert outcome(worker) == ({"a"}, {21, 22, 23})

    @pytest.mark.parametrize("step", ["borrow", "scatter", "complete_load"])
    @pytest.mark.parametrize("error", [UnavailableError("gone"), DeadlineError("slow"), MemoryError()])
    def test_a_failure_at_any_step_is_a_load_error_and_nothing_else(
        self, worker, load, settled, stocked, gates, step, error
    ):
        gates[step].error = error
        load()
        settled()
        assert outcome(worker) == ({"a"}, {20, 21, 22})
        assert worker.statistics().load_failures == 1

    def test_what_came_before_the_node_died_is_kept(self, worker, load, settled, stocked, gates):
        gates["borrow"].close()
        load(count=6)
        gates["borrow"].wait_reached()
        gates["complete_load"].close()
        gates["borrow"].open()
        gates["complete_load"].wait_reached()
        gates["borrow"].error = UnavailableError("gone")
        gates["complete_load"].open()
        settled()
        assert outcome(worker) == ({"a"}, {22, 23, 24, 25})

    def test_a_dead_node_is_left_alone_for_a_while(self, worker, load, settled, stocked, gates, clock):
        gates["borrow"].error = UnavailableError("gone")
        for name in ("a", "b", "c"):
            load(name)
        settled()
        assert worker.get_finished() == (set(), {"a", "b", "c"})
        assert worker.statistics().load_failures == 1
        gates["borrow"].error = None
        clock.advance(BACKOFF)
        worker.get_block_ids_with_load_errors()
        load("d")
        settled()
        assert outcome(worker) == ({"d"}, set())

    def test_a_full_queue_is_a_load_error_at_once(self, worker, load, stocked, gates, monkeypatch):
        monkeypatch.setattr(worker._loads, "_capacity", 1)
        gates["borrow"].close()
        load("a")
        gates["borrow"].wait_reached()
        load("b")
        load("c", count=1)
        assert outcome(worker) == ({"c"}, {20})

    def test_errors_are_told_with_the_request_that_they_belong_to(self, worker, load, settled):
        load()
        settled()
        assert worker.get_block_ids_with_load_errors() == set()
        assert outcome(worker) == ({"a"}, {20, 21, 22})


class TestLoadDeadlines:
    @pytest.mark.parametrize("step", ["borrow", "complete_load"])
    def test_a_node_that_hangs_does_not_hold_the_request(self, worker, load, settled, stocked, gates, clock, kv, step):
        gates[step].close()
        load()
        gates[step].wait_reached()
        assert worker.get_finished() == NOTHING
        clock.advance(LOAD_DEADLINE)
        assert outcome(worker) == ({"a"}, {20, 21, 22})
        kv.blocks[20:23] = 77  # the engine computes them itself
        gates[step].open()
        settled()
        assert (kv.blocks[20:23] == 77).all()
        assert worker.get_finished() == NOTHING
        assert worker.statistics().loads_late == 1

    def test_blocks_are_not_reported_while_a_copy_writes_to_them(self, worker, load, settled, stocked, gates, clock):
        gates["scatter"].close()
        load()
        gates["scatter"].wait_reached()
        clock.advance(LOAD_DEADLINE * 10)
        assert worker.get_finished() == NOTHING
        gates["complete_load"].close()
        gates["scatter"].open()
        gates["complete_load"].wait_reached()
        assert outcome(worker) == ({"a"}, {20, 21, 22})

    def test_pages_that_were_confirmed_before_the_deadline_count(self, worker, load, stocked, gates, clock):
        gates["complete_load"].close()
        load(count=4)
        gates["complete_load"].wait_reached()
        gates["borrow"].close()
        gates["complete_load"].open()
        gates["borrow"].wait_reached()
        clock.advance(LOAD_DEADLINE)
        assert outcome(worker) == ({"a"}, {22, 23})

    def test_who_waits_behind_a_hanging_load_is_given_up_at_its_own_deadline(self, worker, load, stocked, gates, clock):
        gates["borrow"].close()
        load("a")
        gates["borrow"].wait_reached()
        clock.advance(LOAD_DEADLINE / 2)
        load("b", count=1)
        clock.advance(LOAD_DEADLINE / 2)
        assert worker.get_finished() == (set(), {"a"})
        clock.advance(LOAD_DEADLINE / 2)
        assert worker.get_finished() == (set(), {"b"})


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
        monkeypatch.setattr(worker._stores, "_capacity", 1)
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
        assert [transfer.plan.request_id for transfer in worker._stores._queued] == ["a", "b"]
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


class TestGroups:
    """Two groups: pages of 64 bytes and of 48, each in a namespace of its own, block ids unique over both."""

    @pytest.fixture
    def worker(self, namespace, window_namespace, kv, window_kv, clock, gates) -> Iterator[WorkerConnector]:
        worker = WorkerConnector([namespace, window_namespace], [kv, window_kv], clock=clock)
        yield worker
        for gate in (*gates.values(), window_namespace.borrow_gate, window_namespace.prepare_store_gate):
            gate.open()
        worker.shutdown()
        assert namespace.held == window_namespace.held == 0

    @pytest.fixture
    def stocked(self, stocked, window_namespace, window_hashes):
        """Of the second group kvstore has what a window reaches: pages 2 to 4, page n full of 200 + n."""
        for number in (2, 3, 4):
            window_namespace.pages[window_hashes[number]] = np.full(48, 200 + number, np.uint8)
        return stocked

    @pytest.fixture
    def load(self, worker, hashes, window_hashes):
        """Begins a load of three pages into blocks 20 to 22, and of a window's last three into 26 to 28."""

        def run(request_id="a"):
            head = LoadPlan(request_id, tuple(hashes[:3]), (20, 21, 22))
            window = LoadPlan(request_id, tuple(window_hashes[2:5]), (26, 27, 28), 1)
            worker.start_load_kv(StepPlan(loads=(head, window)))

        return run

    def test_pages_come_into_their_groups_blocks(self, worker, load, settled, stocked, kv, window_kv):
        load()
        settled()
        assert outcome(worker) == ({"a"}, set())
        assert [int(kv.blocks[block_id, 0]) for block_id in range(19, 29)] == [
            *(19, 100, 101, 102, 23, 24, 25, 26, 27, 28)
        ]
        assert [int(window_kv.blocks[block_id, 0]) for block_id in range(20, 30)] == [
            *(20, 21, 22, 23, 24, 25, 202, 203, 204, 29)
        ]
        assert worker.statistics().pages_loaded == {"arena": 6}
        assert worker.statistics().bytes_loaded == 3 * 64 + 3 * 48

    def test_the_request_is_reported_when_all_its_groups_are_there(
        self, worker, load, settled, stocked, window_namespace, window_hashes
    ):
        del window_namespace.pages[window_hashes[3]]
        window_namespace.borrow_gate.close()
        load()
        window_namespace.borrow_gate.wait_reached()
        assert worker.get_finished() == NOTHING
        window_namespace.borrow_gate.open()
        settled()
        assert outcome(worker) == ({"a"}, {27, 28})
        assert worker.get_finished() == NOTHING

    def test_errors_of_a_group_are_told_when_the_others_are_over(
        self, worker, load, settled, stocked, hashes, window_namespace
    ):
        del stocked.pages[hashes[1]]
        window_namespace.borrow_gate.close()
        load()
        window_namespace.borrow_gate.wait_reached()
        assert outcome(worker) == (set(), set())
        window_namespace.borrow_gate.open()
        settled()
        assert outcome(worker) == ({"a"}, {21, 22})
        assert worker.statistics().pages_not_loaded == 2

    def test_a_deadline_ends_all_groups_of_the_request(self, worker, load, stocked, gates, clock):
        gates["borrow"].close()
        load()
        gates["borrow"].wait_reached()
        clock.advance(LOAD_DEADLINE)
        assert outcome(worker) == ({"a"}, {20, 21, 22, 26, 27, 28})

    def test_a_dead_node_fails_all_groups_with_one_call(self, worker, load, settled, stocked, gates):
        gates["borrow"].error = UnavailableError("gone")
        load()
        settled()
        assert outcome(worker) == ({"a"}, {20, 21, 22, 26, 27, 28})
        assert worker.statistics().load_failures == 1

    def test_a_request_that_loads_again_is_reported_again(self, worker, load, settled, stocked):
        for _ in range(2):
            load()
            settled()
            assert outcome(worker) == ({"a"}, set())
        assert not worker._loads_under_way
        assert not worker._not_loaded

    def test_blocks_become_pages_of_their_group(
        self, worker, settled, namespace, window_namespace, hashes, window_hashes
    ):
        head = StorePlan("a", tuple(hashes[:2]), (1, 2))
        window = StorePlan("a", tuple(window_hashes[1:2]), (7,), 1)
        worker.start_save_kv(StepPlan(stores=(head, window), finished=("a",)))
        settled()
        assert worker.get_finished() == ({"a"}, set())
        assert {key: page.tolist() for key, page in namespace.pages.items()} == {
            hashes[0]: [1] * 64,
            hashes[1]: [2] * 64,
        }
        assert {key: page.tolist() for key, page in window_namespace.pages.items()} == {window_hashes[1]: [7] * 48}
        assert worker.statistics().bytes_stored == 2 * 64 + 48

    def test_a_finished_request_is_reported_when_the_stores_of_all_groups_are_over(
        self, worker, settled, hashes, window_hashes, window_namespace
    ):
        window_namespace.prepare_store_gate.close()
        head = StorePlan("a", tuple(hashes[:2]), (1, 2))
        window = StorePlan("a", tuple(window_hashes[1:2]), (7,), 1)
        worker.start_save_kv(StepPlan(stores=(head, window), finished=("a",)))
        window_namespace.prepare_store_gate.wait_reached()
        assert worker.get_finished() == NOTHING
        window_namespace.prepare_store_gate.open()
        settled()
        assert worker.get_finished() == ({"a"}, set())

    def test_each_groups_pages_have_to_fit_its_layout(self, namespace, window_namespace, kv, window_kv):
        with pytest.raises(InvalidRequestError, match="group 0: the engine's pages have 48 bytes, the layout says 64"):
            WorkerConnector([namespace, window_namespace], [window_kv, kv])
        with pytest.raises(InvalidRequestError, match="group 1: the engine's pages have 64 bytes, the layout says 48"):
            WorkerConnector([namespace, window_namespace], [kv, kv])
        with pytest.raises(InvalidRequestError, match="2 namespaces for the pages of 1 groups"):
            WorkerConnector([namespace, window_namespace], [kv])


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
        assert worker._stores._live() == []

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
