"""Work that is cut short: by what it waits for, exactly while it does."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.client.paths.deadline import locked
from kvstore.errors import UnavailableError
from kvstore.host.cutting import (
    LAST_SECONDS,
    Work,
    begin_cuttable,
    check_going,
    cuttable,
    doing,
    end_cuttable,
    seconds_given,
    work_here,
)


def test_a_cut_ends_what_is_waited_for_and_nothing_that_is_not_any_more() -> None:
    work, ended = Work(time.monotonic() + 60.0), []
    first, second = (lambda: ended.append("first")), (lambda: ended.append("second"))
    with doing(work):
        begin_cuttable(first)
        assert not end_cuttable(first)
        with cuttable(second):
            work.cut()
            work.cut()
        assert ended == ["second"]
        begin_cuttable(first)
        assert ended == ["second", "first"], "at once: it was given up already"
        assert end_cuttable(first), "it was ended"
        with pytest.raises(UnavailableError, match="given up"):
            check_going()
    check_going()
    assert work_here() is None


def test_a_call_behind_the_cut_is_short() -> None:
    work = Work(time.monotonic() + 60.0)
    assert work.seconds(50.0) == 50.0
    work.cut()
    assert 0.0 <= work.seconds(50.0) <= LAST_SECONDS


def test_seconds_are_those_of_the_work() -> None:
    assert seconds_given(5.0) == 5.0
    with doing(Work(time.monotonic() - 1.0)):
        assert seconds_given(5.0) == 0.0


def test_nobody_waits_for_anothers_lock_who_was_given_up() -> None:
    work, lock = Work(time.monotonic() + 60.0), threading.Lock()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            with doing(work), locked(lock, time.monotonic() + 3000.0):
                pass
        except UnavailableError as error:
            errors.append(error)

    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        work.cut()
        thread.join(60.0)
        assert errors
