"""One client's dealings with one node: calls that move no pages, and the path that its pages take."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore.client.paths.deadline import locked, time_left
from kvstore.client.paths.path import Control, OpenedNamespace, Path
from kvstore.host.forking import tell_children
from kvstore.host.uninterrupted import uninterrupted
from kvstore.layout import Layout


class Session:
    """What all namespaces of a client share. Safe for threads.

    Args:
        control: calls that move no pages.
        timeout: seconds that any one method of the client may take.
        make_path: given the arena's folder and a timeout, a path for pages.
    """

    def __init__(self, control: Control, timeout: float, make_path: Callable[[str, float], Path]) -> None:
        self.control = control
        self.timeout = timeout
        self.path: Path | None = None
        """The way that pages take now; None before a namespace was opened."""
        self.directory = ""
        """The folder of the arena that it was made for."""
        self._make_path = make_path
        self._lock = threading.Lock()
        tell_children(self)

    def forked(self) -> None:
        """In a child: no other thread is at work here any more."""
        self._lock = threading.Lock()

    def open(self, layout: Layout, durability: str, deadline: float) -> tuple[OpenedNamespace, Path]:
        """Open a namespace at the node, which may have come back with its arena elsewhere: then by another path.

        Raises:
            Exception: as :meth:`kvstore.Client.namespace`.
        """
        opened = self.control.open_namespace(layout, durability, time_left(deadline))
        with locked(self._lock, deadline):
            if self.path is None or self.directory != opened.arena_directory:
                old, self.path = self.path, self._make_path(opened.arena_directory, time_left(deadline))
                self.directory = opened.arena_directory
                if old is not None:
                    old.close()
            return opened, self.path

    @uninterrupted
    def close(self) -> None:
        """Let go of the node; calls under way fail. An embedded store ends them first, and writes back."""
        self.control.close()  # before the lock: whoever has it may be waiting for the node
        with self._lock:
            if self.path is not None:
                self.path.close()
