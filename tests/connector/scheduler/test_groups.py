"""The scheduler half of a model with several cache groups, with a client that answers when a test lets it."""

from collections.abc import Iterator
from typing import ClassVar

import pytest

from kvstore.connector import lookups
from kvstore.connector.lookups import LookupStatistics
from kvstore.connector.plan import LoadPlan, StepPlan, StorePlan
from kvstore.connector.scheduler import LOOKUP_BUDGET, SchedulerConnector
from kvstore.errors import InvalidRequestError, UnavailableError

TOKENS = 47  # eleven full blocks and some


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
        assert connector.statistics() == LookupStatistics(
            asked=1, answered=1, pages_asked=16, pages_found={"arena": 10}
        )

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
        assert connector.statistics() == LookupStatistics(asked=2, answered=2, pages_asked=32, pages_found={"arena": 4})

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

    def test_a_state_ends_the_miss_of_the_prefix_that_it_is_behind(self, client, answer, connector, hashes):
        assert not any(answer("r1")[0])
        connector.save_state("r1", 0, hashes[:3], 7)
        client.pages.add(hashes[2])
        assert answer("r2")[0][2]

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
