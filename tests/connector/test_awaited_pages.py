"""Waiting for pages on their way to a node."""

from __future__ import annotations

import pytest

from kvstore.connector.awaited_pages import (
    MOST_WAITING,
    PARTIAL_WAIT,
    AwaitedPages,
    PagePoller,
)
from kvstore.layout import Layout

PAGES = (b"a" * 32, b"b" * 32, b"c" * 32)


def pages_at(*present: bool, has_partial: bool, deadline: float = 1010.0) -> AwaitedPages:
    pages = AwaitedPages((PAGES,), (has_partial,), deadline)
    pages.present = [list(present)]
    return pages


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
    assert pages_at(*present, has_partial=has_partial).settle(1000.0) is settled


def test_an_early_load_begins_with_the_first_page():
    pages = AwaitedPages((PAGES,), (True,), 1010.0, early=True)
    pages.present = [[False, True, False]]
    assert not pages.settle(1000.0)
    pages.present[0][0] = True
    assert pages.settle(1000.0)
    assert pages.on_the_way
    assert pages.expected == ((True, True, True),)
    assert pages.offered(0, 2) == PAGES[2]


def test_an_early_load_expects_nothing_that_was_refused():
    pages = AwaitedPages((PAGES,), (False,), 1010.0, early=True)
    pages.present = [[True, False, True]]
    assert pages.settle(1000.0)
    assert pages.expected == ((True, False, True),)
    assert pages.offered(0, 1) is None


def test_each_group_is_waited_for():
    pages = AwaitedPages((PAGES, PAGES), (False, False), 1010.0)
    pages.present = [[True] * 3, [True, True, False]]
    assert not pages.settle(1000.0)
    pages.present[1][2] = True
    assert pages.settle(1000.0)


def test_a_partial_block_alone_is_waited_for_but_a_moment():
    pages = pages_at(True, True, False, has_partial=True)
    assert not pages.settle(1000.0)
    assert not pages.settle(1000.0 + 0.9 * PARTIAL_WAIT)
    assert pages.settle(1000.0 + PARTIAL_WAIT)


def with_states(attention: list[bool] | None, states: list[bool], *, last: int) -> AwaitedPages:
    """Of layers that have only some states, beside attention or alone."""
    if attention is None:
        pages = AwaitedPages((PAGES,), (False,), 1010.0, states=(last,))
        pages.present = [states]
    else:
        pages = AwaitedPages((PAGES, PAGES), (False, False), 1010.0, states=(None, last))
        pages.present = [attention, states]
    return pages


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
    pages = with_states([True] * 3, [False] * 3, last=2)
    assert not pages.settle(1000.0)
    assert not pages.settle(1000.0 + 0.9 * PARTIAL_WAIT)
    assert pages.settle(1000.0 + PARTIAL_WAIT)


def test_states_alone_are_waited_for_until_the_deadline():
    pages = with_states(None, [True, False, False], last=2)
    assert not pages.settle(1000.0)
    assert not pages.settle(1009.9)
    assert pages.settle(1010.0)


def test_the_deadline_ends_it():
    pages = pages_at(True, False, False, has_partial=True)
    assert not pages.settle(1009.9)
    assert pages.settle(1010.0)


@pytest.fixture
def poller(client, namespace, clock):
    made = PagePoller("pages", client, [[namespace]], clock)
    yield made
    client.gate.open()
    made.shutdown()


def expect(poller, clock, name="r", seconds=10.0):
    pages = AwaitedPages((PAGES,), (True,), clock() + seconds)
    poller.expect(name, pages)
    return pages


def test_pages_are_looked_up_until_they_are_there_and_each_that_is_there_once(poller, client, clock, eventually):
    pages = expect(poller, clock)
    eventually(lambda: len(client.calls) > 2)
    assert not poller.look("r", pages)
    assert pages.offered(0, 0) is None
    client.pages.update(PAGES[:2])
    eventually(lambda: client.calls[-1] == [PAGES[2:]])
    client.pages.add(PAGES[2])
    eventually(lambda: poller.look("r", pages))
    assert [pages.offered(0, place) for place in range(4)] == [*PAGES, None]
    calls = len(client.calls)
    other = expect(poller, clock, "other")
    eventually(lambda: poller.look("other", other))
    assert len(client.calls) == calls + 1


def test_a_node_that_hangs_is_waited_for_until_the_deadline(poller, client, clock):
    client.gate.close()
    pages = expect(poller, clock)
    client.gate.wait_reached()
    assert not poller.look("r", pages)
    clock.advance(10)
    assert poller.look("r", pages)
    assert pages.offered(0, 0) is None


def test_what_a_hung_lookup_finds_behind_the_deadline_is_not_believed(poller, client, clock, eventually):
    client.pages.update(PAGES)
    client.gate.close()
    pages = expect(poller, clock)
    client.gate.wait_reached()
    clock.advance(10)
    assert poller.look("r", pages)
    client.gate.open()
    next_one = expect(poller, clock, "next")
    eventually(lambda: poller.look("next", next_one))
    assert pages.present == [[False] * 3]


def test_a_node_that_fails_is_a_miss_and_left_alone_for_a_second(poller, client, clock, eventually):
    client.gate.error = ConnectionError("gone")
    pages = expect(poller, clock)
    eventually(lambda: poller.look("r", pages))
    client.gate.error = None
    client.pages.update(PAGES)
    assert expect(poller, clock, "too early").settled
    clock.advance(1)
    later = expect(poller, clock, "later")
    eventually(lambda: poller.look("later", later))
    assert later.offered(0, 2) == PAGES[2]


def test_who_waits_is_bounded_and_who_is_forgotten_is_asked_for_no_more(poller, client, clock, eventually):
    waiting = [expect(poller, clock, str(number)) for number in range(MOST_WAITING)]
    assert not any(each.settled for each in waiting)
    assert expect(poller, clock, "one more").settled
    for number in range(MOST_WAITING):
        poller.forget(str(number))
    last = AwaitedPages((PAGES[:1],), (False,), clock() + 10)
    poller.expect("last", last)
    assert not last.settled
    eventually(lambda: client.calls[-3:] == 3 * [[PAGES[:1]]])


def test_a_page_is_there_when_each_rank_has_its_part(client, namespace, clock, eventually):
    def of_group(group):
        return type(namespace)(Layout(model="m", block_size=4, page_bytes=8, group=group))

    ranks = [[of_group(0), of_group(1)], [of_group(2), of_group(3)]]
    poller = PagePoller("pages", client, ranks, clock)
    pages = AwaitedPages((PAGES, PAGES[:1]), (False, False), clock() + 10)
    poller.expect("r", pages)
    for group, here in ((0, PAGES), (1, PAGES), (2, PAGES[1:])):
        client.pages_of[group].update(here)
        assert not poller.look("r", pages)
    client.pages_of[3].update(PAGES)
    eventually(lambda: poller.look("r", pages))
    assert pages.present == [[False, True, True], [True]]
    poller.shutdown()


def test_nothing_is_waited_for_behind_the_end(client, namespace, clock):
    poller = PagePoller("pages", client, [[namespace]], clock)
    pages = expect(poller, clock)
    poller.shutdown()
    assert poller.look("r", pages)
    assert expect(poller, clock, "next").settled


def test_more_pages_than_a_lookup_can_name_are_not_waited_for(poller, client, clock, eventually, monkeypatch):
    monkeypatch.setattr("kvstore.connector.awaited_pages.MOST_LOOKUP_PAGES", len(PAGES) - 1)
    assert expect(poller, clock, "long").settled
    assert client.calls == []
    monkeypatch.undo()
    client.pages.update(PAGES)
    other = expect(poller, clock, "other")
    eventually(lambda: poller.look("other", other))
    assert other.offered(0, 0) == PAGES[0]
