"""Waiting for pages on their way to a node."""

from __future__ import annotations

import pytest

from kvstore.connector.arrivals import (
    MOST_WAITING,
    PARTIAL_WAIT,
    Arrival,
    Arrivals,
)
from kvstore.layout import Layout

PAGES = (b"a" * 32, b"b" * 32, b"c" * 32)


def arrival_of(*present: bool, has_partial: bool, deadline: float = 1010.0) -> Arrival:
    arrival = Arrival((PAGES,), (has_partial,), deadline)
    arrival.present = [list(present)]
    return arrival


@pytest.mark.parametrize(
    ("present", "has_partial", "settled"),
    [
        ((True, True, True), True, True),
        ((True, True, False), False, False),
        ((False, False, False), True, False),
        ((True, False, True), True, True),  # what was stored behind it is there: it was refused
        ((False, True, True), False, True),
    ],
)
def test_waiting_is_over_when_nothing_more_can_come(present, has_partial, settled):
    assert arrival_of(*present, has_partial=has_partial).settle(1000.0) is settled


def test_an_early_load_begins_with_the_first_page():
    arrival = Arrival((PAGES,), (True,), 1010.0, early=True)
    arrival.present = [[False, True, False]]
    assert not arrival.settle(1000.0)
    arrival.present[0][0] = True
    assert arrival.settle(1000.0)
    assert arrival.on_the_way
    assert arrival.expected == ((True, True, True),)
    assert arrival.offered(0, 2) == PAGES[2]


def test_an_early_load_expects_nothing_that_was_refused():
    arrival = Arrival((PAGES,), (False,), 1010.0, early=True)
    arrival.present = [[True, False, True]]
    assert arrival.settle(1000.0)
    assert arrival.expected == ((True, False, True),)
    assert arrival.offered(0, 1) is None


def test_each_group_is_waited_for():
    arrival = Arrival((PAGES, PAGES), (False, False), 1010.0)
    arrival.present = [[True] * 3, [True, True, False]]
    assert not arrival.settle(1000.0)
    arrival.present[1][2] = True
    assert arrival.settle(1000.0)


def test_a_partial_block_alone_is_waited_for_but_a_moment():
    arrival = arrival_of(True, True, False, has_partial=True)
    assert not arrival.settle(1000.0)
    assert not arrival.settle(1000.0 + 0.9 * PARTIAL_WAIT)
    assert arrival.settle(1000.0 + PARTIAL_WAIT)


def with_states(attention: list[bool] | None, states: list[bool], *, last: int) -> Arrival:
    """Of layers that have only some states, beside attention or alone."""
    if attention is None:
        arrival = Arrival((PAGES,), (False,), 1010.0, states=(last,))
        arrival.present = [states]
    else:
        arrival = Arrival((PAGES, PAGES), (False, False), 1010.0, states=(None, last))
        arrival.present = [attention, states]
    return arrival


@pytest.mark.parametrize("attention", [[True] * 3, None], ids=["beside attention", "alone"])
def test_of_states_the_last_one_that_was_stored_is_waited_for(attention):
    assert not with_states(attention, [True, False, False], last=2).settle(1000.0)
    assert with_states(attention, [False, True, False], last=2).settle(1000.0)
    assert with_states(attention, [False, False, False], last=0).settle(1000.0)


def test_attention_is_waited_for_when_the_state_is_there():
    assert not with_states([True, True, False], [False, True, False], last=2).settle(1000.0)
    assert not with_states([True, True, False], [False, False, False], last=0).settle(1000.0)
    assert with_states([False, True, True], [False, True, False], last=2).settle(1000.0)


def test_a_state_that_was_not_stored_before_the_others_is_waited_for_but_a_moment():
    arrival = with_states([True] * 3, [False] * 3, last=2)
    assert not arrival.settle(1000.0)
    assert not arrival.settle(1000.0 + 0.9 * PARTIAL_WAIT)
    assert arrival.settle(1000.0 + PARTIAL_WAIT)


def test_states_alone_are_waited_for_until_the_deadline():
    arrival = with_states(None, [True, False, False], last=2)
    assert not arrival.settle(1000.0)
    assert not arrival.settle(1009.9)
    assert arrival.settle(1010.0)


def test_the_deadline_ends_it():
    arrival = arrival_of(True, False, False, has_partial=True)
    assert not arrival.settle(1009.9)
    assert arrival.settle(1010.0)


@pytest.fixture
def arrivals(client, namespace, clock):
    made = Arrivals("pages", client, [[namespace]], clock)
    yield made
    client.gate.open()
    made.shutdown()


def expect(arrivals, clock, name="r", seconds=10.0):
    arrival = Arrival((PAGES,), (True,), clock() + seconds)
    arrivals.expect(name, arrival)
    return arrival


def test_pages_are_looked_up_until_they_are_there_and_each_that_is_there_once(arrivals, client, clock, eventually):
    arrival = expect(arrivals, clock)
    eventually(lambda: len(client.calls) > 2)
    assert not arrivals.look("r", arrival)
    assert arrival.offered(0, 0) is None
    client.pages.update(PAGES[:2])
    eventually(lambda: client.calls[-1] == [PAGES[2:]])
    client.pages.add(PAGES[2])
    eventually(lambda: arrivals.look("r", arrival))
    assert [arrival.offered(0, place) for place in range(4)] == [*PAGES, None]
    calls = len(client.calls)
    other = expect(arrivals, clock, "other")
    eventually(lambda: arrivals.look("other", other))
    assert len(client.calls) == calls + 1


def test_a_node_that_hangs_is_waited_for_until_the_deadline(arrivals, client, clock):
    client.gate.close()
    arrival = expect(arrivals, clock)
    client.gate.wait_reached()
    assert not arrivals.look("r", arrival)
    clock.advance(10)
    assert arrivals.look("r", arrival)
    assert arrival.offered(0, 0) is None


def test_what_a_hung_lookup_finds_behind_the_deadline_is_not_believed(arrivals, client, clock, eventually):
    client.pages.update(PAGES)
    client.gate.close()
    arrival = expect(arrivals, clock)
    client.gate.wait_reached()
    clock.advance(10)
    assert arrivals.look("r", arrival)
    client.gate.open()
    next_one = expect(arrivals, clock, "next")
    eventually(lambda: arrivals.look("next", next_one))
    assert arrival.present == [[False] * 3]


def test_a_node_that_fails_is_a_miss_and_left_alone_for_a_second(arrivals, client, clock, eventually):
    client.gate.error = ConnectionError("gone")
    arrival = expect(arrivals, clock)
    eventually(lambda: arrivals.look("r", arrival))
    client.gate.error = None
    client.pages.update(PAGES)
    assert expect(arrivals, clock, "too early").settled
    clock.advance(1)
    later = expect(arrivals, clock, "later")
    eventually(lambda: arrivals.look("later", later))
    assert later.offered(0, 2) == PAGES[2]


def test_who_waits_is_bounded_and_who_is_forgotten_is_asked_for_no_more(arrivals, client, clock, eventually):
    waiting = [expect(arrivals, clock, str(number)) for number in range(MOST_WAITING)]
    assert not any(each.settled for each in waiting)
    assert expect(arrivals, clock, "one more").settled
    for number in range(MOST_WAITING):
        arrivals.forget(str(number))
    last = Arrival((PAGES[:1],), (False,), clock() + 10)
    arrivals.expect("last", last)
    assert not last.settled
    eventually(lambda: client.calls[-3:] == 3 * [[PAGES[:1]]])


def test_a_page_is_there_when_each_rank_has_its_part(client, namespace, clock, eventually):
    def of_group(group):
        return type(namespace)(Layout(model="m", block_size=4, page_bytes=8, group=group))

    ranks = [[of_group(0), of_group(1)], [of_group(2), of_group(3)]]
    arrivals = Arrivals("pages", client, ranks, clock)
    arrival = Arrival((PAGES, PAGES[:1]), (False, False), clock() + 10)
    arrivals.expect("r", arrival)
    for group, pages in ((0, PAGES), (1, PAGES), (2, PAGES[1:])):
        client.pages_of[group].update(pages)
        assert not arrivals.look("r", arrival)
    client.pages_of[3].update(PAGES)
    eventually(lambda: arrivals.look("r", arrival))
    assert arrival.present == [[False, True, True], [True]]
    arrivals.shutdown()


def test_nothing_is_waited_for_behind_the_end(client, namespace, clock):
    arrivals = Arrivals("pages", client, [[namespace]], clock)
    arrival = expect(arrivals, clock)
    arrivals.shutdown()
    assert arrivals.look("r", arrival)
    assert expect(arrivals, clock, "next").settled


def test_more_pages_than_a_lookup_can_name_are_not_waited_for(arrivals, client, clock, eventually, monkeypatch):
    monkeypatch.setattr("kvstore.connector.arrivals.MOST_LOOKUP_PAGES", len(PAGES) - 1)
    assert expect(arrivals, clock, "long").settled
    assert client.calls == []
    monkeypatch.undo()
    client.pages.update(PAGES)
    other = expect(arrivals, clock, "other")
    eventually(lambda: arrivals.look("other", other))
    assert other.offered(0, 0) == PAGES[0]
