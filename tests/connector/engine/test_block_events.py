"""Which blocks listeners are told of, and when they are told that these have gone."""

from __future__ import annotations

import pytest

from kvstore.connector.engine import block_events
from kvstore.connector.engine.block_events import BlockEvents, EventBlock

ONE, TWO = (EventBlock(name, None, [1, 2], 0) for name in ("one", "two"))


def test_a_block_is_told_of_once_when_it_is_stored() -> None:
    blocks = BlockEvents(ranks=1)
    blocks.plan(b"1", ONE)
    assert blocks.take() == ([], [])
    blocks.store(0, [b"1", b"unknown"])
    blocks.plan(b"1", ONE)
    blocks.store(0, [b"1"])
    assert blocks.take() == ([ONE], [])
    assert blocks.take() == ([], [])


def test_all_ranks_must_have_stored_their_parts() -> None:
    blocks = BlockEvents(ranks=2)
    blocks.plan(b"1", ONE)
    blocks.store(0, [b"1"])
    assert blocks.take() == ([], [])
    blocks.store(0, [b"1"])
    assert blocks.take() == ([ONE], [])


def test_what_a_lookup_misses_is_taken_back_once_if_it_was_announced() -> None:
    blocks = BlockEvents(ranks=1)
    blocks.plan(b"1", ONE)
    blocks.store(0, [b"1"])
    for _ in range(2):
        blocks.miss(0, b"1")
        blocks.miss(0, b"2")
    assert blocks.take() == ([ONE], [ONE])
    blocks.plan(b"1", ONE)
    blocks.store(0, [b"1"])
    assert blocks.take() == ([ONE], [])


def test_it_forgets_the_oldest_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "REMEMBERED", 1)
    blocks = BlockEvents(ranks=1)
    blocks.plan(b"1", ONE)
    blocks.plan(b"2", TWO)
    blocks.store(0, [b"1", b"2"])
    assert blocks.take() == ([TWO], [])


def test_what_nobody_takes_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "REMEMBERED", 2)
    blocks = BlockEvents(ranks=1)
    for number in range(5):
        name = bytes([number])
        blocks.plan(name, EventBlock(name, None, [1], 0))
        blocks.store(0, [name])
        blocks.miss(0, name)
    stored, removed = blocks.take()
    assert [block.name for block in stored] == [block.name for block in removed] == [b"\3", b"\4"]
