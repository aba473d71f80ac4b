"""The server of local connections: frames over the Unix socket in the arena's folder (:mod:`kvstore.wire.local`)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from kvstore.errors import FormatError, KVStoreError, LimitExceededError, ResourceError
from kvstore.security.socket_group import SocketGroup
from kvstore.service.call_times import CallTimes
from kvstore.service.page_calls import PageCalls
from kvstore.service.sockets.frame_server import FrameServer, told
from kvstore.wire.frame import NUMBERED, Kind
from kvstore.wire.local import (
    CALLS,
    SOCKET_NAME,
    Calls,
    at_socket,
)

METHODS = {kind: "Local/" + kind.name.title().replace("_", "") for kind in CALLS}
"""What each call is in metrics: by gRPC it would be another service's."""
MOST_CONNECTIONS = 256
IDLE_SECONDS = 120.0
"""How long a connection may wait for its next request."""
MESSAGE_SECONDS = 5.0
"""How long the rest of a request, or taking an answer, may take."""
_LOOK_SECONDS = 0.001
"""How long the next part of a store is looked for without sleeping: to send it takes its client half the time then."""
_log = logging.getLogger(__name__)


class LocalServer(FrameServer[Calls]):
    """Listens in an arena's folder, and answers the calls of clients that share it.

    Args:
        calls: answers them.
        directory: the folder; its owner holds its lock.
        sharers: who besides this user may connect.
        times: told how long calls take.

    Raises:
        ResourceError: there can be no socket.
    """

    def __init__(
        self,
        calls: PageCalls,
        directory: Path,
        sharers: SocketGroup = SocketGroup(),  # noqa: B008
        times: CallTimes | None = None,
    ) -> None:
        self._calls = calls
        self._times = times
        self._short: dict[Kind, Callable[[Any], Message]] = {
            Kind.PREPARE_STORE: calls.prepare_store,
            Kind.COMPLETE_STORE: calls.complete_store,
            Kind.COMPLETE_LOAD: calls.complete_load,
            Kind.LOOKUP: calls.lookup,
        }
        self._path = directory / SOCKET_NAME
        self._looking = threading.Lock()
        """Held by the one thread that does not sleep."""
        super().__init__(_listen(self._path, sharers), "kvstore-local")

    def stop(self, grace: float) -> None:
        """Remove the socket, and stop as the base class does."""
        self._path.unlink(missing_ok=True)
        super().stop(grace)

    def _take_in(self, connected: socket.socket) -> Calls | None:
        channel = Calls(connected, time.monotonic() + MESSAGE_SECONDS)
        with self._lock:
            full = len(self._channels) >= MOST_CONNECTIONS
            if not full:
                self._channels[channel] = False
        if not full:
            return channel
        with contextlib.suppress(KVStoreError):
            error = LimitExceededError(f"{MOST_CONNECTIONS} connections are open, the limit")
            channel.send(Kind.FAILED, told(error))
        channel.close()
        return None

    def _serve(self, channel: Calls) -> None:
        try:
            channel.answering = NUMBERED
            channel.send(Kind.READY)
            while not self._stopping.is_set():
                self._answer(channel)
        except (KVStoreError, OSError) as error:
            _log.debug("a connection in the arena's folder ended: %s", error)
        finally:
            self._forget(channel, threading.current_thread())

    def _forget(self, channel: Calls, thread: threading.Thread) -> None:
        with self._lock:
            self._channels.pop(channel, None)
            self._threads.discard(thread)
            self._idle.notify_all()
        channel.close()

    def _answer(self, channel: Calls) -> None:
        """One request.

        Raises:
            KVStoreError: the connection is of no more use.
        """
        channel.deadline = time.monotonic() + IDLE_SECONDS
        channel.wait()
        self._channels[channel] = True
        begun = time.perf_counter()
        try:
            channel.deadline = time.monotonic() + MESSAGE_SECONDS
            header, message = channel.receive()
            channel.answering = header.number
            if header.kind not in CALLS:
                raise FormatError(f"a frame of kind {header.kind.name} is no request")
            try:
                request: Any = CALLS[header.kind][0].FromString(message)
            except DecodeError as error:
                raise FormatError("a request's message can't be read") from error
            with closing(self._replies(header.kind, request)) as replies:
                for kind, reply in replies:
                    channel.deadline = time.monotonic() + MESSAGE_SECONDS
                    channel.send(kind, reply)
            if self._times is not None:
                self._times.took(METHODS[header.kind], time.perf_counter() - begun)
            if header.kind is Kind.COMPLETE_STORE:
                if not request.part_slots:
                    self._calls.catch_up()
                elif self._looking.acquire(blocking=False):
                    try:
                        channel.look(_LOOK_SECONDS)
                    finally:
                        self._looking.release()
        finally:
            with self._lock:
                self._channels[channel] = False
                if self._stopping.is_set():
                    self._idle.notify_all()

    def _replies(self, kind: Kind, request: Any) -> Generator[tuple[Kind, bytes]]:
        try:
            if kind is Kind.PREPARE_LOAD:
                with closing(self._calls.load_parts(request)) as parts:
                    for part, last in parts:
                        yield Kind.ANSWER if last else Kind.PART, part.SerializeToString()
            else:
                yield Kind.ANSWER, self._short[kind](request).SerializeToString()
        except KVStoreError as error:
            if self._times is not None:
                self._times.failed(METHODS[kind], error)
            yield Kind.FAILED, told(error)


def _listen(path: Path, sharers: SocketGroup) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)  # a killed node's; the folder is ours
        old = os.umask(0o177)
        try:
            at_socket(path.parent, listener.bind)
        finally:
            os.umask(old)
        sharers.set_modes(path, 0o600, 0o660)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ResourceError(f"{path}: no socket can be made there: {error.strerror or error}") from error
    return listener
