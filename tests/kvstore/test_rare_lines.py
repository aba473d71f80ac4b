from __future__ import annotations

import logging
from pathlib import Path

import pytest
from disk_tiers import Clock

from kvstore.rare_lines import RareLines, one_line

_log = logging.getLogger(__name__)


def test_lines_are_rare_and_say_what_they_leave_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lines = RareLines(clock=clock)
    for number in range(5):
        lines.say(_log.warning, "failed %d", number)
    clock.now = 11
    lines.say(_log.warning, "failed %d", 5)
    clock.now = 30
    lines.say(_log.warning, "failed %d", 6)
    assert caplog.messages == ["failed 0", "failed 5 (4 more such lines were held back)", "failed 6"]


def test_a_line_that_does_not_count_what_was_left_out_is_as_rare(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lines = RareLines(60.0, clock)
    for clock.now in (0.0, 59.0, 60.0):
        lines.say(_log.warning, "at %g", clock.now, count=False)
    assert caplog.messages == ["at 0", "at 60"]


def test_a_line_comes_from_where_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The filter of repeated lines tells kinds apart by that: two parts may say something in one second."""
    RareLines().say(_log.warning, "failed")
    [record] = caplog.records
    assert Path(record.pathname) == Path(__file__)


def test_what_a_client_chose_neither_ends_a_line_nor_fills_it() -> None:
    assert one_line("cmpl-12-ä") == "cmpl-12-ä"
    assert one_line("a\nWARNING forged\r\x1b[31m") == "a\\nWARNING forged\\r\\x1b[31m"
    assert len(one_line("x" * 1000)) == 100
