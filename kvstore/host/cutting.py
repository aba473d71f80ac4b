"""Work that another thread may cut short: what it waits for ends at once, and it begins nothing more.

An awaited operation of :mod:`kvstore.aio` whose task is cancelled is such work. The thread that does it says by what
each of its waits ends (a connection is shut down, a call cancelled); whoever gives it up has all of that done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import UnavailableError

LAST_SECONDS = 0.5
"""How long a call may take that is begun behind the cut: to tell the node what it need not keep any more."""


class Work:
    """What one operation does, on one thread or several, until ``deadline`` (on the clock of ``time.monotonic``)."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._cuts: list[Callable[[], object]] = []
        self._cut_at: float | None = None
        self._lock = threading.Lock()

    @property
    def is_cut(self) -> bool:
        """Whether it was given up."""
        return self._cut_at is not None

    def cut(self) -> None:
        """End what it waits for."""
        with self._lock:  # what it does not use any more may be another one's by now
            if self._cut_at is None:
                self._cut_at = time.monotonic()
                for cut in self._cuts:
                    cut()

    def add(self, cut: Callable[[], object]) -> None:
        """From now on it may wait for what ``cut`` ends."""
        with self._lock:
            self._cuts.append(cut)
            if self._cut_at is not None:
                cut()

    def remove(self, cut: Callable[[], object]) -> bool:
        """It does not any more. Returns whether it was ended."""
        with self._lock:
            if cut not in self._cuts:
                return False
            self._cuts.remove(cut)
            return self._cut_at is not None

    def seconds(self, seconds: float) -> float:
        """How long a call may take that is begun now and might take ``seconds``."""
        if self._cut_at is None:
            return seconds
        return max(0.0, min(seconds, self._cut_at + LAST_SECONDS - time.monotonic()))


class _Own(threading.local):
    work: Work | None = None
    """What this thread does, where that may be cut short."""


_own = _Own()


def work_here() -> Work | None:
    """What this thread does, where that may be cut short."""
    return _own.work


@contextmanager
def doing(work: Work | None) -> Iterator[None]:
    """Meanwhile what this thread does is part of ``work``."""
    before, _own.work = _own.work, work
    try:
        yield
    finally:
        _own.work = before


def check_going() -> None:
    """Begin nothing behind a cut.

    Raises:
        UnavailableError: what this thread does was given up.
    """
    if _own.work is not None and _own.work.is_cut:
        raise UnavailableError("the operation was given up")


def seconds_given(seconds: float) -> float:
    """``seconds``, or what is left for the work of which this thread's is a part."""
    work = _own.work
    return seconds if work is None else min(seconds, max(0.0, work.deadline - time.monotonic()))


def begin_cuttable(cut: Callable[[], object]) -> None:
    """This thread may wait from now on for what ``cut`` ends: at once, if it was given up already."""
    if _own.work is not None:
        _own.work.add(cut)


def end_cuttable(cut: Callable[[], object]) -> bool:
    """It does not any more. Returns whether that was ended."""
    return _own.work is not None and _own.work.remove(cut)


@contextmanager
def cuttable(cut: Callable[[], object]) -> Iterator[None]:
    """Meanwhile this thread may wait for what ``cut`` ends."""
    begin_cuttable(cut)
    try:
        yield
    finally:
        end_cuttable(cut)
