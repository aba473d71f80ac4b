"""What the scheduler half tells an engine that asks, with a client that answers when a test lets it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.cli.prompts import read_prompt
from kvstore.connector import lookups
from kvstore.connector.health import BACKOFF
from kvstore.connector.lookups import LookupStatistics, of_all_parts
from kvstore.connector.plan import LoadPlan
from kvstore.connector.scheduler import LOOKUP_BUDGET, SchedulerConnector
from kvstore.errors import UnavailableError
from kvstore.layout import Layout

MISS = (0, False)
LATER = (None, False)


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
        assert connector.statistics() == LookupStatistics(asked=1, late=1, pages_asked=11)

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

    def test_an_answer_between_two_slow_steps_is_told_once(self, client, clock, connector, ask, eventually):
        client.gate.close()
        assert ask("a") == LATER
        client.gate.wait_reached()
        client.gate.open()
        eventually(lambda: connector.statistics().answered == 1)
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


class TestWithoutACall:
    def test_what_the_mapping_tells_is_answered_at_once(self, connector, client, ask, hashes):
        client.pages.update(hashes[:3])
        client.shows = True
        assert ask() == (12, True)
        connector.update_state_after_alloc("a", {0: [(0, 1), (1, 2), (2, 3)]})
        assert connector.build_connector_meta().loads == (LoadPlan("a", tuple(hashes[:3]), (1, 2, 3)),)
        assert client.calls == []
        assert connector.statistics() == LookupStatistics(here=1, pages_asked=11, pages_found={"arena": 3})

    @pytest.mark.parametrize("tells", [True, False], ids=["in the mapping", "by a call"])
    def test_a_hit_whose_pages_left_while_its_request_waited_for_room(self, client, ask, settled, clock, hashes, tells):
        client.pages.update(hashes)
        client.shows = True
        assert ask() == (44, True)
        client.pages.discard(hashes[1])
        client.shows = tells  # once a page is elsewhere, the mapping can't tell whether it is gone
        assert ask() == (44, True)
        clock.advance(lookups.HIT_TTL)
        first = ask()
        settled()
        assert ask() == (4, True)
        assert (first, len(client.calls)) == (((4, True), 0) if tells else (LATER, 1))

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


def test_a_page_is_as_slow_as_its_slowest_part() -> None:
    first, second = ("arena", "redis", "objects", None), ("objects", "disk", "redis", "arena")
    assert of_all_parts([(first,), (second,)]) == (("objects", "redis", "objects", None),)
