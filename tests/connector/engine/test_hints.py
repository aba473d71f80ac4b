"""Hints of requests: held against their bounds, and what can't be followed is said in words."""

from __future__ import annotations

import functools

import pytest

from kvstore.connector.engine.hints import Hints, parse_hints

MOST = 60


def hints(**given: object) -> Hints:
    read, wrong = parse_hints({f"kvstore_{key}": value for key, value in given.items()}, MOST)
    assert wrong == []
    return read


def test_nothing_asked_for() -> None:
    for params in (None, {}, {"do_remote_decode": True}, "text", {5: 6}):
        assert parse_hints(params, MOST) == (Hints(), [])


def test_what_can_be_asked_for() -> None:
    assert hints(load=False) == Hints(load=False)
    assert hints(store=False) == Hints(store=False)
    assert hints(store=True, store_generated=False, keep_minutes=60) == Hints(generated=False, keep_seconds=3600)
    assert hints(store_first=1) == Hints(first=1)
    assert hints(store_last=1_000_000) == Hints(last=1_000_000)
    asked = {"kvstore_shared_prefix": "assistant"}
    assert parse_hints(asked, MOST, ["assistant"]) == (Hints(shared_prefix="assistant"), [])


@pytest.mark.parametrize(
    ("params", "says", "left"),
    [
        ({"kvstore_lod": False}, "'kvstore_lod' is no hint; did you mean kvstore_load?", Hints()),
        ({"kvstore_zzz_q": 1}, "known are kvstore_load, kvstore_store,", Hints()),
        ({"kvstore_load": "no"}, "kvstore_load must be true or false, got 'no'", Hints()),
        ({"kvstore_keep_minutes": 61}, "kvstore_keep_minutes must be a whole number from 1 to 60, got 61", Hints()),
        ({"kvstore_keep_minutes": True}, "a whole number from 1 to 60, got True", Hints()),
        ({"kvstore_keep_minutes": "x" * 10**6}, f"got '{'x' * 39}…", Hints()),
        ({"kvstore_keep_minutes": functools.reduce(lambda deep, _: [deep], range(10**5), 0)}, "got [[[", Hints()),
        ({f"kvstore_load{'_' * 61}": 1}, "known are kvstore_load, kvstore_store,", Hints()),
        ({f"kvstore_x{number}": 1 for number in range(33)}, "33 hints, at most 32 are read; none", Hints(store=False)),
        (
            {"kvstore_shared_prefix": "assistant"},
            "must be a name in this engine's shared_prefixes, which has none, got 'assistant'",
            Hints(),
        ),
        # Who wrote these wanted less to be stored: nothing is.
        ({"kvstore_store": "false"}, "got 'false'; nothing of the request is stored", Hints(store=False)),
        ({"kvstore_store_last": 0}, "from 1 to 1000000, got 0; nothing of the request is", Hints(store=False)),
        ({"kvstore_store_genrated": False}, "did you mean kvstore_store_generated?; not", Hints(store=False)),
        (
            {"kvstore_store_first": 1, "kvstore_store_last": 1},
            "kvstore_store_first and kvstore_store_last exclude each other",
            Hints(store=False, first=1),
        ),
    ],
)
def test_what_cannot_be_followed(params: dict[str, object], says: str, left: Hints) -> None:
    read, [text] = parse_hints(params, MOST)
    assert says in text
    assert len(text) < 250
    assert read == left


def test_where_nothing_is_kept() -> None:
    read, [text] = parse_hints({"kvstore_keep_minutes": 1}, 0)
    assert read == Hints()
    assert "left out: this engine keeps nothing for requests (most_keep_minutes)" in text


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        (Hints(), (0, 47)),
        (Hints(generated=False), (0, 30)),
        (Hints(first=2), (0, 16)),
        (Hints(first=3), (0, 24)),
        (Hints(first=4), (0, 24)),  # the prompt has three full blocks
        (Hints(last=1), (16, 47)),
        (Hints(last=9), (0, 47)),
        (Hints(last=1, generated=False), (16, 30)),
    ],
)
def test_which_tokens_are_stored(asked: Hints, tokens: tuple[int, int]) -> None:
    """Of a prompt of 30 tokens, three full blocks of 8, and 17 behind it."""
    assert asked.stored_tokens(30, 47, 8) == tokens
    assert asked.stored_tokens(30, 10, 8) == (tokens[0], min(10, tokens[1]))
