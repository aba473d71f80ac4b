"""The base of servers of framed connections: a thread accepts them, each is served by its own, and all end in order."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kvstore.errors import KVStoreError
from kvstore.wire.channel import Channel
from kvstore.wire.messages import reason_of

_STOP_SECONDS = 1.0
"""How long threads that were cut off have to end."""
_RETRY_SECONDS = 0.05
"""Before another connection is accepted when there is no descriptor for it."""
Connection = TypeVar("Connection")
"""What a server makes of an accepted socket."""


class FrameServer(ABC, Generic[Connection]):
    """Accepts connections from the moment it is made until ``stop``; call its ``__init__`` last.

    Args:
        listener: a listening socket, closed by ``stop``.
        name: of the threads.
    """

    def __init__(self, listener: socket.socket, name: str) -> None:
        self._listener = listener
        self._name = name
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._channels: dict[Channel, bool] = {}
        """Connections that may make requests, and whether one is being worked on."""
        self._threads: set[threading.Thread] = set()
        self._stopping = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._channels)

    def stop(self, grace: float) -> None:
        """Take no more connections and requests, and end those under way after ``grace`` seconds."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(_STOP_SECONDS)
        self._listener.close()
        with self._lock:
            for channel, busy in self._channels.items():
                if not busy:
                    channel.cut()
            self._idle.wait_for(lambda: not any(self._channels.values()), grace)
            self._cut_all()
            threads = list(self._threads)
        end = time.monotonic() + _STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _cut_all(self) -> None:
        """The caller has the lock."""
        for channel in self._channels:
            channel.cut()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection = self._take_in(self._listener.accept()[0])
            except (OSError, MemoryError):  # no descriptors or memory left, or the end
                self._stopping.wait(_RETRY_SECONDS)
                continue
            if connection is None:
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name=self._name, daemon=True)
            with self._lock:
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._forget(connection, thread)

    @abstractmethod
    def _take_in(self, connected: socket.socket) -> Connection | None:
        """Count a connection; None: it was refused and closed."""

    @abstractmethod
    def _serve(self, connection: Connection) -> None:
        """Answer a connection's requests until it ends, then forget it."""

    @abstractmethod
    def _forget(self, connection: Connection, thread: threading.Thread) -> None:
        """Close a connection, and count neither it nor its thread any more."""


def told(error: KVStoreError) -> bytes:
    """An error as the message of a ``FAILED`` frame: its reason, a line break, and its text."""
    return f"{reason_of(error)}\n{error}".encode()[:4096]
