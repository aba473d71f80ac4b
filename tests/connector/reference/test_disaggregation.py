"""One engine prefills, another one decodes: the tokens of an engine that does both, whatever goes wrong in between."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvstore.connector.health
from kvstore.connector.disagg.ticket import LIFETIME, sign, verify
from kvstore.connector.reference.engine import Disaggregation, Engine
from kvstore.connector.reference.model import Llama
from kvstore.connector.reference.request import Answer

BLOCK_SIZE = 16
MAX_TOKENS = 5
KEY = bytes(range(32))
LENGTHS = (17, 18, 31, 32, 33, 47, 100)
PATIENCE = 60.0


def prompt(length: int, name: str = "") -> list[int]:
    return [random.Random(f"{name} {length} {index}").randrange(512) for index in range(length)]


class Pair:
    """Engines of one model that share the work, beside nodes of their own or a common one."""

    def __init__(self, model: Llama, zeroes_blocks: bool) -> None:
        self.model = model
        self.zeroes_blocks = zeroes_blocks
        self.engines: list[Engine] = []

    def engine(self, client: Any, node_id: str, peers: dict[str, Any] | None = None, **options: Any) -> Engine:
        defaults = {"num_blocks": 96, "lookup_budget": PATIENCE, "load_deadline": PATIENCE, "store_deadline": PATIENCE}
        key = options.pop("key", KEY)
        disaggregation = Disaggregation(key, node_id, peers or {}, options.pop("wait", PATIENCE))
        options.setdefault("zeroes_blocks", self.zeroes_blocks)
        engine = Engine(self.model, client=client, disaggregation=disaggregation, **defaults | options)
        self.engines.append(engine)
        return engine

    def plain(self, tokens: list[int]) -> Answer:
        """What an engine without any cache answers."""
        engine = Engine(self.model, num_blocks=96, enable_caching=False)
        engine.add_request("plain", tokens, MAX_TOKENS)
        (answer,) = engine.run()
        assert answer.smallest_gap > 1e-4, "rounding could decide between two tokens"
        return answer

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            assert not engine.has_unfinished
            assert engine.manager.usage == 0.0
            engine.manager.check_integrity()


@pytest.fixture
def pair(tiny: Llama, zeroes_blocks: bool) -> Iterator[Pair]:
    made = Pair(tiny, zeroes_blocks)
    yield made
    made.close()


@pytest.fixture
def mixed_pair(mixed: Llama, zeroes_blocks: bool) -> Iterator[Pair]:
    made = Pair(mixed, zeroes_blocks)
    yield made
    made.close()


def prefill(engine: Engine, tokens: list[int], name: str = "p") -> dict[str, Any]:
    """The ticket for a prompt."""
    engine.add_request(name, tokens, 1, {"do_remote_decode": True})
    (answer,) = engine.run()
    engine.step()  # as a server does: it takes up what the request's end has left to do
    assert answer.ticket is not None
    return dict(answer.ticket)


def decode(engine: Engine, tokens: list[int], ticket: dict[str, Any], name: str = "d") -> Answer:
    engine.add_request(name, tokens, MAX_TOKENS, ticket)
    (answer,) = engine.run()
    return answer


def settle(engine: Engine) -> None:
    """Step until nothing of it is on its way."""
    end = time.monotonic() + PATIENCE
    while engine._scheduler.has_transfers:
        engine.step()
        assert time.monotonic() < end
    assert engine.worker is not None
    engine.worker.wait_for_save()


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_computes_nothing_but_the_last_token(pair, node, length):
    tokens = prompt(length)
    ticket = prefill(pair.engine(node, "n"), tokens)
    answer = decode(pair.engine(node, "n"), tokens, ticket)
    assert answer.token_ids == pair.plain(tokens).token_ids
    # A prompt that ends with a block has no partial one, and its last block is computed for the last token's sake; the
    # partial block of a single token is of no use.
    own = 1 if length % BLOCK_SIZE else BLOCK_SIZE
    assert answer.tokens_computed == own + MAX_TOKENS - 1
    assert answer.tokens_loaded == length - own


def test_a_partial_block_goes_with_its_ticket(pair, node):
    tokens = prompt(40)
    first = pair.engine(node, "n")
    ticket = prefill(first, tokens)
    settle(first)
    assert len(node.stored) == 3
    second = pair.engine(node, "n")
    assert decode(second, tokens, ticket).tokens_loaded == 39
    settle(second)
    assert len(node.stored) == 2
    # Nobody else finds it, and who comes a second time waits for it but a moment.
    third = pair.engine(node, "n")
    began = time.monotonic()
    assert decode(third, tokens, ticket).tokens_loaded == 32
    assert time.monotonic() - began < PATIENCE
    assert decode(pair.engine(node, "n"), tokens, {}).tokens_loaded == 32


def test_a_partial_block_that_decode_fills_is_stored_like_any_other(pair, node):
    tokens = prompt(40)
    ticket = prefill(pair.engine(node, "n"), tokens)
    second = pair.engine(node, "n")
    second.add_request("d", tokens, 10, ticket)
    (answer,) = second.run()
    settle(second)
    longer = [*tokens, *answer.token_ids]
    assert decode(pair.engine(node, "n"), longer, {}).tokens_loaded == 48


def test_a_partial_block_is_of_no_use_to_another_prompt(pair, node):
    tokens = prompt(40)
    ticket = prefill(pair.engine(node, "n"), tokens)
    other = [*tokens[:-1], (tokens[-1] + 1) % 512]
    answer = decode(pair.engine(node, "n"), other, ticket)
    assert answer.tokens_loaded == 32
    assert answer.token_ids == pair.plain(other).token_ids


@pytest.mark.parametrize("length", [33, 63, 64, 90, 120])
def test_layers_of_every_kind(mixed_pair, node, length):
    tokens = prompt(length)
    ticket = prefill(mixed_pair.engine(node, "n"), tokens)
    answer = decode(mixed_pair.engine(node, "n"), tokens, ticket)
    assert answer.token_ids == mixed_pair.plain(tokens).token_ids
    assert answer.tokens_loaded > 0


def test_decode_loads_from_the_peer_and_stores_at_its_own_node(pair, node, node_kind):
    own = node_kind()
    tokens = prompt(40)
    ticket = prefill(pair.engine(node, "host 1"), tokens)
    second = pair.engine(own, "host 2", {"host 1": node})
    answer = decode(second, tokens, ticket)
    assert answer.token_ids == pair.plain(tokens).token_ids
    assert answer.tokens_loaded == 39
    settle(second)
    assert len(own.stored) == 2
    assert own.stored.keys() == node.stored.keys()
    assert own.pages_asked == 0


def test_pages_on_their_way_are_waited_for(pair, node, gate):
    node.before_store = gate
    tokens = prompt(100)
    ticket = prefill(pair.engine(node, "n"), tokens)
    second = pair.engine(node, "n")
    second.add_request("d", tokens, MAX_TOKENS, ticket)
    for _ in range(200):
        assert second.step() == []
    gate.opened.set()
    (answer,) = second.run()
    assert answer.tokens_loaded == 99
    assert answer.token_ids == pair.plain(tokens).token_ids


class StopsAt:
    """Lets so many stores of pages begin, and holds up the next one until it is opened."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.left -= 1
        assert self.left >= 0 or self.opened.wait(PATIENCE)


def loading(engine: Engine) -> bool:
    """Whether first pages have come into their blocks."""
    assert engine.worker is not None
    return sum(engine.worker.statistics().pages_loaded.values()) > 0


BATCH_BY_BATCH = {"zeroes_blocks": False}
"""For tests that stop a prefill behind its first batch: that is published before the second one is begun."""


def test_the_first_pages_are_loaded_while_the_last_are_being_stored(pair, node):
    node.before_store = stops = StopsAt(1)
    tokens = prompt(100)
    ticket = prefill(pair.engine(node, "n", **BATCH_BY_BATCH), tokens)
    second = pair.engine(node, "n")
    second.add_request("d", tokens, MAX_TOKENS, ticket)
    second.add_request("other", prompt(50), MAX_TOKENS)
    answers = []
    while not answers or not loading(second):
        answers += second.step()
    assert [answer.request_id for answer in answers] == ["other"]
    assert len(node.stored) == 3
    stops.opened.set()
    (answer,) = second.run()
    assert (answer.tokens_loaded, answer.tokens_computed) == (99, MAX_TOKENS)
    assert answer.token_ids == pair.plain(tokens).token_ids


@pytest.mark.parametrize("length", [96, 100])
def test_pages_of_a_prefill_that_dies_on_the_way_are_computed(pair, node, length):
    def die() -> None:
        if node.stored:
            raise ConnectionError("killed")

    node.before_store = die
    tokens = prompt(length)
    ticket = prefill(pair.engine(node, "n", **BATCH_BY_BATCH), tokens)
    settle(pair.engines[0])
    assert len(node.stored) == 3
    node.before_store = lambda: None
    second = pair.engine(node, "n", wait=1.5)
    answer = decode(second, tokens, ticket)
    assert (answer.tokens_loaded, answer.tokens_computed) == (48, length - 48 + MAX_TOKENS - 1)
    assert answer.token_ids == pair.plain(tokens).token_ids
    settle(second)
    assert len(node.stored) == length // BLOCK_SIZE  # what it computed in place of them is there now


def test_decode_that_is_aborted_while_pages_are_on_the_way(pair, node):
    node.before_store = stops = StopsAt(1)
    tokens = prompt(100)
    ticket = prefill(pair.engine(node, "n", **BATCH_BY_BATCH), tokens)
    second = pair.engine(node, "n", wait=2.0)
    second.add_request("d", tokens, MAX_TOKENS, ticket)
    while not loading(second):
        assert second.step() == []
    second.abort("d")
    settle(second)
    assert second.manager.usage == 0.0
    stops.opened.set()


SIBLINGS = ("d0", "d1", "d2")
"""As vLLM makes them of a request that asks for several answers: each brings the same ticket."""


def test_siblings_are_promised_nothing_that_one_of_them_drops(pair, node, gate):
    tokens = prompt(40)
    first = pair.engine(node, "n")
    ticket = prefill(first, tokens)
    settle(first)
    node.before_load = gate
    second = pair.engine(node, "n")
    for name in SIBLINGS:
        second.add_request(name, tokens, MAX_TOKENS, ticket)
    while second._connector._loading != {*SIBLINGS}:
        assert second.step() == []
    gate.opened.set()
    answers = {answer.request_id: answer for answer in second.run()}
    assert [answers[name].tokens_loaded for name in SIBLINGS] == [39, 32, 32]
    assert [answers[name].token_ids for name in SIBLINGS] == [pair.plain(tokens).token_ids] * 3
    assert second.worker.statistics().pages_not_loaded == 0
    assert second.handover.statistics().taken == 3


def test_siblings_do_not_wait_for_a_partial_block_that_one_of_them_waits_for(pair, node, monkeypatch, eventually):
    for module in ("awaited_pages", "worker"):
        monkeypatch.setattr(f"kvstore.connector.{module}.PARTIAL_WAIT", PATIENCE)
    node.before_store = stops = StopsAt(1)
    tokens = prompt(40)
    ticket = prefill(pair.engine(node, "n", **BATCH_BY_BATCH), tokens)
    eventually(lambda: len(node.stored) == 2)
    second = pair.engine(node, "n")
    for name in SIBLINGS:
        second.add_request(name, tokens, MAX_TOKENS, ticket)
    answers = []
    while len(answers) < 2:
        answers += second.step()
    assert {answer.request_id for answer in answers} == {"d1", "d2"}
    stops.opened.set()
    assert [(answer.request_id, answer.tokens_loaded) for answer in second.run()] == [("d0", 39)]


@pytest.mark.parametrize("gone", SIBLINGS)
def test_a_sibling_that_is_aborted_leaves_the_others_alone(pair, node, gate, gone):
    tokens = prompt(40)
    first = pair.engine(node, "n")
    ticket = prefill(first, tokens)
    settle(first)
    node.before_load = gate
    second = pair.engine(node, "n")
    for name in SIBLINGS:
        second.add_request(name, tokens, MAX_TOKENS, ticket)
    while not gate.reached.is_set():
        second.step()
    second.abort(gone)
    gate.opened.set()
    answers = {answer.request_id: answer for answer in second.run()}
    assert answers.keys() == {*SIBLINGS} - {gone}
    assert {tuple(answer.token_ids) for answer in answers.values()} == {tuple(pair.plain(tokens).token_ids)}
    settle(second)
    assert not second._connector._awaited


def test_a_ticket_that_was_refused_counts_as_not_used(pair, node):
    tokens = prompt(40)
    first = pair.engine(node, "n")
    ticket = prefill(first, tokens)
    settle(first)
    second = pair.engine(node, "n")
    assert decode(second, prompt(45, "another"), ticket, "foreign").tokens_loaded == 0
    assert second.handover.statistics().refused == {"foreign": 1}
    assert decode(second, tokens, ticket).tokens_loaded == 39


def test_tickets_are_remembered_until_they_expire(pair, node, monkeypatch):
    first, second = pair.engine(node, "n"), pair.engine(node, "n")
    for length in (20, 40, 60):
        decode(second, prompt(length), prefill(first, prompt(length), f"p{length}"), f"d{length}")
    assert len(second.handover._claims) == 3
    monkeypatch.setattr("kvstore.connector.disagg.handover.MOST_CLAIMS", 3)
    decode(second, prompt(80), prefill(first, prompt(80), "p80"), "d80")
    assert len(second.handover._claims) == 3
    later = time.time() + LIFETIME + 1
    for engine in (first, second):
        monkeypatch.setattr(engine.handover, "_now", lambda: later)
    decode(second, prompt(100), prefill(first, prompt(100), "p100"), "d100")
    assert len(second.handover._claims) == 1


def test_other_requests_do_not_wait_for_them(pair, node, gate):
    node.before_store = gate
    tokens = prompt(100)
    ticket = prefill(pair.engine(node, "n"), tokens)
    second = pair.engine(node, "n")
    second.add_request("d", tokens, MAX_TOKENS, ticket)
    second.add_request("other", prompt(50), MAX_TOKENS)
    answers = []
    while not answers:
        answers = second.step()
    assert [answer.request_id for answer in answers] == ["other"]
    gate.opened.set()
    assert [answer.tokens_loaded for answer in second.run()] == [99]


def test_pages_that_never_come_are_computed_when_the_wait_is_over(pair, node):
    lost = node.__class__()
    tokens = prompt(100)
    ticket = prefill(pair.engine(lost, "n"), tokens)
    answer = decode(pair.engine(node, "n", wait=0.2), tokens, ticket)
    assert (answer.tokens_loaded, answer.tokens_computed) == (0, 100 + MAX_TOKENS - 1)
    assert answer.token_ids == pair.plain(tokens).token_ids


@pytest.mark.parametrize("place", [0, 2, 5, 6])
def test_a_page_that_was_refused_is_computed_at_once(pair, node, place):
    tokens = prompt(100)
    first = pair.engine(node, "n")
    ticket = prefill(first, tokens)
    settle(first)
    del node.stored[list(node.stored)[place]]
    answer = decode(pair.engine(node, "n"), tokens, ticket)
    assert answer.tokens_loaded == place * BLOCK_SIZE
    assert answer.token_ids == pair.plain(tokens).token_ids


@pytest.mark.parametrize("place", [0, 2, 5, 6])
def test_a_page_that_is_lost_on_its_way_is_computed(pair, node, place):
    tokens = prompt(100)
    first = pair.engine(node, "n")
    ticket = prefill(first, tokens)
    settle(first)
    node.lost.add((0, list(node.stored)[place]))
    answer = decode(pair.engine(node, "n"), tokens, ticket)
    assert answer.tokens_loaded == place * BLOCK_SIZE
    assert answer.token_ids == pair.plain(tokens).token_ids


def test_a_node_that_fails_costs_its_pages_and_nothing_more(pair, node, node_kind):
    tokens = prompt(40)
    ticket = prefill(pair.engine(node, "host 1"), tokens)

    def fail() -> None:
        raise ConnectionError("gone")

    node.before_lookup = fail
    own = node_kind()
    second = pair.engine(own, "host 2", {"host 1": node})
    answer = decode(second, tokens, ticket)
    assert (answer.tokens_loaded, answer.tokens_computed) == (0, 40 + MAX_TOKENS - 1)
    assert answer.token_ids == pair.plain(tokens).token_ids
    # Its own node has them now.
    assert decode(pair.engine(own, "host 2"), tokens, {}).tokens_loaded == 32


def test_a_peer_that_hangs_holds_up_nobody_elses_load(pair, node, node_kind, gate):
    own = node_kind()
    mine = prompt(50, "mine")
    decode(pair.engine(own, "host 2"), mine, {})
    settle(pair.engines[-1])
    tokens = prompt(40)
    first = pair.engine(node, "host 1")
    ticket = prefill(first, tokens)
    settle(first)
    node.before_load = gate
    second = pair.engine(own, "host 2", {"host 1": node})
    second.add_request("d", tokens, MAX_TOKENS, ticket)
    while not gate.reached.is_set():
        assert second.step() == []
    second.add_request("mine", mine, MAX_TOKENS)
    answers = []
    while not answers:
        answers = second.step()
    assert [(answer.request_id, answer.tokens_loaded) for answer in answers] == [("mine", 48)]
    gate.opened.set()
    assert [answer.tokens_loaded for answer in second.run()] == [39]


def expired(ticket: dict[str, Any]) -> dict[str, Any]:
    read = verify(ticket, KEY, time.time())
    return sign(type(read)(read.node_id, read.ticket_id, read.fingerprint, read.layout, read.num_tokens, 1.0), KEY)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ticket: ticket | {"ticket": "A" * 100}, "forged"),
        (lambda ticket: ticket | {"ticket": None}, "malformed"),
        (lambda ticket: ticket | {"ticket": "A" * 100_000}, "oversized"),
        (expired, "expired"),
    ],
)
def test_a_ticket_that_does_not_hold_is_counted_and_its_request_computed(pair, node, node_kind, change, reason):
    tokens = prompt(40)
    ticket = change(prefill(pair.engine(node, "host 1"), tokens))
    second = pair.engine(node_kind(), "host 2", {"host 1": node})
    asked = node.pages_asked
    answer = decode(second, tokens, ticket)
    assert (answer.tokens_loaded, answer.token_ids) == (0, pair.plain(tokens).token_ids)
    assert node.pages_asked == asked
    assert second.handover.statistics().refused == {reason: 1}


def test_a_node_that_is_not_configured_is_never_asked(pair, node, node_kind):
    tokens = prompt(40)
    ticket = prefill(pair.engine(node, "kv://10.0.0.1:7420"), tokens)
    second = pair.engine(node_kind(), "host 2")
    assert decode(second, tokens, ticket).tokens_loaded == 0
    assert second.handover.statistics().refused == {"unknown": 1}


def test_pages_of_other_blocks_or_another_key_are_foreign(pair, node):
    tokens = prompt(40)
    ticket = prefill(pair.engine(node, "n"), tokens)
    other = pair.engine(node, "n", block_size=32)
    assert decode(other, tokens, ticket).token_ids == pair.plain(tokens).token_ids
    assert other.handover.statistics().refused == {"foreign": 1}
    other = pair.engine(node, "n", key=bytes(32))
    decode(other, tokens, ticket)
    assert other.handover.statistics().refused == {"forged": 1}


def test_who_is_aborted_gives_no_ticket_and_leaks_nothing(pair, node):
    first = pair.engine(node, "n", token_budget=16)
    first.add_request("p", prompt(100), 1, {"do_remote_decode": True})
    first.step()
    answer = first.abort("p")
    assert answer is not None
    assert answer.ticket is None
    first.run()
    assert first.handover.statistics().given == 0


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_decode_that_is_aborted_leaks_nothing(pair, node, gate, when):
    tokens = prompt(100)
    first = pair.engine(node, "n")
    if when == "waiting":
        node.before_store = gate
    ticket = prefill(first, tokens)
    if when == "loading":
        settle(first)
        node.before_load = gate
    second = pair.engine(node, "n")
    second.add_request("d", tokens, MAX_TOKENS, ticket)
    while not gate.reached.is_set():
        second.step()
    second.step()
    second.abort("d")
    gate.opened.set()
    settle(second)
    assert second._connector is not None
    assert not second._connector._awaited


def test_many_requests_with_little_room(pair, node, node_kind):
    """Preempted, waiting, loading at once: every answer is that of an engine without a cache."""
    first = pair.engine(node, "host 1", num_blocks=24)
    second = pair.engine(node_kind(), "host 2", {"host 1": node}, num_blocks=16, max_requests=4)
    prompts = {f"{length} {turn}": prompt(length, str(turn)) for length in (20, 47, 90) for turn in range(4)}
    tickets = {name: prefill(first, tokens, name) for name, tokens in prompts.items()}
    for name, tokens in prompts.items():
        second.add_request(name, tokens, MAX_TOKENS, tickets[name])
    answers = {answer.request_id: answer for answer in second.run()}
    for name, tokens in prompts.items():
        assert answers[name].token_ids == pair.plain(tokens).token_ids
    assert sum(answer.tokens_loaded for answer in answers.values()) > 400


@pytest.mark.parametrize("life", range(8))
def test_random_lives(pair, node, node_kind, seed, life, monkeypatch):
    """Two engines of each kind with few blocks, pages that get lost, nodes that fail, aborts: no answer is wrong."""
    monkeypatch.setattr(
        kvstore.connector.health, "BACKOFF", 0.01
    )  # or most of it would be over before a node is asked again
    rng = random.Random(f"{seed} {life}")
    own = node_kind()
    loaded = 0

    def fail_sometimes() -> None:
        if rng.random() < 0.1:
            raise ConnectionError("told to fail")

    for each in (node, own):
        each.before_load = each.before_lookup = each.before_store = fail_sometimes
    small = {"num_blocks": 20, "max_requests": 3, "token_budget": 48, "wait": 0.3}
    givers = [pair.engine(node, "host 1", **small) for _ in range(2)]
    takers = [pair.engine(own, "host 2", {"host 1": node}, **small), pair.engine(node, "host 1", **small)]
    system = prompt(40, "system")
    prompts = [[*system, *prompt(length, str(length))] for length in (1, 9, 24, 40, 77, 100)]
    plain = [pair.plain(tokens).token_ids for tokens in prompts]
    asked: dict[str, int] = {}
    tickets: list[tuple[int, dict[str, Any]]] = []
    for number in range(60):
        name, place = str(number), rng.randrange(len(prompts))
        if rng.random() < 0.5 or not tickets:
            engine, transfer, length = rng.choice(givers), {"do_remote_decode": True}, 1
        else:
            # Now and then a ticket that was used before, or that is for another prompt.
            at, transfer = rng.choice(tickets)
            place = at if rng.random() < 0.9 else place
            engine, length = rng.choice(takers), MAX_TOKENS
        asked[name] = place
        engine.add_request(name, prompts[place], length, transfer)
        if rng.random() < 0.1:
            engine.abort(name)
        for each in (*givers, *takers):
            for _ in range(rng.randrange(4)):
                answers = each.step()
                for answer in answers:
                    right = plain[asked[answer.request_id]]
                    assert answer.token_ids == right[: len(answer.token_ids)]
                    loaded += answer.tokens_loaded
                    if answer.ticket is not None:
                        tickets.append((asked[answer.request_id], dict(answer.ticket)))
        if node.stored and rng.random() < 0.2:
            node.stored.pop(rng.choice(list(node.stored)), None)
    for engine in (*givers, *takers):
        for answer in engine.run():
            assert answer.token_ids == plain[asked[answer.request_id]][: len(answer.token_ids)]
            loaded += answer.tokens_loaded
    assert loaded > 100
    assert sum(engine.handover.statistics().taken for engine in takers) > 5
