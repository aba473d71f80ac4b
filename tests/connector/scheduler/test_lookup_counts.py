"""What a scheduler half counts of its requests: pages asked for and found, each request once, at its first answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.connector.lookup_counts import REMEMBERED, LookupCounts
from kvstore.connector.lookups import MISS_TTL
from kvstore.connector.scheduler import LOOKUP_BUDGET, SchedulerConnector
from kvstore.errors import UnavailableError

FULL = 11
"""Blocks that may be loaded of a request of TOKENS tokens."""


@pytest.fixture
def counted(connector: SchedulerConnector, namespace: Any) -> Callable[[], list[tuple[int, dict[str, int]]]]:
    """What the node was told, which is also what the engine's metrics have."""

    def run() -> list[tuple[int, dict[str, int]]]:
        statistics = connector.statistics()
        assert statistics.pages_asked == sum(asked for asked, _ in namespace.looked_up)
        for tier in ("arena", "disk"):
            told = sum(found.get(tier, 0) for _, found in namespace.looked_up)
            assert statistics.pages_found.get(tier, 0) == told
        return list(namespace.looked_up)

    return run


def test_a_hit_counts_behind_what_the_engine_has_itself(answer, client, namespace, hashes, counted):
    client.pages.update(hashes[:5])
    namespace.on_disk.update(hashes[3:5])
    assert answer("a", num_computed_tokens=8) == (12, True)
    assert counted() == [(FULL - 2, {"arena": 1, "disk": 2})]


def test_a_page_behind_a_missing_one_was_found(answer, client, hashes, counted):
    client.pages.update((hashes[0], hashes[2]))
    assert answer("a") == (4, True)
    assert counted() == [(FULL, {"arena": 2})]


def test_asking_again_counts_nothing_also_behind_a_preemption_and_the_next_request_counts(
    answer, ask, connector, client, clock, hashes, counted
):
    assert answer("a") == (0, False)
    client.pages.update(hashes[:5])
    clock.advance(2 * MISS_TTL)
    assert answer("a") == (20, True)
    connector.update_state_after_alloc("a", {0: [(place, 10 + place) for place in range(5)]})
    connector.request_preempted("a")
    assert answer("a") == (20, True)
    assert counted() == [(FULL, {})]
    connector.request_finished("a")
    assert answer("a") == (20, True)
    assert counted() == [(FULL, {}), (FULL, {"arena": 5})]


def test_silence_past_the_budget_is_a_miss_that_counts(ask, client, clock, counted):
    client.gate.close()
    assert ask("a") == (None, False)
    assert counted() == []
    clock.advance(2 * LOOKUP_BUDGET)
    assert ask("a") == (0, False)
    assert ask("a") == (0, False)
    assert counted() == [(FULL, {})]


def test_a_remembered_miss_and_a_node_that_is_away_count(answer, ask, settled, client, clock, counted):
    assert answer("a") == (0, False)
    assert ask("b") == (0, False), "the same was missing a moment ago"
    assert counted() == [(FULL, {}), (FULL, {})]
    clock.advance(2 * MISS_TTL)
    client.gate.error = UnavailableError("away")
    assert ask("c") == (None, False)
    settled()
    assert ask("c") == (0, False), "the node is left alone"
    assert counted() == [(FULL, {})] * 3


def test_a_request_that_the_engine_has_all_of_asks_for_nothing(ask, counted):
    assert ask("a", num_computed_tokens=44) == (0, False)
    assert counted() == []


def test_each_rank_is_told_of_pages_that_are_there_in_all_of_their_parts(client, namespace, hashes, clock, eventually):
    other = type(namespace)()
    connector = SchedulerConnector(client, [namespace], other_ranks=[[other]], clock=clock)
    try:
        client.pages.update(hashes[:3])
        eventually(lambda: connector.get_presence("a", [hashes[:4]]) is not None)
        assert namespace.looked_up == other.looked_up == [(4, {"arena": 3})]
        assert (connector.statistics().pages_asked, connector.statistics().pages_found) == (8, {"arena": 6})
    finally:
        connector.shutdown()


def test_awaited_pages_count_once_at_the_node_where_they_come(client, namespace, hashes, clock, eventually):
    at_peer = type(namespace)()
    peer = type(client)()
    connector = SchedulerConnector(client, [namespace], clock=clock, peers={"peer": (peer, [[at_peer]])})
    try:
        peer.pages.update(hashes[:1])
        connector.await_pages("a", "peer", [hashes[:4]], [None], clock() + 60, early=True)
        eventually(lambda: connector.get_presence("a", [hashes[:4]]) is not None)
        connector.get_presence("a", [hashes[:4]])
        assert at_peer.looked_up == [(4, {"arena": 4})], "the others are on their way"
        assert namespace.looked_up == []
    finally:
        connector.shutdown()


def test_uncounted_groups_and_forgotten_requests(namespace):
    counts = LookupCounts()
    for number in range(REMEMBERED + 1):
        counts.count(str(number), [[namespace, namespace]], [0, 1], [[True], [True]], ())
    assert (counts.asked, counts.found) == (REMEMBERED + 1, {"arena": REMEMBERED + 1})
    assert not counts.is_counted("0")
    assert counts.is_counted(str(REMEMBERED))
