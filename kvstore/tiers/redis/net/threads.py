"""Threads for each server, so that one that hangs holds up no other, for callers who ask several at once.

Each server has its own: calls that hang at one must not keep others from servers that are well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial

from kvstore.segments.io_threads import IoThreads
from kvstore.tiers.tier import READER


class Task:
    """Work that is done once, by whoever gets to it first, or not at all."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._turn: Future[None] = Future()

    def do(self) -> None:
        """Do it here and now, unless somebody has begun, or has given it up."""
        if self._turn.set_running_or_notify_cancel():
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits gets it
                self._turn.set_exception(error)
            else:
                self._turn.set_result(None)

    def end(self, deadline: float) -> None:
        """Return when it is done, and raise what it raised; one that nobody has begun by ``deadline``
        (``time.monotonic``) is given up."""
        try:
            self._turn.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if not self._turn.cancel():
                self._turn.result()  # it has the same deadline: it ends now


class ServerThreads:
    """Threads, started when they are needed; readers take turns. Safe for threads.

    Args:
        most: threads.
        name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._threads = IoThreads(most, name=name)

    def start(self, work: Callable[[], None]) -> Task:
        """Let a thread do some work; where none can be had, it is done before this returns."""
        task = Task(partial(copy_context().run, work))
        try:
            self._threads.submit_all([task.do], READER.get())
        except OSError:  # no thread can be started, or the server was let go
            task.do()
        return task

    def close(self) -> None:
        """Let the threads go, each behind what it is doing."""
        self._threads.close()
