"""What the scheduler half plans to load and store, with a client that answers when a test lets it."""

from collections.abc import Iterator

import pytest

from kvstore.connector import lookups
from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.connector.scheduler import HOLD, PartialBlock, SchedulerConnector
from kvstore.errors import InvalidRequestError, UnavailableError

MISS = (0, False)
LATER = (None, False)


class TestLoads:
    def test_what_was_offered_and_allocated_is_planned(self, client, answer, connector, hashes):
        client.pages.update(hashes[:5])
        assert answer(num_computed_tokens=8) == (12, True)
        connector.update_state_after_alloc("a", {0: [(2, 7), (3, 8), (4, 9)]})
        assert connector.build_connector_meta() == StepPlan(loads=(LoadPlan("a", tuple(hashes[2:5]), (7, 8, 9)),))
        assert not connector.build_connector_meta()

    def test_the_worker_is_told_which_loads_may_take_long(self, client, answer, connector, namespace, hashes):
        client.pages.update(hashes)
        namespace.on_disk.add(hashes[2])
        for request_id, count in (("fast", 2), ("slow", 3)):
            answer(request_id)
            connector.update_state_after_alloc(request_id, {0: [(index, 1 + index) for index in range(count)]})
        assert [load.lower_tier for load in connector.build_connector_meta().loads] == [False, True]

    def test_the_engine_may_take_less_than_was_offered(self, client, answer, connector, hashes):
        client.pages.update(hashes[:5])
        answer()
        connector.update_state_after_alloc("a", {0: [(0, 7)]})
        assert connector.build_connector_meta().loads == (LoadPlan("a", (hashes[0],), (7,)),)

    def test_allocating_without_a_load_plans_nothing(self, client, answer, connector, hashes):
        client.pages.update(hashes)
        answer()
        connector.update_state_after_alloc("a", {})
        assert not connector.build_connector_meta()

    def test_being_told_twice_plans_once(self, client, answer, connector, hashes):
        client.pages.update(hashes[:2])
        answer()
        connector.update_state_after_alloc("a", {0: [(0, 1), (1, 2)]})
        connector.update_connector_output(set(), {"a"})
        connector.update_state_after_alloc("a", {})
        assert len(connector.build_connector_meta().loads) == 1

    def test_a_request_whose_load_failed_is_not_offered_the_same_again(self, client, answer, connector, hashes):
        client.pages.update(hashes)
        answer()
        connector.update_state_after_alloc("a", {0: [(0, 1), (1, 2)]})
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"}, {1, 2})
        assert answer() == MISS

    @pytest.mark.parametrize("index", [2, 44, -1])
    def test_what_was_not_offered_is_refused(self, client, answer, connector, hashes, index):
        client.pages.update([*hashes[:2], hashes[3]])
        answer()
        with pytest.raises(InvalidRequestError, match=f"block {index} of group 0 is to be loaded and was not offered"):
            connector.update_state_after_alloc("a", {0: [(0, 1), (index, 2)]})
        assert not connector.build_connector_meta()

    def test_nothing_is_offered_without_an_answer(self, client, ask, connector, hashes):
        with pytest.raises(InvalidRequestError, match="request a: block 0 of group 0 is to be loaded"):
            connector.update_state_after_alloc("a", {0: [(0, 1)]})
        client.gate.close()
        ask()
        with pytest.raises(InvalidRequestError, match="request a: block 0 of group 0 is to be loaded"):
            connector.update_state_after_alloc("a", {0: [(0, 1)]})


class TestStores:
    def test_full_blocks_are_stored_once_as_they_come(self, connector, hashes):
        connector.save_blocks("a", 0, hashes[:2], [4, 5])
        assert connector.build_connector_meta().stores == (StorePlan("a", tuple(hashes[:2]), (4, 5)),)
        connector.save_blocks("a", 0, hashes[:2], [4, 5])
        assert not connector.build_connector_meta()
        connector.save_blocks("a", 0, hashes[:3], [4, 5, 6])
        assert connector.build_connector_meta().stores == (StorePlan("a", (hashes[2],), (6,), parent=hashes[1]),)

    def test_calls_of_one_step_make_one_plan(self, connector, hashes):
        connector.save_blocks("a", 0, hashes[:1], [4])
        connector.save_blocks("a", 0, hashes[:2], [4, 5])
        assert connector.build_connector_meta().stores == (StorePlan("a", tuple(hashes[:2]), (4, 5)),)

    def test_what_kvstore_has_is_not_stored_again(self, client, answer, connector, hashes):
        client.pages.update([hashes[0], hashes[2], hashes[3]])
        assert answer(num_computed_tokens=8) == (8, True)
        connector.update_state_after_alloc("a", {0: [(2, 3), (3, 4)]})
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"})
        connector.save_blocks("a", 0, hashes[:5], [1, 2, 3, 4, 5])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", (hashes[1], hashes[4]), (2, 5), parent=hashes[0]),
        )

    def test_what_failed_to_load_is_stored_again_when_it_was_computed(self, client, answer, connector, hashes):
        client.pages.update(hashes[:3])
        answer()
        connector.update_state_after_alloc("a", {0: [(0, 1), (1, 2), (2, 3)]})
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"}, {2, 3})
        connector.save_blocks("a", 0, hashes[:4], [1, 2, 3, 4])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", tuple(hashes[1:4]), (2, 3, 4), parent=hashes[0]),
        )

    def test_a_block_that_is_full_keeps_its_own_name_where_a_ticket_has_another(self, connector, hashes):
        def partial(group: int, block_id: int, parent: bytes) -> PartialBlock:
            return PartialBlock(group, b"p" * 32, block_id, parent)

        connector.save_blocks("a", 0, hashes[:2], [4, 5])
        assert not connector.save_partials("a", [partial(1, 7, b""), partial(0, 5, hashes[0])])
        assert connector.build_connector_meta().stores == (StorePlan("a", tuple(hashes[:2]), (4, 5)),)
        assert connector.save_partials("a", [partial(0, 6, hashes[1])])
        assert connector.build_connector_meta().stores == (StorePlan("a", (b"p" * 32,), (6,), parent=hashes[1]),)

    def test_hashes_and_blocks_have_to_match(self, connector, hashes):
        with pytest.raises(InvalidRequestError, match="request a: 2 hashes for 1 blocks"):
            connector.save_blocks("a", 0, hashes[:2], [1])


class TestEndings:
    def test_an_engine_without_free_blocks_does_not_wait_for_a_store_that_hangs(self, connector, clock, hashes):
        connector.save_blocks("a", 0, hashes[:1], [4])
        assert connector.request_finished("a")
        connector.build_connector_meta()
        assert connector.has_pending_block_frees()
        assert connector.build_connector_meta() == StepPlan()
        clock.advance(HOLD)
        assert not connector.build_connector_meta().preempted  # nobody needs its blocks
        assert connector.has_pending_block_frees()  # they come with the next step
        assert connector.build_connector_meta() == StepPlan(preempted=("a",))
        clock.advance(HOLD)
        assert not connector.has_pending_block_frees()  # and if they do not, it goes on without them

    def test_blocks_are_held_until_their_stores_are_over(self, connector, hashes):
        connector.save_blocks("a", 0, hashes[:1], [4])
        assert connector.request_finished("a")
        plan = connector.build_connector_meta()
        assert plan == StepPlan(stores=(StorePlan("a", (hashes[0],), (4,)),), finished=("a",))
        assert connector.has_pending_block_frees()
        connector.update_connector_output({"a"}, set())
        assert not connector.has_pending_block_frees()
        assert not connector.request_finished("a")

    def test_a_request_that_stored_nothing_holds_nothing(self, client, answer, connector, hashes):
        client.pages.update(hashes)
        answer()
        connector.update_state_after_alloc("a", {0: [(0, 1)]})
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"})
        assert not connector.request_finished("a")
        assert not connector.build_connector_meta()

    def test_a_preempted_request_gives_its_stores_up_and_starts_over(self, client, answer, connector, hashes):
        connector.save_blocks("a", 0, hashes[:1], [4])
        connector.build_connector_meta()
        connector.save_blocks("a", 0, hashes[:2], [4, 5])
        connector.request_preempted("a")
        assert connector.build_connector_meta() == StepPlan(preempted=("a",))
        client.pages.update(hashes[:1])
        assert answer() == (4, True)
        connector.update_state_after_alloc("a", {0: [(0, 9)]})
        connector.update_connector_output(set(), {"a"})
        connector.save_blocks("a", 0, hashes[:2], [9, 10])
        assert connector.build_connector_meta().stores == (StorePlan("a", (hashes[1],), (10,), parent=hashes[0]),)

    def test_a_preempted_request_without_stores_needs_no_word_to_the_worker(self, connector):
        connector.request_preempted("a")
        assert not connector.build_connector_meta()

    @pytest.mark.parametrize("moment", ["asked", "answered", "allocated", "planned", "loaded"])
    def test_an_abort_at_any_moment_leaves_nothing_behind(self, client, ask, settled, connector, hashes, moment):
        client.pages.update(hashes)
        if moment == "asked":
            client.gate.close()
        ask()
        if moment != "asked":
            settled()
            assert ask() == (44, True)
        if moment in ("allocated", "planned", "loaded"):
            connector.update_state_after_alloc("a", {0: [(0, 1)]})
        if moment in ("planned", "loaded"):
            connector.build_connector_meta()
        if moment == "loaded":
            connector.update_connector_output(set(), {"a"})
        assert not connector.request_finished("a")
        client.gate.open()
        settled()
        if moment == "allocated":  # the engine waits for the blocks: the load has to be carried out
            assert len(connector.build_connector_meta().loads) == 1
        connector.update_connector_output(set(), {"a"})
        assert not connector._transfers
        assert not connector._lookups._answers
        assert not connector._lookups._queue
        assert not connector.build_connector_meta()

    def test_a_request_that_is_over_before_its_turn_is_not_asked_for(self, client, ask, settled, connector):
        client.gate.close()
        ask("a")
        client.gate.wait_reached()
        ask("b")
        connector.request_finished("b")
        client.gate.open()
        settled()
        assert len(client.calls) == 1

    def test_a_failure_of_an_earlier_life_does_not_touch_the_later_one(
        self, client, ask, settled, connector, hashes, monkeypatch
    ):
        client.pages.update(hashes)
        client.gate.close()
        ask("a")
        client.gate.wait_reached()
        connector.request_preempted("a")
        assert ask("a") == LATER
        client.gate.error = UnavailableError("gone")
        lookup = client.lookup

        def lookup_when_back(queries, *, counts):
            client.gate.error = None
            return lookup(queries, counts=counts)

        monkeypatch.setattr(client, "lookup", lookup_when_back)
        client.gate.open()
        settled()
        assert len(client.calls) == 2
        assert ask("a") == (44, True)

    def test_requests_that_are_asked_for_and_forgotten_do_not_pile_up(self, client, ask, connector, monkeypatch):
        monkeypatch.setattr(lookups, "REMEMBERED", 8)
        client.gate.close()
        for number in range(50):
            ask(str(number))
        assert len(connector._lookups._answers) == 8
        assert len(connector._lookups._queue) <= 8


class TestSavingWhatComesAgain:
    @pytest.fixture
    def connector(self, client, namespace, clock) -> Iterator[SchedulerConnector]:
        connector = SchedulerConnector(client, [namespace], store_threshold=2, clock=clock)
        yield connector
        client.gate.open()
        connector.shutdown()

    def test_a_page_is_stored_for_the_second_request_that_has_it(self, connector, hashes):
        connector.save_blocks("a", 0, hashes[:3], [1, 2, 3])
        assert not connector.build_connector_meta().stores
        connector.save_blocks("b", 0, [*hashes[:2], hashes[7]], [1, 2, 4])
        assert connector.build_connector_meta().stores == (StorePlan("b", tuple(hashes[:2]), (1, 2)),)

    def test_a_request_counts_once_however_often_it_is_told(self, connector, hashes):
        for blocks in (1, 2, 3):
            connector.save_blocks("a", 0, hashes[:blocks], [1, 2, 3][:blocks])
        assert not connector.build_connector_meta().stores
