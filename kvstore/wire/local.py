"""Local connections: the calls around copies, as frames over the Unix socket ``calls`` in the arena's folder.

They are those calls of ``kvstore.v1.Cache`` that a client of the mapped arena makes for a store, a load or a lookup,
with the same messages; gRPC takes several times as long for one. The client attaches by gRPC first (``Cache/Attach``):
its number is in each request but a lookup. Requests may be sent before earlier ones are answered, and are answered in
their order::

    client                                     node
                                           <-  READY    empty: the connection is good; or FAILED: it is refused
    PREPARE_STORE   PrepareStoreRequest    ->
                                           <-  ANSWER   PrepareStoreReply
    COMPLETE_STORE  CompleteStoreRequest   ->
                                           <-  ANSWER   StoreCounts
    PREPARE_LOAD    PrepareLoadRequest     ->
                                           <-  PART     PrepareLoadReply: the first pages; any number of times
                                           <-  ANSWER   PrepareLoadReply: the last ones
    COMPLETE_LOAD   CompleteLoadRequest    ->
                                           <-  ANSWER   CompleteLoadReply
    LOOKUP          LookupRequest          ->
                                           <-  ANSWER   LookupReply; of nodes whose arena says where else pages may be
    any of these                           ->
                                           <-  FAILED   the error; the connection stays good

Answers carry their request's number, and errors their name and text, as over bulk connections (:mod:`kvstore.wire`).
The socket has the user and the mode of the node's other one: whoever may connect to one may connect to both. A request
that does not fit into a frame (64 KiB) goes through gRPC.
"""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from kvstore.core import choice
from kvstore.errors import DeadlineError, UnavailableError
from kvstore.host.cpus import usable_processors
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.channel import Channel
from kvstore.wire.frame import (
    HEADER_BYTES,
    MOST_MESSAGE_BYTES,
    Header,
    Kind,
    pack_frame,
)

_MAY_LOOK = usable_processors() > 1
"""Whether there is a processor for the other end besides."""
SOCKET_NAME = "calls"
"""Of the file in the arena's folder."""
_LONGEST_PATH = 108
"""Bytes of a socket's path, its end included."""
CALLS: dict[Kind, tuple[type[Message], type[Message]]] = {
    Kind.PREPARE_STORE: (pb.PrepareStoreRequest, pb.PrepareStoreReply),
    Kind.COMPLETE_STORE: (pb.CompleteStoreRequest, pb.StoreCounts),
    Kind.PREPARE_LOAD: (pb.PrepareLoadRequest, pb.PrepareLoadReply),
    Kind.COMPLETE_LOAD: (pb.CompleteLoadRequest, pb.CompleteLoadReply),
    Kind.LOOKUP: (pb.LookupRequest, pb.LookupReply),
}
"""What is asked, and what is answered."""


class Calls(Channel):
    """One end of a local connection: what came in one piece is received by one system call."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        super().__init__(connected, deadline)
        self._came = bytearray()
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._buffer = memoryview(bytearray(HEADER_BYTES + MOST_MESSAGE_BYTES))

    def send_frames(self, frames: bytes) -> None:
        """Send frames without payload, as :func:`kvstore.wire.frame.pack_frame` makes them."""
        left = memoryview(frames)
        if (core := choice.native()) is not None:
            left = left[self._send_now(core, left) :]
        if left:
            self._send([left])

    def send(self, kind: Kind, message: bytes = b"") -> None:
        """Send a frame without payload."""
        self.send_frames(pack_frame(kind, message, milliseconds=self.answering))

    def receive(self) -> tuple[Header, bytes]:
        """The next frame.

        Raises:
            FormatError: what came is none.
        """
        came = self._came
        while len(came) < HEADER_BYTES:
            self._fill()
        header = Header.unpack(came)
        end = HEADER_BYTES + header.message
        while len(came) < end:
            self._fill()
        message = bytes(came[HEADER_BYTES:end])
        del came[:end]
        header.check(message)
        return header, message

    def wait(self) -> None:
        """Return when a part of a frame is there."""
        if not self._came:
            self._fill()

    def look(self, seconds: float) -> None:
        """Look for a part of a frame without sleeping, for so long at most: on a virtual machine, being woken takes
        longer than many an answer, and waking costs the other end as much."""
        if not _MAY_LOOK:
            return
        if (core := choice.native()) is not None:
            if not self._came and core.look(self._socket.fileno(), round(seconds * 1e6)):
                self._fill()
            return
        end = time.monotonic() + seconds
        while not self._came:
            if self._poll.poll(0):
                self._fill()
            elif time.monotonic() >= end:
                return
            else:
                os.sched_yield()

    def is_quiet(self) -> bool:
        """Whether nothing came, the end included."""
        if (core := choice.native()) is not None:
            return not self._came and not core.look(self._socket.fileno(), 0)
        return not self._came and not self._poll.poll(0)  # an exception from a receive would take three times as long

    def _fill(self) -> None:
        try:
            length = self._receive_now()
            if length < 0:
                self._arm(socket.SO_RCVTIMEO)
                length = self._socket.recv_into(self._buffer)
        except (BlockingIOError, TimeoutError) as error:
            raise DeadlineError("the other end took too long to send") from error
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error.strerror or error}") from error
        self._take(length)

    def _receive_now(self) -> int:
        """Receive what is there, and keep the interpreter's lock; -1: only a call that may wait can tell."""
        if (core := choice.native()) is None:
            return -1
        self._left()
        return core.receive(self._socket.fileno(), self._buffer)

    def _send_now(self, core: choice.Core, data: memoryview) -> int:
        """Send what goes without waiting, and keep the interpreter's lock."""
        if not data:
            return 0
        self._left()
        try:
            return core.send(self._socket.fileno(), data)
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error.strerror or error}") from error

    def _take(self, length: int) -> None:
        if not length:
            raise UnavailableError("the connection was closed by the other end")
        self._came += self._buffer[:length]


def at_socket(directory: Path, act: Any) -> None:
    """Bind or connect a socket (``act``: its method) to the file in an arena's folder, however long the path is.

    Raises:
        OSError: the folder or the file can't be used.
    """
    path = str(directory / SOCKET_NAME)
    if len(os.fsencode(path)) < _LONGEST_PATH:
        act(path)
        return
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{fd}/{SOCKET_NAME}")
    finally:
        os.close(fd)
