"""Local connections: the calls around a copy, made to a node on this host over its arena's socket, or through gRPC."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError, Message

from kvstore.client.paths.control import Connection
from kvstore.errors import DeadlineError, FormatError, KVStoreError, ResourceError, UnavailableError
from kvstore.host.cutting import begin_cuttable, end_cuttable
from kvstore.host.forking import register_forked
from kvstore.wire.frame import (
    MOST_MESSAGE_BYTES,
    NUMBERED,
    Kind,
    number_of,
    pack_frame,
)
from kvstore.wire.local import CALLS, Calls, at_socket
from kvstore.wire.messages import error_named

MOST_IDLE = 8
"""Most connections that are kept for later."""
_FRESH_SECONDS = 0.002
"""How long a connection is taken to be as good as it was when it was used last: no node restarts that fast."""
_LOOK_SECONDS = 0.0003
"""How long an answer is looked for without sleeping."""
_BROKEN = (DeadlineError, UnavailableError, FormatError)
_log = logging.getLogger(__name__)
_KINDS = {asked: (kind, answered) for kind, (asked, answered) in CALLS.items()}
Answered = Callable[[Any], object]
"""Told of an answer, or of the :class:`KVStoreError` that the node gave instead; None: nobody knows what it did."""


class _Due(NamedTuple):
    """An answer that is to come."""

    kind: type[Message]
    number: int
    """Of the request."""
    answered: Answered


class Packed(NamedTuple):
    """A request that is ready to be sent."""

    request: Message
    answered: Answered
    frame: bytes
    """As it travels; empty: it goes through gRPC."""


class LocalConnection(Protocol):
    """One thread's way to the node. Requests are the messages of :data:`kvstore.wire.local.CALLS`.

    Attributes:
        pipelined: whether requests are sent before earlier ones are answered.
        good: whether nothing of an interrupted operation is on its way.
    """

    pipelined: bool
    good: bool

    def pack(self, request: Message, answered: Answered) -> Packed:
        """Make a request ready. Behind copies, which sweep the caches, each line of code takes a microsecond."""
        ...

    def post(self, packed: Sequence[Packed], deadline: float) -> None:
        """Send requests whose answers nobody waits for now.

        Raises:
            UnavailableError: the node is lost.
            DeadlineError: it did not take them in time.
        """
        ...

    def settle(self, deadline: float) -> None:
        """Wait for all answers that are due, and tell of them. Raises as ``post``."""
        ...

    def parts(self, request: Message, deadline: float) -> Iterator[Any]:
        """Send a request, and receive its answer in as many parts as the node makes of it.

        Raises:
            KVStoreError: what the node answered, or that it did not.
        """
        ...


def call(connection: LocalConnection, request: Message, deadline: float) -> Any:
    """One call.

    Raises:
        KVStoreError: what the node answered, or that it did not.
    """
    answers: list[Any] = []
    connection.post([connection.pack(request, answers.append)], deadline)
    connection.settle(deadline)
    [answer] = answers
    if isinstance(answer, KVStoreError):
        raise answer
    return answer


class SocketConnection:
    """A connection to the socket in the arena's folder, whose other end is ready. Requests that don't fit into a frame
    go by ``large``; ``numbered``: answers say which request they answer.
    """

    pipelined = True

    def __init__(self, channel: Calls, name: str, large: LocalConnection, *, numbered: bool) -> None:
        self.channel = channel
        self._name = name
        self._large = large
        self._numbered = numbered
        self._due: deque[_Due] = deque()
        self._used = time.monotonic()
        self.good = True
        """Whether what was sent and received ended between two frames, and ``_due`` is all that is to come. False from
        before each send and receive until behind it: an exception (a signal's, say) may come anywhere in between."""

    @property
    def due(self) -> bool:
        """Whether answers are to come."""
        return bool(self._due)

    def is_usable(self) -> bool:
        """Whether the node has not closed it since it was used last."""
        return self.due or time.monotonic() - self._used < _FRESH_SECONDS or self.channel.is_quiet()

    def pack(self, request: Message, answered: Answered) -> Packed:
        """Make a request ready."""
        message = request.SerializeToString()
        fits = len(message) <= MOST_MESSAGE_BYTES
        return Packed(request, answered, pack_frame(_KINDS[type(request)][0], message) if fits else b"")

    def post(self, packed: Sequence[Packed], deadline: float) -> None:
        """Send requests whose answers nobody waits for now."""
        self._check_good()
        small = [each for each in packed if each.frame]
        self.channel.deadline = deadline
        self.good = False
        self._due.extend([_Due(_KINDS[type(each.request)][1], number_of(each.frame), each.answered) for each in small])
        try:
            self.channel.send_frames(b"".join([each.frame for each in small]))
        except _BROKEN as error:
            raise self._broken(error) from error
        self.good = True
        for each in packed:
            if not each.frame:
                self.settle(deadline)
                self._large.post([each], deadline)

    def settle(self, deadline: float) -> None:
        """Wait for all answers that are due."""
        while self._due:
            self._check_good()
            self.channel.deadline = deadline
            self.good = False
            try:
                self.channel.look(_LOOK_SECONDS)
                _, answer = self._receive(self._due[0])
            except _BROKEN as error:
                raise self._broken(error) from error
            due = self._due.popleft()
            self.good = True
            due.answered(answer)
        self._used = time.monotonic()

    def parts(self, request: Message, deadline: float) -> Iterator[Any]:
        """Send a request, and receive its answer part by part."""
        self.settle(deadline)
        self._check_good()
        packed = self.pack(request, ignore_answer)
        if not packed.frame:
            yield from self._large.parts(request, deadline)
            return
        due = _Due(_KINDS[type(request)][1], number_of(packed.frame), ignore_answer)
        self.channel.deadline = deadline
        last = False
        self.good = False  # until all of the answer was received, however this ends
        try:
            self.channel.send_frames(packed.frame)
        except _BROKEN as error:
            raise self._broken(error) from error
        while not last:
            try:
                kind, answer = self._receive(due)
            except _BROKEN as error:
                raise self._broken(error) from error
            last = kind is not Kind.PART
            self.good = last
            if isinstance(answer, KVStoreError):
                raise answer
            yield answer
        self._used = time.monotonic()

    def close(self) -> None:
        """Close the connection; whoever waits for an answer is told that none comes."""
        self.good = False
        self.channel.close()
        while self._due:
            self._due.popleft().answered(None)

    def _check_good(self) -> None:
        """Use no connection on which an operation was interrupted: the next answer on it is that operation's.

        Raises:
            UnavailableError: this is one.
        """
        if not self.good:
            raise UnavailableError(f"{self._name} was lost: an operation on the connection was interrupted")

    def _receive(self, due: _Due) -> tuple[Kind, Any]:
        header, message = self.channel.receive()
        if self._numbered and header.milliseconds != due.number:
            raise FormatError(f"a frame of kind {header.kind.name} came that answers another request")
        if header.kind is Kind.FAILED:
            reason, _, text = message.decode(errors="replace").partition("\n")
            return header.kind, error_named(reason, text)
        if header.kind not in (Kind.ANSWER, Kind.PART):
            raise FormatError(f"a frame of kind {header.kind.name} is no answer")
        try:
            return header.kind, due.kind.FromString(message)
        except DecodeError as error:
            raise FormatError("an answer's message can't be read") from error

    def _broken(self, error: Exception) -> KVStoreError:
        """The connection is good for nothing any more, since its work failed. Not a context manager: two more calls of
        code that is not in the caches, for each message."""
        self.good = False
        if isinstance(error, DeadlineError):
            return DeadlineError(f"{self._name} did not answer in time")
        return UnavailableError(f"{self._name} was lost: {error}")


def ignore_answer(answer: Any) -> None:
    """Is told."""


class GrpcConnection:
    """Calls through gRPC, each answered before the next."""

    pipelined = False
    good = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def pack(self, request: Message, answered: Answered) -> Packed:
        """Nothing is to be done."""
        return Packed(request, answered, b"")

    def post(self, packed: Sequence[Packed], deadline: float) -> None:
        """Make calls."""
        for each in packed:
            try:
                [answer] = self.parts(each.request, deadline)
            except (UnavailableError, DeadlineError):
                raise
            except KVStoreError as error:
                each.answered(error)
            else:
                each.answered(answer)

    def settle(self, deadline: float) -> None:
        """Nothing is due."""

    def parts(self, request: Message, deadline: float) -> Iterator[Any]:
        """Make a call."""
        method = getattr(self._connection.stub, type(request).DESCRIPTOR.name.removesuffix("Request"))
        yield self._connection.call(method, request, max(deadline - time.monotonic(), 1e-3))

    def close(self) -> None:
        """Nothing."""


class LocalConnectionPool:
    """One client's connections to the socket in the arena's folder; gRPC where none can be made. Safe for threads.

    Each is lent to one operation at a time, and made when none is free.
    """

    def __init__(self, connection: Connection, directory: FilePath) -> None:
        self._connection = connection
        self._directory = directory
        self._grpc = GrpcConnection(connection)
        self._lock = threading.Lock()
        self._idle: list[SocketConnection] = []
        self._channels: weakref.WeakSet[Calls] = weakref.WeakSet()
        """Of all connections that are open. One that an interrupted operation did not give back closes with it."""
        self._closed = False
        self._told = False
        register_forked(self)

    def forked(self) -> None:
        """In a child: the connections are the parent's."""
        self._lock = threading.Lock()
        self._idle.clear()
        for channel in list(self._channels):
            channel.close()

    @contextmanager
    def lent(self, deadline: float) -> Iterator[LocalConnection]:
        """A connection for one operation. Raises as :meth:`take`."""
        connection = self.take(deadline)
        try:
            yield connection
        finally:
            self.give_back(connection)

    def take(self, deadline: float) -> LocalConnection:
        """The connection that was used last, or a new one. Answers that were due are settled.

        Raises:
            UnavailableError: the client is closed.
            DeadlineError: the node does not answer in time.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise UnavailableError(f"the client of {self._connection.name} is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._open(deadline)
            begin_cuttable(connection.channel.cut)
            if connection.is_usable():
                try:
                    connection.settle(deadline)
                except UnavailableError:  # it was lost; the node need not be
                    self._discard(connection)
                    continue
                except BaseException:
                    self._discard(connection)
                    raise
                return connection
            self._discard(connection)

    def give_back(self, connection: LocalConnection) -> None:
        """Keep a connection for later if it is good."""
        if not isinstance(connection, SocketConnection):
            return
        cut = end_cuttable(connection.channel.cut)
        with self._lock:
            kept = connection.good and not cut and not self._closed and len(self._idle) < MOST_IDLE
            if kept:
                self._idle.append(connection)
        if not kept:
            self._discard(connection)

    def settle_idle(self, deadline: float) -> None:
        """Receive what is due on connections that nobody uses."""
        with self._lock:
            due = [each for each in self._idle if each.due]
            self._idle = [each for each in self._idle if not each.due]
        for connection in due:
            with contextlib.suppress(KVStoreError):
                connection.settle(deadline)
            self.give_back(connection)

    def close(self) -> None:
        """Close everything; calls under way fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for channel in self._channels:
                channel.cut()
        for connection in idle:
            self._discard(connection)

    def _discard(self, connection: SocketConnection) -> None:
        end_cuttable(connection.channel.cut)
        with self._lock:
            self._channels.discard(connection.channel)
        connection.close()

    def _open(self, deadline: float) -> LocalConnection:
        name = self._connection.name
        connected = socket.socket(socket.AF_UNIX)
        channel = Calls(connected, deadline)
        try:
            with self._lock:
                if self._closed:  # what cuts all connections was here before this one
                    raise ConnectionAbortedError
                self._channels.add(channel)
            begin_cuttable(channel.cut)
            connected.settimeout(max(deadline - time.monotonic(), 1e-3))
            at_socket(self._directory, connected.connect)
            connected.setblocking(True)
            header, message = channel.receive()
            if header.kind is not Kind.READY:
                raise ResourceError(message.decode(errors="replace"))
        except (OSError, FormatError) as error:
            end_cuttable(channel.cut)
            with self._lock:
                self._channels.discard(channel)
                closed, first, self._told = self._closed, not self._told, True
            channel.close()
            if closed:
                raise UnavailableError(f"the client of {name} is closed") from error
            if isinstance(error, TimeoutError):  # DeadlineError is one
                raise DeadlineError(f"{name} did not answer in time") from error
            if first:
                _log.info("%s: calls go through gRPC: %s", name, error)
            return self._grpc
        self._told = False
        return SocketConnection(channel, name, self._grpc, numbered=header.milliseconds == NUMBERED)
