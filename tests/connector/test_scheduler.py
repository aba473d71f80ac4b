"""The scheduler half, with a client that answers when a test lets it. Blocks hold 4 tokens."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest

from connector import lookups
from connector.health import BACKOFF
from connector.lookups import LookupStatistics
from connector.plan import LoadPlan, StepPlan, StorePlan
from connector.scheduler import LOOKUP_BUDGET, SchedulerConnector
from kvstore.doctor.prompt import read_prompt
from kvstore.errors import InvalidRequestError, UnavailableError
from kvstore.layout import Layout

MISS = (0, False)
LATER = (None, False)
TOKENS = 47  # eleven full blocks and some


@pytest.fixture
def connector(client, namespace, clock) -> Iterator[SchedulerConnector]:
    connector = SchedulerConnector(client, [namespace], clock=clock)
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
    def test_what_is_asked_for_is_in_the_log_as_the_doctor_reads_it(self, client, answer, hashes, caplog, tmp_path):
        with caplog.at_level("DEBUG", "kvstore.connector"):
            answer("r1")
            answer("r1")
        [line] = [record.getMessage() for record in caplog.records if "asks for" in record.getMessage()]
        file = tmp_path / "asked.json"
        file.write_text(line.partition("asks for ")[2])
        prompt = read_prompt(file)
        assert prompt.given_hashes == tuple(hashes[:11])
        assert prompt.layout is not None

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

    @pytest.mark.parametrize(
        "arguments", [{"num_tokens": 4}, {"num_tokens": 0}, {"num_computed_tokens": 44}, {"num_computed_tokens": 3}]
    )
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

    def test_an_answer_between_two_slow_steps_is_told_once(self, client, clock, connector, ask):
        client.gate.close()
        assert ask("a") == LATER
        client.gate.wait_reached()
        client.gate.open()
        while connector.statistics().answered == 0:
            time.sleep(0.001)
        clock.advance(lookups.MISS_TTL + 1)  # the step took longer than the miss is remembered
        assert ask("a") == MISS

    def test_what_this_engine_stores_itself_is_missed_no_longer(self, client, answer, connector, hashes):
        assert answer("a") == MISS
        connector.save_blocks("a", 0, hashes[:3], [1, 2, 3])
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
        connector.update_state_after_alloc("a", {0: [(2, 7), (3, 8), (4, 9)]})
        assert connector.build_connector_meta() == StepPlan(loads=(LoadPlan("a", tuple(hashes[2:5]), (7, 8, 9)),))
        assert not connector.build_connector_meta()

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

    def test_hashes_and_blocks_have_to_match(self, connector, hashes):
        with pytest.raises(InvalidRequestError, match="request a: 2 hashes for 1 blocks"):
            connector.save_blocks("a", 0, hashes[:2], [1])


class TestEndings:
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


class TestGroups:
    """Group 0 has blocks of 4 tokens, group 1, with a window, of 8: a prompt of 48 tokens has twelve and six."""

    @pytest.fixture
    def connector(self, client, namespace, window_namespace, clock) -> Iterator[SchedulerConnector]:
        connector = SchedulerConnector(client, [namespace, window_namespace], clock=clock)
        yield connector
        client.gate.open()
        connector.shutdown()

    @pytest.fixture
    def ask(self, connector, hashes, window_hashes):
        def run(request_id="a", *, num_computed_tokens=0, by_group=None):
            by_group = [hashes[:11], window_hashes[:5]] if by_group is None else by_group
            return connector.get_presence(request_id, by_group, num_computed_tokens)

        return run

    @pytest.fixture
    def answer(self, ask, settled):
        def run(request_id="a", **arguments):
            first = ask(request_id, **arguments)
            settled()
            return first if first is not None else ask(request_id, **arguments)

        return run

    @pytest.fixture
    def stocked(self, client, hashes, window_hashes):
        """kvstore has the first eight blocks of the one group, and of the other those that a window reaches."""
        client.pages_of[0].update(hashes[:8])
        client.pages_of[1].update(window_hashes[2:4])
        return client

    ABSENT: ClassVar = {0: (False,) * 11, 1: (False,) * 5}
    STOCKED: ClassVar = {0: (True,) * 8 + (False,) * 3, 1: (False, False, True, True, False)}

    def test_one_call_asks_for_all_groups_and_is_answered_by_group(
        self, stocked, ask, settled, connector, hashes, window_hashes
    ):
        assert ask() is None
        settled()
        assert ask() == self.STOCKED
        assert stocked.calls == [[tuple(hashes[:11]), tuple(window_hashes[:5])]]
        assert connector.statistics() == LookupStatistics(asked=1, answered=1)

    def test_requests_of_one_call_get_their_own_answers(self, stocked, ask, settled, hashes, window_hashes):
        stocked.gate.close()
        ask("first")
        stocked.gate.wait_reached()
        ask("b", by_group=[hashes[:3], window_hashes[:1]])
        ask("c", by_group=[hashes[6:9], window_hashes[3:]])
        stocked.gate.open()
        settled()
        assert len(stocked.calls) == 2
        assert ask("b", by_group=[hashes[:3], window_hashes[:1]]) == {0: (True,) * 3, 1: (False,)}
        assert ask("c", by_group=[hashes[6:9], window_hashes[3:]]) == {0: (True, True, False), 1: (True, False, False)}

    def test_a_page_of_one_group_is_none_of_the_other(self, client, answer, hashes):
        client.pages_of[0].update(hashes)
        same = [hashes[:3], hashes[:3]]
        assert answer(by_group=same) == {0: (True,) * 3, 1: (False,) * 3}

    def test_a_group_may_have_nothing_to_ask_for(self, stocked, answer, hashes):
        assert answer(by_group=[hashes[:1], []]) == {0: (True,), 1: ()}
        assert answer("b", by_group=[[], []]) == {0: (), 1: ()}
        assert len(stocked.calls) == 1

    def test_the_answer_is_as_long_as_the_question(self, stocked, answer, ask, hashes, window_hashes):
        answer()
        assert ask(by_group=[hashes, window_hashes[:3]]) == {
            0: (True,) * 8 + (False,) * 4,
            1: (False, False, True),
        }

    def test_silence_and_failure_are_absence_in_every_group(self, client, ask, settled, clock):
        client.gate.close()
        assert ask() is None
        clock.advance(LOOKUP_BUDGET * 1.1)
        assert ask() == self.ABSENT
        client.gate.error = UnavailableError("gone")
        client.gate.open()
        settled()
        assert ask() == self.ABSENT

    def test_a_long_prompt_is_cut_at_the_same_token_in_each_group(self, stocked, answer, monkeypatch):
        monkeypatch.setattr(lookups, "HASHES_A_CALL", 8)
        assert answer()[0] == (True,) * 5 + (False,) * 6
        assert [len(hashes) for hashes in stocked.calls[0]] == [5, 2]

    def test_a_window_whose_first_pages_are_gone_is_no_miss(self, client, answer, clock, connector, window_hashes):
        client.pages_of[1].update(window_hashes[2:4])
        assert answer()[1] == (False, False, True, True, False)
        clock.advance(lookups.MISS_TTL)
        answer()
        answer("b")
        assert connector.statistics() == LookupStatistics(asked=2, answered=2)

    def test_a_miss_in_all_groups_is_remembered(self, client, answer, clock, connector, hashes, window_hashes):
        assert answer() == self.ABSENT
        client.pages_of[1].update(window_hashes)
        assert answer("b") == self.ABSENT
        assert connector.statistics().remembered == 1
        clock.advance(lookups.MISS_TTL)
        assert answer("b") == {0: (False,) * 11, 1: (True,) * 5}
        assert answer() == {0: (False,) * 11, 1: (True,) * 5}

    @pytest.mark.parametrize("group", [0, 1])
    def test_a_store_in_either_group_ends_the_miss(self, client, answer, connector, hashes, window_hashes, group):
        by_group = [hashes, window_hashes]
        answer()
        connector.save_blocks("a", group, by_group[group][:1], [3])
        client.pages_of[group].add(by_group[group][0])
        assert answer("b")[group][0]

    def test_an_answer_with_nothing_behind_the_engines_own_tokens_is_asked_for_again(
        self, stocked, answer, clock, hashes
    ):
        assert answer(num_computed_tokens=32) == self.STOCKED
        stocked.pages_of[0].update(hashes)
        assert answer(num_computed_tokens=32) == self.STOCKED
        clock.advance(lookups.MISS_TTL)
        assert answer(num_computed_tokens=32)[0] == (True,) * 11

    def test_hashes_for_every_group_are_needed(self, connector, hashes):
        with pytest.raises(InvalidRequestError, match="request a: hashes for 1 groups, the model has 2"):
            connector.get_presence("a", [hashes])
        with pytest.raises(InvalidRequestError, match="request a: hashes for 1 groups, the model has 2"):
            connector.get_num_new_matched_tokens("a", hashes, TOKENS, 0)

    def test_each_groups_pages_are_a_load_of_their_own(self, stocked, answer, connector, hashes, window_hashes):
        answer()
        connector.update_state_after_alloc("a", {0: [(6, 20), (7, 21)], 1: [(2, 30), (3, 31)]})
        assert connector.build_connector_meta().loads == (
            LoadPlan("a", tuple(hashes[6:8]), (20, 21), 0),
            LoadPlan("a", tuple(window_hashes[2:4]), (30, 31), 1),
        )

    def test_a_group_may_have_nothing_to_load(self, stocked, answer, connector, hashes, window_hashes):
        answer()
        connector.update_state_after_alloc("a", {0: [], 1: [(3, 31)]})
        assert connector.build_connector_meta().loads == (LoadPlan("a", (window_hashes[3],), (31,), 1),)

    def test_what_one_group_was_not_offered_is_refused_for_both(self, stocked, answer, connector):
        answer()
        with pytest.raises(InvalidRequestError, match="block 1 of group 1 is to be loaded and was not offered"):
            connector.update_state_after_alloc("a", {0: [(0, 20)], 1: [(1, 30)]})
        assert not connector.build_connector_meta()

    @pytest.mark.parametrize("group", [2, -1])
    def test_a_group_that_the_model_does_not_have_is_refused(self, stocked, answer, connector, hashes, group):
        answer()
        with pytest.raises(InvalidRequestError, match=f"block 0 of group {group} is to be loaded and was not offered"):
            connector.update_state_after_alloc("a", {group: [(0, 20)]})
        with pytest.raises(InvalidRequestError, match=f"group must lie between 0 and 1, got {group}"):
            connector.save_blocks("a", group, hashes[:1], [1])

    def test_after_a_load_nothing_is_offered_until_the_request_is_preempted(self, stocked, answer, connector):
        answer()
        connector.update_state_after_alloc("a", {1: [(3, 31)]})
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"}, {31})
        assert answer() == self.ABSENT
        connector.request_preempted("a")
        assert answer() == self.STOCKED

    def test_each_group_is_stored_as_it_comes(self, connector, hashes, window_hashes):
        connector.save_blocks("a", 0, hashes[:3], [1, 2, 3])
        connector.save_blocks("a", 1, window_hashes[:1], [9])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", tuple(hashes[:3]), (1, 2, 3), 0),
            StorePlan("a", (window_hashes[0],), (9,), 1),
        )
        connector.save_blocks("a", 0, hashes[:4], [1, 2, 3, 4])
        connector.save_blocks("a", 1, window_hashes[:2], [9, 10])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", (hashes[3],), (4,), 0, hashes[2]),
            StorePlan("a", (window_hashes[1],), (10,), 1, window_hashes[0]),
        )

    def test_places_without_a_block_are_skipped_for_good(self, connector, window_hashes):
        connector.save_blocks("a", 1, window_hashes[:3], [0, 0, 5])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", (window_hashes[2],), (5,), 1, window_hashes[1]),
        )
        connector.save_blocks("a", 1, window_hashes[:4], [7, 8, 0, 6])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", (window_hashes[3],), (6,), 1, window_hashes[2]),
        )
        connector.save_blocks("b", 1, window_hashes[:2], [0, 0])
        assert not connector.build_connector_meta()
        assert not connector.request_finished("b")

    def test_what_failed_to_load_is_stored_again_in_its_group_only(
        self, stocked, answer, connector, hashes, window_hashes
    ):
        answer()
        connector.update_state_after_alloc("a", {0: [(index, 20 + index) for index in range(8)], 1: [(2, 30), (3, 31)]})
        connector.build_connector_meta()
        connector.update_connector_output(set(), {"a"}, {31})
        connector.save_blocks("a", 0, hashes[:9], list(range(20, 29)))
        connector.save_blocks("a", 1, window_hashes[:4], [0, 0, 30, 31])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", (hashes[8],), (28,), 0, hashes[7]),
            StorePlan("a", (window_hashes[3],), (31,), 1, window_hashes[2]),
        )

    def test_a_preempted_request_gives_its_stores_up_in_every_group(self, connector, hashes, window_hashes):
        connector.save_blocks("a", 0, hashes[:1], [4])
        connector.save_blocks("a", 1, window_hashes[:1], [5])
        connector.request_preempted("a")
        assert connector.build_connector_meta() == StepPlan(preempted=("a",))

    def test_the_worker_learns_which_blocks_others_got(self, connector, window_hashes):
        connector.save_blocks("a", 1, window_hashes[:2], [4, 5])
        assert connector.build_connector_meta().overwritten == ()
        connector.blocks_allocated([4, 8])
        connector.blocks_allocated([9])
        connector.save_blocks("b", 0, window_hashes[:1], [8])
        plan = connector.build_connector_meta()
        assert plan == StepPlan(stores=(StorePlan("b", (window_hashes[0],), (8,), 0),), overwritten=(4, 8, 9))
        assert not connector.build_connector_meta()

    def test_a_block_that_others_got_before_its_store_was_planned_is_not_stored(self, connector, window_hashes):
        connector.save_blocks("a", 1, window_hashes[:2], [4, 5])
        connector.blocks_allocated([4])
        connector.save_blocks("b", 1, window_hashes[2:3], [4])
        assert connector.build_connector_meta().stores == (
            StorePlan("a", (window_hashes[1],), (5,), 1),
            StorePlan("b", (window_hashes[2],), (4,), 1),
        )
        connector.save_blocks("a", 1, window_hashes[:3], [0, 0, 6])
        connector.blocks_allocated([6])
        assert connector.build_connector_meta() == StepPlan(overwritten=(6,))

    @pytest.mark.parametrize("moment", ["asked", "answered", "planned"])
    def test_an_abort_at_any_moment_leaves_nothing_behind(self, stocked, ask, settled, connector, moment):
        ask()
        if moment != "asked":
            settled()
            assert ask() == self.STOCKED
        if moment == "planned":
            connector.update_state_after_alloc("a", {0: [(0, 1)], 1: [(3, 31)]})
            connector.build_connector_meta()
        assert not connector.request_finished("a")
        settled()
        connector.update_connector_output(set(), {"a"}, {31})
        assert not connector._transfers
        assert not connector._lookups._answers
        assert not connector.build_connector_meta()


class TestWithoutACall:
    def test_what_the_mapping_tells_is_answered_at_once(self, connector, client, ask, hashes):
        client.pages.update(hashes[:3])
        client.shows = True
        assert ask() == (12, True)
        connector.update_state_after_alloc("a", {0: [(0, 1), (1, 2), (2, 3)]})
        assert connector.build_connector_meta().loads == (LoadPlan("a", tuple(hashes[:3]), (1, 2, 3)),)
        assert client.calls == []
        assert connector.statistics() == LookupStatistics(here=1)

    def test_a_page_that_came_a_moment_after_its_miss_is_found(self, client, ask, hashes):
        client.shows = True
        assert ask("a") == MISS
        client.pages.update(hashes[:3])
        assert ask("b") == (12, True)

    def test_a_node_that_hangs_does_not_hide_what_is_mapped(self, client, clock, ask, hashes):
        client.gate.close()
        assert ask("a") == LATER
        clock.advance(2 * LOOKUP_BUDGET)
        client.pages.update(hashes[:3])
        client.shows = True
        assert ask("b") == (12, True)

    def test_an_error_of_the_mapping_is_asked_by_a_call(self, client, answer, hashes, monkeypatch):
        def broken(queries):
            raise OSError("the mapping is gone")

        monkeypatch.setattr(client, "lookup_here", broken)
        client.pages.update(hashes[:3])
        assert answer() == (12, True)
        assert len(client.calls) == 1


class TestParts:
    """Two ranks, each of which has a part of each page."""

    @pytest.fixture
    def connector(self, client, namespace, clock) -> Iterator[SchedulerConnector]:
        ranks = [Layout(model="test", block_size=4, page_bytes=64, tp_size=2, tp_rank=rank) for rank in (0, 1)]
        namespaces = [replace(namespace, layout=layout) for layout in ranks]
        connector = SchedulerConnector(client, namespaces[:1], other_ranks=[namespaces[1:]], clock=clock)
        yield connector
        client.gate.open()
        connector.shutdown()

    @pytest.mark.parametrize("shows", [True, False], ids=["mapped", "by a call"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_page_is_there_when_all_its_parts_are(self, client, answer, hashes, shows, rank):
        client.shows = shows
        client.pages.update(hashes)
        client.missing_parts[rank].add(hashes[2])
        assert answer("a") == (8, True)
        client.missing_parts.clear()
        assert answer("b") == (44, True)

    def test_all_ranks_are_asked_by_one_call(self, client, answer, hashes):
        client.pages.update(hashes)
        answer()
        assert client.calls == [[tuple(hashes[:11])] * 2]

    def test_with_many_ranks_a_call_still_names_a_bounded_number_of_hashes(self, client, answer, hashes, monkeypatch):
        monkeypatch.setattr(lookups, "MOST_LOOKUP_PAGES", 10)
        client.pages.update(hashes)
        assert answer() == (20, True)
        assert client.calls == [[tuple(hashes[:5])] * 2]


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
