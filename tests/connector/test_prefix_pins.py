"""Pins that requests ask for: made in the background, of all parts of a page, and no trouble to anybody."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.connector import prefix_pins
from kvstore.connector.prefix_pins import PrefixPins
from kvstore.errors import PermissionDeniedError, UnavailableError

PATIENCE = 60.0


class FakeNamespace:
    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.asked: list[tuple[tuple[bytes, ...], int]] = []
        self.called = threading.Semaphore(0)
        self.open = threading.Event()
        self.open.set()

    def pin(self, hashes: Sequence[bytes], seconds: int) -> int:
        self.asked.append((tuple(hashes), seconds))
        self.called.release()
        assert self.open.wait(PATIENCE)
        if isinstance(self.answer, Exception):
            raise self.answer
        return len(hashes) if self.answer is None else int(self.answer)


def test_all_parts_and_groups_are_pinned() -> None:
    parts = [[FakeNamespace(), FakeNamespace()], [FakeNamespace(), FakeNamespace()]]
    pins = PrefixPins(parts)  # type: ignore[arg-type]
    pins.keep([[b"a", b"b"], [b"c"]], 60)
    pins.keep([[b"d"], []], 90)
    for first, second in parts:
        for _ in range(2):
            assert first.called.acquire(timeout=PATIENCE)
        assert second.called.acquire(timeout=PATIENCE)
        assert first.asked == [((b"a", b"b"), 60), ((b"d",), 90)]
        assert second.asked == [((b"c",), 60)]
    pins.shutdown()
    thread = pins._thread
    assert thread is not None
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert pins.pinned == 2 * 4


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (PermissionDeniedError("needs the right admin"), "this engine's token may not pin: needs the right admin"),
        (UnavailableError("gone"), "a prefix could not be kept: gone"),
        (ValueError("nobody expects this"), "a prefix could not be kept: ValueError('nobody expects this')"),
        (1, "1 of 2 pages of a prefix are kept: others are not there, or pinned pages have their share of the arena"),
    ],
)
def test_what_could_not_be_pinned_is_said(answer: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
    namespace = FakeNamespace(answer)
    pins = PrefixPins([[namespace]])  # type: ignore[list-item]
    pins.keep([[b"a", b"b"]], 60)
    pins.keep([[b"a", b"b"]], 60)  # the next one is tried all the same
    for _ in range(2):
        assert namespace.called.acquire(timeout=PATIENCE)
    pins.shutdown()
    assert pins._thread is not None
    pins._thread.join(PATIENCE)
    assert [each.message for each in caplog.records] == [caplog.records[0].message]
    assert says in caplog.text


def test_a_node_that_hangs_is_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefix_pins, "MOST_WAITING", 2)
    namespace = FakeNamespace()
    namespace.open.clear()
    pins = PrefixPins([[namespace]])  # type: ignore[list-item]
    pins.keep([[b"a"]], 60)
    assert namespace.called.acquire(timeout=PATIENCE)
    for _ in range(3):
        pins.keep([[b"b"]], 60)
    assert "2 prefixes wait to be kept, and no more" in caplog.text
    pins.shutdown()
    namespace.open.set()
    assert pins._thread is not None
    pins._thread.join(PATIENCE)
    assert len(namespace.asked) == 1  # what waited is left


def test_where_no_thread_is_to_be_had_the_next_request_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    namespace = FakeNamespace()
    pins = PrefixPins([[namespace]])  # type: ignore[list-item]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        pins.keep([[b"a"]], 60)
    assert "a prefix could not be kept: can't start new thread" in caplog.text
    pins.keep([[b"b"]], 60)
    assert namespace.called.acquire(timeout=PATIENCE)
    pins.shutdown()
    assert pins._thread is not None
    pins._thread.join(PATIENCE)
    assert namespace.asked == [((b"b",), 60)]


def test_without_a_request_for_it_no_thread_runs() -> None:
    pins = PrefixPins([[]])
    pins.shutdown()
    assert pins._thread is None
