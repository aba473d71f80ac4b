"""The worker half's loads against a kvstore that fails at each of their steps."""

from __future__ import annotations

import threading

import pytest
from worker_pages import NOTHING, PAGE_BYTES, outcome

from kvstore.connector.health import BACKOFF
from kvstore.connector.plan import LoadPlan, StepPlan
from kvstore.connector.worker import LOAD_DEADLINE
from kvstore.errors import DeadlineError, UnavailableError


class TestLoads:
    def test_pages_come_into_their_blocks(self, worker, load, settled, stocked, kv):
        load(count=5)
        settled()
        assert outcome(worker) == ({"a"}, set())
        assert [int(kv.blocks[block_id, 0]) for block_id in range(19, 26)] == [19, 100, 101, 102, 103, 104, 25]
        assert (kv.blocks[20:25] == kv.blocks[20:25, :1]).all()
        assert outcome(worker) == (set(), set())

    def test_the_mark_is_made_in_the_thread_that_begins_the_copies(self, worker, load, store, settled, stocked, kv):
        load(count=1)
        settled()
        store("b", count=1)
        settled()
        here = threading.get_ident()
        assert [name for name, _ in kv.calls] == ["mark", "scatter", "mark", "gather"]
        assert [thread == here for _, thread in kv.calls] == [True, False, True, False]

    def test_nothing_is_borrowed_before_the_engine_has_computed_what_it_had_queued(
        self, worker, load, settled, stocked, kv
    ):
        """Borrowed pages would keep the node from storing for as long as a step takes."""
        kv.computed.close()
        load()
        kv.computed.wait_reached()
        assert stocked.held == 0
        assert not stocked.borrow_gate.reached

        kv.computed.open()
        settled()
        assert outcome(worker) == ({"a"}, set())
        assert stocked.borrow_gate.reached

    def test_a_device_that_is_late_is_not_waited_for(self, worker, load, settled, stocked, kv, clock):
        kv.computed.close()
        load()
        kv.computed.wait_reached()
        clock.advance(LOAD_DEADLINE)

        assert outcome(worker) == ({"a"}, {20, 21, 22})

        kv.computed.open()
        settled()
        assert not stocked.borrow_gate.reached
        assert [name for name, _ in kv.calls] == ["mark"]

    def test_pages_are_counted_by_the_tier_they_came_from(self, worker, load, settled, stocked, hashes):
        stocked.on_disk.update(hashes[1:3])
        load(count=5)
        settled()
        statistics = worker.statistics()
        assert statistics.pages_loaded == {"arena": 3, "disk": 2}
        assert statistics.bytes_loaded == 5 * PAGE_BYTES
        assert statistics.load_seconds > 0

    def test_what_is_in_the_arena_does_not_wait_behind_what_is_not(
        self, worker, settled, stocked, hashes, gates, eventually, monkeypatch
    ):
        borrow = stocked.borrow
        disk = gates["gather"]  # nothing is stored here
        disk.close()

        def borrow_slowly(asked, *, counts):
            if asked[0] == hashes[0]:
                disk.go_through()
            return borrow(asked, counts=counts)

        monkeypatch.setattr(stocked, "borrow", borrow_slowly)
        from_disk = LoadPlan("slow", tuple(hashes[:1]), (20,), lower_tier=True)
        from_arena = LoadPlan("fast", tuple(hashes[1:2]), (21,))
        worker.start_load_kv(StepPlan(loads=(from_disk, from_arena)))
        disk.wait_reached()
        received = set()
        eventually(lambda: received.update(worker.get_finished()[1]) or received)
        assert received == {"fast"}
        disk.error = DeadlineError("slow disk")
        disk.open()
        settled()
        assert outcome(worker) == ({"slow"}, {20})
        worker.start_load_kv(StepPlan(loads=(from_arena,)))  # nor is it given up because the disk failed
        settled()
        assert outcome(worker) == ({"fast"}, set())

    def test_what_is_in_the_arena_is_copied_before_what_is_on_disk(
        self, worker, load, settled, stocked, hashes, gates, kv, monkeypatch
    ):
        borrow = stocked.borrow
        disk = gates["gather"]  # nothing is stored here
        disk.close()
        stocked.on_disk.update(hashes[3:5])

        def borrow_what_is_here(asked, *, counts):
            on_disk = [block_hash in stocked.on_disk for block_hash in asked]
            if on_disk[0]:
                disk.go_through()
            elif True in on_disk:
                lent = borrow(asked[: on_disk.index(True)], counts=counts)
                lent.more = True
                return lent
            return borrow(asked, counts=counts)

        monkeypatch.setattr(stocked, "borrow", borrow_what_is_here)
        load(count=6)
        disk.wait_reached()
        assert kv.blocks[20:24, 0].tolist() == [100, 101, 102, 23]
        disk.open()
        settled()
        assert outcome(worker) == ({"a"}, set())
        assert kv.blocks[20:26, 0].tolist() == [100, 101, 102, 103, 104, 105]
        assert worker.statistics().pages_loaded == {"arena": 4, "disk": 2}

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
        monkeypatch.setattr(worker._loads._table, "_capacity", 1)
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
