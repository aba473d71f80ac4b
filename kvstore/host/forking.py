"""Forks: objects that own sockets, file locks or a store are told in each forked child, and give these up there.

A fork copies all of them: the child's descriptors are its parent's connections and locks, and a lock that another
thread of the parent held is held in the child for ever. Each owner's ``forked()`` is called by the child's one thread,
before anything else runs in it.

gRPC's core passes over its own handlers at a fork while another thread is in a call, and one in several hundred such
children crashes in it. So a fork waits a moment for these calls to end: :func:`unforked`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LONGEST_WAIT = 1.0
"""Seconds that a fork waits at most for calls under way, and that calls wait for a fork."""


class ForkAware(Protocol):
    """An owner of something that a forked child has from its parent, and must not use as it is."""

    def forked(self) -> None:
        """Give it up in a child: close descriptors without a word to the other end, and replace locks. Must not raise,
        and must change nothing that the parent has."""
        ...


_inherited: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register_forked(owner: ForkAware) -> None:
    """Call ``owner.forked()`` in every child that this process forks while ``owner`` lives; it is not kept alive."""
    _inherited.add(owner)


def renewed(event: threading.Event) -> threading.Event:
    """An event for a child in the place of its parent's, whose lock another thread may have had."""
    fresh = threading.Event()
    if event.is_set():
        fresh.set()
    return fresh


class _Calls:
    """This process's calls under way that no fork should come between, and the forks that wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._forks = 0

    def begin(self) -> None:
        """A call; it waits for a fork, but not for long."""
        with self._changed:
            if self._forks:
                self._changed.wait_for(lambda: not self._forks, LONGEST_WAIT)
            self._under_way += 1

    def end(self) -> None:
        """It is over."""
        with self._changed:
            self._under_way -= 1
            if self._forks:
                self._changed.notify_all()

    def begin_fork(self) -> None:
        """A fork; it waits for the calls, but not for long."""
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self._under_way, LONGEST_WAIT)

    def end_fork(self) -> None:
        """It is over, in the parent."""
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()


_calls = _Calls()


@contextmanager
def unforked() -> Iterator[None]:
    """A call that a fork waits for, :data:`LONGEST_WAIT` at most."""
    calls = _calls
    calls.begin()
    try:
        yield
    finally:
        if calls is _calls:  # else this is a child that was forked in the call, and nobody waits for it
            calls.end()


def _forked() -> None:
    global _calls
    _calls = _Calls()  # the parent's threads are not here, and one of them may have had its lock
    failed: Exception | None = None
    for owner in list(_inherited):
        try:
            owner.forked()
        except Exception as error:  # noqa: BLE001 - the others are told all the same
            failed = error
    if failed is not None:
        raise failed  # Python says so on stderr, and goes on


os.register_at_fork(
    before=lambda: _calls.begin_fork(), after_in_parent=lambda: _calls.end_fork(), after_in_child=_forked
)
