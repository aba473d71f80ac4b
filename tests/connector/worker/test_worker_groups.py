"""The worker half of a model with several cache groups."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from worker_pages import NOTHING, outcome

from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.connector.worker import LOAD_DEADLINE, WorkerConnector
from kvstore.errors import InvalidRequestError, UnavailableError


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
