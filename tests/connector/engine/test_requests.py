"""An engine's requests, from plain objects that look like vLLM's. Two groups with blocks of 4 tokens: attention, and
recurrent layers, of which a hit needs the last state alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_objects import BlockState, NewRequest, Request, SchedulerOutput

pytest.importorskip("torch", reason="reads an engine's tensors")

from kvstore.connector.engine.groups import Group, fails_by_block
from kvstore.connector.engine.load_admission import LoadAdmission
from kvstore.connector.engine.request_hashes import RequestHashes
from kvstore.connector.engine.request_tickets import RequestTickets
from kvstore.connector.engine.requests import EngineRequests
from kvstore.connector.plan import StepPlan
from kvstore.connector.scheduler import SchedulerConnector
from kvstore.hashing import hash_blocks
from kvstore.layout import Layout

SIZE = 4
TOKENS = list(range(100, 130))  # seven full blocks and two tokens
NAMES = hash_blocks(TOKENS, SIZE)
ATTENTION = Group(SIZE, keeps=True, num_skipped=lambda num_tokens: 0)
STATES = Group(SIZE, keeps=False, num_skipped=lambda num_tokens: num_tokens - 1, is_state=True, is_offered=True)
NUM_BLOCKS = 17
"""Each request here holds eight while it loads, and would need two more if the states were a window of one token: a
second one beside it does not fit."""


@pytest.fixture
def requests(client: Any, namespace: Any, clock: Any) -> Iterator[EngineRequests]:
    client.shows = True
    layouts = [Layout(model="m", block_size=SIZE, page_bytes=64, group=group) for group in (0, 1)]
    hashes = RequestHashes(SIZE)
    scheduler = SchedulerConnector(client, [type(namespace)(layout) for layout in layouts], clock=clock)
    made = EngineRequests(
        scheduler,
        [ATTENTION, STATES],
        hashes,
        tickets=RequestTickets(None, hashes),
        load_admission=LoadAdmission([ATTENTION, replace(STATES, is_state=False)], NUM_BLOCKS),
        clock=clock,
    )
    yield made
    made.shutdown()


def new_request(name: str = "a", **fields: Any) -> Request:
    return Request(name, TOKENS, **fields)


def step_of(
    request: Request, scheduled: int, tables: tuple[list[int], ...], *states: tuple[int, int, int]
) -> SchedulerOutput:
    """A step that computes so many tokens of one request, with these blocks, and offers these states."""
    return SchedulerOutput(
        [NewRequest(request.request_id, tables)],
        {request.request_id: scheduled},
        BlockState(lambda name: tables, {request.request_id: list(states)}),
    )


def stores_of(plan: StepPlan, group: int) -> dict[int, bytes]:
    """Block id → hash."""
    return {
        block: name
        for store in plan.stores
        if store.group == group
        for block, name in zip(store.block_ids, store.hashes, strict=True)
    }


def test_a_hit_ends_at_a_state(requests: EngineRequests, client: Any) -> None:
    client.pages_of[0].update(NAMES)
    client.pages_of[1].update([NAMES[1], NAMES[4]])
    assert requests.get_num_new_matched_tokens(new_request(), 0) == (5 * SIZE, True)
    assert requests.get_num_new_matched_tokens(new_request("b"), 5 * SIZE) == (0, False)
    client.pages_of[0].remove(NAMES[3])
    assert requests.get_num_new_matched_tokens(new_request("c"), 0) == (2 * SIZE, True)


def test_a_part_of_a_block_that_the_engine_found_is_not_loaded_over(requests: EngineRequests, client: Any) -> None:
    client.pages_of[0].update(NAMES)
    client.pages_of[1].update(NAMES)
    assert requests.get_num_new_matched_tokens(new_request(), SIZE + 1) == (0, False)


def test_states_are_stored_as_they_are_offered(requests: EngineRequests, client: Any) -> None:
    client.pages_of[1].add(NAMES[2])
    request = new_request()
    assert requests.get_num_new_matched_tokens(request, 0) == (0, False)
    tables = ([11, 12, 13, 14, 15, 16, 17, 18], [21, 0, 23, 0, 0, 0, 27, 28])
    requests.update_state_after_alloc(request, tables, 0)
    # The third one is there, and the last one is behind no whole block.
    plan, _ = requests.plan_step(step_of(request, 30, tables, (1, 21, 4), (1, 23, 12), (1, 27, 28), (1, 28, 30)))
    assert stores_of(plan, 0) == dict(zip(tables[0], NAMES, strict=False))
    assert stores_of(plan, 1) == {21: NAMES[0], 27: NAMES[6]}


def test_a_state_whose_block_was_given_to_another_request_is_not_stored(requests: EngineRequests) -> None:
    """21 and 20 were given back before this step; another request has 21 now."""
    request, other = new_request(), new_request("b")
    requests.get_num_new_matched_tokens(request, 0)
    tables = ([11, 12, 13], [0, 0, 23])
    step = step_of(request, 12, tables, (1, 20, 4), (1, 21, 8), (1, 23, 12))
    step.scheduled_new_reqs.append(NewRequest(other.request_id, ([14], [21])))
    plan, _ = requests.plan_step(step)
    assert stores_of(plan, 1) == {20: NAMES[0], 23: NAMES[2]}


def test_who_does_not_store_stores_no_states(requests: EngineRequests) -> None:
    request = new_request(kv_transfer_params={"kvstore_store": False})
    requests.get_num_new_matched_tokens(request, 0)
    plan, _ = requests.plan_step(step_of(request, 4, ([11], [21]), (1, 21, 4)))
    assert plan.stores == ()


class FakePins:
    pinned = 0

    def __init__(self) -> None:
        self.kept: list[tuple[list[list[bytes]], int]] = []

    def keep(self, hashes_by_group: Any, seconds: int) -> None:
        self.kept.append(([list(hashes) for hashes in hashes_by_group], seconds))

    def shutdown(self) -> None: ...


@pytest.fixture
def pins(requests: EngineRequests) -> FakePins:
    pins = requests._pins = FakePins()  # type: ignore[assignment]
    requests._most_keep_minutes = 60
    return pins


@pytest.mark.parametrize(
    ("params", "first", "end", "states"),
    [
        ({}, 0, 9, [2, 6, 8]),
        ({"kvstore_store_generated": False}, 0, 7, [2, 6]),
        ({"kvstore_store_first": 3}, 0, 3, [2]),
        ({"kvstore_store_last": 1}, 6, 9, [6, 8]),
        ({"kvstore_store": "yes"}, 0, 0, []),
        ({"kvstore_store_last": 1, "do_remote_decode": True}, 0, 9, [2, 6, 8]),  # decode waits for all of them
    ],
)
def test_hints_say_which_blocks_are_stored(
    requests: EngineRequests, params: dict[str, object], first: int, end: int, states: list[int]
) -> None:
    request = new_request(kv_transfer_params=params)
    requests.get_num_new_matched_tokens(request, 0)
    tables = (list(range(11, 20)), list(range(21, 30)))
    requests.update_state_after_alloc(request, tables, 0)
    request.all_token_ids = [*request.all_token_ids, *[5] * 8]
    request.num_generated = 8
    names = hash_blocks(request.all_token_ids, SIZE)
    step = step_of(request, 38, tables, *((1, 21 + place, SIZE * (place + 1)) for place in (2, 6, 8)))
    plan, _ = requests.plan_step(step)
    assert stores_of(plan, 0) == {11 + place: names[place] for place in range(first, end)}
    assert stores_of(plan, 1) == {21 + place: names[place] for place in states}
    plan, _ = requests.plan_step(step)  # once is enough
    assert stores_of(plan, 0) == {}


def test_a_prefix_is_kept_once_it_is_stored(requests: EngineRequests, pins: FakePins) -> None:
    request = new_request(kv_transfer_params={"kvstore_keep_minutes": 30})
    requests.get_num_new_matched_tokens(request, 0)
    tables = (list(range(11, 19)), list(range(21, 29)))
    requests.update_state_after_alloc(request, tables, 0)
    requests.plan_step(step_of(request, 30, tables, (1, 25, 5 * SIZE)))
    request.num_computed_tokens = 30
    held, _ = requests.request_finished(request, tables)
    assert held
    assert pins.kept == []
    requests.update_connector_output(["other"], [], [], [])
    assert pins.kept == []
    requests.update_connector_output([request.request_id], [], [], [])
    # All of attention's, and of the states the last one that was stored.
    assert pins.kept == [([list(NAMES), [NAMES[4]]], 1800)]


def test_a_prefix_that_is_there_is_kept_at_once(requests: EngineRequests, pins: FakePins) -> None:
    params = {"kvstore_keep_minutes": 1, "kvstore_store": False}
    request = new_request(kv_transfer_params=params)
    requests.get_num_new_matched_tokens(request, 0)
    request.num_computed_tokens = 30
    assert requests.request_finished(request, ([11], [21])) == (False, None)
    assert pins.kept == [([list(NAMES), []], 60)]


def test_a_hint_that_cannot_be_followed_is_said_and_fails_nothing(
    requests: EngineRequests, caplog: pytest.LogCaptureFixture
) -> None:
    request = new_request(kv_transfer_params={"kvstore_keep_minutes": 1})
    assert requests.get_num_new_matched_tokens(request, 0) == (0, False)
    assert "request a: kvstore_keep_minutes must be left out: this engine keeps nothing" in caplog.text


@pytest.fixture
def loading(requests: EngineRequests, client: Any, clock: Any) -> Callable[[str], None]:
    """Have a request load all but its last tokens, when it is known that this saves time."""
    client.pages_of[0].update(NAMES)
    client.pages_of[1].update(NAMES)
    for _ in range(8):
        requests.note(0, [("arena", 10, 0.001)], ())
        request = new_request("timed")
        _, step = requests.plan_step(step_of(request, 100, ([], [])))
        clock.advance(1.0)
        requests.note(step, (), ())

    def load(name: str) -> None:
        request = new_request(name)
        assert requests.get_num_new_matched_tokens(request, 0) == (7 * SIZE, True)
        requests.update_state_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 8]), 7 * SIZE)

    return load


def test_seconds_are_saved_when_the_pages_have_come(requests: EngineRequests, loading: Callable[[str], None]) -> None:
    loading("a")
    assert requests.counts()["seconds_saved"] == 0
    requests.update_connector_output((), {"a"}, (), ())
    saved = requests.counts()["seconds_saved"]
    assert saved > 0
    requests.update_connector_output((), {"a"}, (), ())
    assert requests.counts()["seconds_saved"] == saved


def test_a_load_that_failed_saves_nothing(requests: EngineRequests, loading: Callable[[str], None]) -> None:
    loading("a")
    requests.update_connector_output((), {"a"}, (), {"a"})
    assert requests.counts()["seconds_saved"] == 0


@pytest.mark.parametrize("how", ["runs", "ends", "asks anew"])
def test_a_load_waits_until_the_one_before_it_holds_no_blocks(
    requests: EngineRequests, loading: Callable[[str], None], how: str
) -> None:
    loading("a")
    for _ in range(2):
        assert requests.get_num_new_matched_tokens(new_request("b"), 0) == (None, False)
    first = new_request("a")
    if how == "runs":
        requests.plan_step(step_of(first, 2, ([], [])))
    elif how == "ends":
        requests.request_finished(first, ([], []))
    else:
        requests.update_connector_output((), {"a"}, (), {"a"})
        assert requests.get_num_new_matched_tokens(first, 0) == (0, False)
    loading("b")


def test_who_waits_behind_another_one_is_looked_up_once(
    requests: EngineRequests, loading: Callable[[str], None], client: Any
) -> None:
    loading("a")
    for name in ("b", "c"):
        assert requests.get_num_new_matched_tokens(new_request(name), 0) == (None, False)
    client.pages_of[0].clear()
    assert requests.get_num_new_matched_tokens(new_request("d"), 0) == (0, False), "what misses goes on"
    asked = requests.counts()["lookups|here"]
    assert requests.get_num_new_matched_tokens(new_request("c"), 0) == (None, False)
    assert requests.counts()["lookups|here"] == asked
    requests.request_finished(new_request("a"), ([], []))
    loading("b")


def test_which_engines_can_go_on_in_front_of_a_page_that_did_not_come() -> None:
    assert fails_by_block([ATTENTION])
    assert not fails_by_block([STATES])
    assert not fails_by_block([ATTENTION, ATTENTION])


def test_blocks_that_a_step_zeroes_are_overwritten_whoever_has_them(requests: EngineRequests) -> None:
    """Those of a request that waits for its load are in no other list."""
    request = new_request()
    requests.get_num_new_matched_tokens(request, 0)
    step = step_of(request, 4, ([11], [21]))
    step.new_block_ids_to_zero = [11, 31]
    plan, _ = requests.plan_step(step)
    assert {11, 21, 31} == set(plan.overwritten)
