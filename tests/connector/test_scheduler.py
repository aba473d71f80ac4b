"""The scheduler half, with a client that answers when a test lets it. Blocks hold 4 tokens."""

from collections.abc import Iterator

import pytest

from connector import lookups
from connector.health import BACKOFF
from connector.lookups import LookupStatistics
from connector.plan import LoadPlan, StepPlan, StorePlan
from connector.scheduler import LOOKUP_BUDGET, SchedulerConnector
from kvstore.errors import InvalidRequestError, UnavailableError

MISS = (0, False)
LATER = (None, False)
TOKENS = 47  # eleven full blocks and some


@pytest.fixture
def connector(client, namespace, clock) -> Iterator[SchedulerConnector]:
    connector = SchedulerConnector(client, namespace, clock=clock)
    yield connector
    client.gate.open()
    connector.shutdown()


@pytest.fixture
def ask(connector, hashes):
    """Asks for a request's tokens beyond those computed, as the engine's scheduler does."""

    def run(request_id="a", *, num_tokens=TOKENS, num_computed_tokens=0, block_hashes=None):
        return connector.get_num_new_matched_tokens(
            request_id, hashes if block_hashes is None else block_hashes, num_tokens, num_computed_tokens
        )

    return run


@pytest.fixture
def settled(connector):
    """Waits until the lookup thread has nothing to do."""

    def run():
        state = connector._lookups
        with state._changed:
            assert state._changed.wait_for(lambda: not state._queue and state._call_started is None, 20)

    return run


@pytest.fixture
def answer(ask, settled):
    """Asks until there is an answer."""

    def run(request_id="a", **arguments):
        first = ask(request_id, **arguments)
        settled()
        return first if first != LATER else ask(request_id, **arguments)

    return run


class TestMatching:
    def test_the_first_ask_is_answered_later_and_never_waits(self, client, ask, settled, hashes):
        client.pages.update(hashes[:3])
        client.gate.close()
        assert ask() == LATER
        client.gate.wait_reached()
        assert ask() == LATER
        client.gate.open()
        settled()
        assert ask() == (12, True)
        assert len(client.calls) == 1

    def test_tokens_that_the_engine_has_itself_do_not_count(self, client, answer, hashes):
        client.pages.update(hashes[:5])
        assert answer(num_computed_tokens=8) == (12, True)
        assert answer(num_computed_tokens=20) == MISS

    def test_pages_behind_a_gap_of_the_engines_own_blocks_count(self, client, answer, hashes):
        client.pages.update(hashes[2:4])
        assert answer(num_computed_tokens=8) == (8, True)
        assert answer(num_computed_tokens=0) == MISS

    def test_at_least_one_token_is_left_to_compute(self, client, answer, hashes):
        client.pages.update(hashes)
        assert answer(num_tokens=8, block_hashes=hashes[:2]) == (4, True)
        assert answer("b", num_tokens=9, block_hashes=hashes[:2]) == (8, True)

    @pytest.mark.parametrize("arguments", [{"num_tokens": 4}, {"num_computed_tokens": 44}, {"num_computed_tokens": 3}])
    def test_nothing_is_asked_where_no_block_could_be_loaded(self, client, ask, arguments):
        assert ask(**arguments) == MISS
        assert client.calls == []

    def test_a_hit_is_kept_for_as_long_as_the_request_waits_for_room(self, client, answer, clock, hashes):
        client.pages.update(hashes)
        assert answer() == (44, True)
        clock.advance(3600)
        assert answer() == (44, True)
        assert len(client.calls) == 1

    def test_waiting_requests_share_a_call(self, client, ask, settled, hashes):
        client.gate.close()
        ask("first")
        client.gate.wait_reached()
        for name in ("b", "c", "d"):
            ask(name)
        client.gate.open()
        settled()
        assert [len(call) for call in client.calls] == [1, 3]

    def test_a_call_names_a_bounded_number_of_hashes(self, client, ask, settled, hashes, monkeypatch):
        monkeypatch.setattr(lookups, "HASHES_A_CALL", 15)
        client.gate.close()
        ask("first")
        client.gate.wait_reached()
        for name in ("b", "c"):
            ask(name)  # eleven hashes each
        client.gate.open()
        settled()
        assert [len(call) for call in client.calls] == [1, 1, 1]


class TestBudget:
    def test_silence_is_a_miss_when_the_budget_is_over(self, client, clock, ask, connector):
        client.gate.close()
        assert ask() == LATER
        clock.advance(LOOKUP_BUDGET * 0.9)
        assert ask() == LATER
        clock.advance(LOOKUP_BUDGET * 0.2)
        assert ask() == MISS
        assert ask() == MISS
        assert connector.statistics() == LookupStatistics(asked=1, late=1)

    def test_an_answer_that_comes_late_counts_if_the_engine_asks_once_more(self, client, clock, ask, settled, hashes):
        client.pages.update(hashes)
        client.gate.close()
        ask()
        clock.advance(LOOKUP_BUDGET * 1.1)
        assert ask() == MISS
        client.gate.open()
        settled()
        assert ask() == (44, True)

    def test_others_do_not_wait_behind_a_call_that_hangs(self, client, clock, ask, connector):
        client.gate.close()
        ask("a")
        client.gate.wait_reached()
        clock.advance(LOOKUP_BUDGET * 1.1)
        assert ask("b") == MISS
        assert connector.statistics().skipped == 1
        assert len(client.calls) == 1

    def test_a_full_queue_is_a_miss(self, client, ask, connector, monkeypatch):
        monkeypatch.setattr(lookups, "QUEUED_LOOKUPS", 2)
        client.gate.close()
        ask("a")
        client.gate.wait_reached()
        assert [ask(name) for name in ("b", "c", "d")] == [LATER, LATER, MISS]


class TestMisses:
    def test_a_miss_is_remembered_for_others_with_the_same_prefix(self, client, answer, clock, connector, hashes):
        assert answer("a") == MISS
        client.pages.update(hashes)
        assert answer("a") == MISS
        assert answer("b") == MISS
        assert len(client.calls) == 1
        assert connector.statistics().remembered == 1
        clock.advance(lookups.MISS_TTL)
        assert answer("b") == (44, True)
        assert answer("a") == (44, True)

    def test_what_this_engine_stores_itself_is_missed_no_longer(self, client, answer, connector, hashes):
        assert answer("a") == MISS
        connector.save_blocks("a", hashes[:3], [1, 2, 3])
        client.pages.update(hashes[:3])
        assert answer("b") == (12, True)

    def test_a_miss_behind_the_engines_own_blocks_is_a_miss_there_only(self, client, answer, hashes):
        client.pages.update(hashes[:2])
        assert answer("a", num_computed_tokens=8) == MISS
        assert answer("b", num_computed_tokens=4) == (4, True)

    def test_misses_are_bounded(self, client, answer, connector, hashes, monkeypatch):
        monkeypatch.setattr(lookups, "REMEMBERED", 4)
        for number in range(10):
            answer(str(number), block_hashes=[bytes([number]) * 32, *hashes[1:]])
        assert len(connector._lookups._misses) == 4


class TestFailures:
    @pytest.mark.parametrize("error", [UnavailableError("gone"), ValueError("a bug in the client")])
    def test_any_error_of_the_client_is_a_miss(self, client, answer, connector, error):
        client.gate.error = error
        assert answer() == MISS
        assert connector.statistics().failed == 1

    def test_a_dead_node_is_asked_once_in_a_while_not_for_each_request(self, client, answer, clock, connector, hashes):
        client.gate.error = UnavailableError("gone")
        for name in ("a", "b", "c"):
            assert answer(name) == MISS
        assert len(client.calls) == 1
        clock.advance(BACKOFF)
        answer("d")
        assert len(client.calls) == 2
        assert connector.statistics().failed == 2

    def test_a_node_that_comes_back_is_used_again_without_a_restart(self, client, answer, clock, hashes):
        client.pages.update(hashes)
        client.gate.error = UnavailableError("gone")
        assert answer("a") == MISS
        client.gate.error = None
        clock.advance(BACKOFF)
        assert answer("a") == (44, True)

    def test_an_answer_that_does_not_fit_the_question_is_a_failure(self, client, answer, connector, monkeypatch):
        monkeypatch.setattr(client, "lookup", lambda queries: [])
        assert answer() == MISS
        assert connector.statistics().failed == 1

    def test_after_shutdown_everything_is_a_miss(self, client, ask, connector):
        client.gate.close()
        assert ask("a") == LATER
        client.gate.wait_reached()
        client.gate.open()
        connector.shutdown()
        connector.shutdown()
        assert ask("b") == MISS


class TestLoads:
    def test_what_was_offered_and_allocated_is_planned(self, client, answer, connector, hashes):
        client.pages.update(hashes[:5])
        assert answer(num_computed_tokens=8) == (12, True)
        connector.update_state_after_alloc("a", [7, 8, 9], 12)
        assert connector.build_connector_meta() == StepPlan(loads=(LoadPlan("a", tuple(hashes[2:5]), (7, 8, 9)),))
        assert not connector.build_connector_meta()

    def test_the_engine_may_take_less_than_was_offered(self, client, answer, connector, hashes):
        client.pages.update(hashes[:5])
        answer()
        connector.update_state_after_alloc("a", [7], 4)
        assert connector.build_connector_meta().loads == (LoadPlan("a", (hashes[0],), (7,)),)

    def test_allocating_without_a_load_plans_nothing(self, client, answer, connector, hashes):
        client.pages.update(hashes)
        answer()
        connector.update_state_after_alloc("a", [], 0)
        assert not connector.build_connector_meta()

    def test_being_told_twice_plans_once(self, client, answer, connector, hashes):
        client.pages.update(hashes[:2])
        answer()
        connector.update_state_after_alloc("a", [1, 2], 8)
        connector.update_connector_output(set(), {"a"})
        connector.update_state_after_alloc("a", [], 0)
        assert len(connector.build_connector_meta().loads) == 1

    def test_a_request_whose_load_failed_is_not_offered_the_same_again(self, client, answer, connector, hashes):
        client.pages.update(hashes)
        answer()
        connector.update_state_after_alloc("a", [1, 2], 8)
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"}, {1, 2})
        assert answer() == MISS

    def test_what_does_not_fit_the_offer_is_refused(self, client, answer, connector, hashes):
        client.pages.update(hashes[:2])
        answer()
        with pytest.raises(InvalidRequestError, match="8 tokens do not fill 1 blocks of 4"):
            connector.update_state_after_alloc("a", [1], 8)
        with pytest.raises(InvalidRequestError, match="12 tokens to load, 8 were offered"):
            connector.update_state_after_alloc("a", [1, 2, 3], 12)
        with pytest.raises(InvalidRequestError, match="4 tokens to load, 0 were offered"):
            connector.update_state_after_alloc("never asked", [1], 4)


class TestStores:
    def test_full_blocks_are_stored_once_as_they_come(self, connector, hashes):
        connector.save_blocks("a", hashes[:2], [4, 5])
        assert connector.build_connector_meta().stores == (StorePlan("a", tuple(hashes[:2]), (4, 5)),)
        connector.save_blocks("a", hashes[:2], [4, 5])
        assert not connector.build_connector_meta()
        connector.save_blocks("a", hashes[:3], [4, 5, 6])
        assert connector.build_connector_meta().stores == (StorePlan("a", (hashes[2],), (6,)),)

    def test_calls_of_one_step_make_one_plan(self, connector, hashes):
        connector.save_blocks("a", hashes[:1], [4])
        connector.save_blocks("a", hashes[:2], [4, 5])
        assert connector.build_connector_meta().stores == (StorePlan("a", tuple(hashes[:2]), (4, 5)),)

    def test_what_kvstore_has_is_not_stored_again(self, client, answer, connector, hashes):
        client.pages.update([hashes[0], hashes[2], hashes[3]])
        assert answer(num_computed_tokens=8) == (8, True)
        connector.update_state_after_alloc("a", [3, 4], 8)
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"})
        connector.save_blocks("a", hashes[:5], [1, 2, 3, 4, 5])
        assert connector.build_connector_meta().stores == (StorePlan("a", (hashes[1], hashes[4]), (2, 5)),)

    def test_what_failed_to_load_is_stored_again_when_it_was_computed(self, client, answer, connector, hashes):
        client.pages.update(hashes[:3])
        answer()
        connector.update_state_after_alloc("a", [1, 2, 3], 12)
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"}, {2, 3})
        connector.save_blocks("a", hashes[:4], [1, 2, 3, 4])
        assert connector.build_connector_meta().stores == (StorePlan("a", tuple(hashes[1:4]), (2, 3, 4)),)

    def test_hashes_and_blocks_have_to_match(self, connector, hashes):
        with pytest.raises(InvalidRequestError, match="request a: 2 hashes for 1 blocks"):
            connector.save_blocks("a", hashes[:2], [1])


class TestEndings:
    def test_blocks_are_held_until_their_stores_are_over(self, connector, hashes):
        connector.save_blocks("a", hashes[:1], [4])
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
        connector.update_state_after_alloc("a", [1], 4)
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"})
        assert not connector.request_finished("a")
        assert not connector.build_connector_meta()

    def test_a_preempted_request_gives_its_stores_up_and_starts_over(self, client, answer, connector, hashes):
        connector.save_blocks("a", hashes[:1], [4])
        connector.build_connector_meta()
        connector.save_blocks("a", hashes[:2], [4, 5])
        connector.request_preempted("a")
        assert connector.build_connector_meta() == StepPlan(preempted=("a",))
        client.pages.update(hashes[:1])
        assert answer() == (4, True)
        connector.update_state_after_alloc("a", [9], 4)
        connector.update_connector_output(set(), {"a"})
        connector.save_blocks("a", hashes[:2], [9, 10])
        assert connector.build_connector_meta().stores == (StorePlan("a", (hashes[1],), (10,)),)

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
            connector.update_state_after_alloc("a", [1], 4)
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

        def lookup_when_back(queries):
            client.gate.error = None
            return lookup(queries)

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
