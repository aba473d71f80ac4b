"""Progress on stderr: on a terminal one line that changes, elsewhere a line for every ten percent, or nothing."""

from __future__ import annotations

import io
import sys

import pytest

from kvstore.cli import progress
from kvstore.cli.progress import Progress
from kvstore.units import format_size


class Stderr(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def stderr(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> Stderr:
    written = Stderr(terminal=terminal)
    monkeypatch.setattr(sys, "stderr", written)
    return written


def test_a_terminal_has_a_line_that_changes(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    written = stderr(monkeypatch, terminal=True)
    shown = Progress("kvstore bench disk", 200)
    shown.advance(20)
    clock.append(102.0)
    shown.advance(20)
    assert written.getvalue() == "", "what is done in two seconds needs none"
    clock.append(102.1)
    for _ in range(3):
        shown.advance(1)
    shown.end()
    assert written.getvalue() == "\rkvstore bench disk: 20 %\rkvstore bench disk: 21 %\n"


def test_nothing_is_written_elsewhere(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    written = stderr(monkeypatch, terminal=False)
    shown = Progress("kvstore bench disk", 2)
    clock.append(200.0)
    shown.advance(2)
    shown.end()
    assert written.getvalue() == ""


def test_lines_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    written = stderr(monkeypatch, terminal=False)
    shown = Progress("kvstore check", show_size=format_size, lines=True)
    clock.append(200.0)
    for done in (0, 5 << 20, 9 << 20, 20 << 20, 29 << 20, 100 << 20):
        shown.update(done, 100 << 20)
    shown.end()
    lines = [f"kvstore check: {percent} % of 100 MiB\n" for percent in (0, 20, 100)]
    assert written.getvalue() == "".join(lines)
