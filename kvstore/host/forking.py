"""Forks: objects that own sockets, file locks or a store are told in each forked child, and give these up there.

A fork copies all of them: the child's descriptors are its parent's connections and locks, and a lock that another
thread of the parent held is held in the child for ever. Each owner's ``forked()`` is called by the child's one thread,
before anything else runs in it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


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


def _forked() -> None:
    failed: Exception | None = None
    for owner in list(_inherited):
        try:
            owner.forked()
        except Exception as error:  # noqa: BLE001 - the others are told all the same
            failed = error
    if failed is not None:
        raise failed  # Python says so on stderr, and goes on


os.register_at_fork(after_in_child=_forked)
