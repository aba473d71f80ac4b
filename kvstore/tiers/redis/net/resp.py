"""Redis's protocol (RESP2) on a socket: requests straight from memory, replies straight into memory, with a deadline.

Payloads are neither joined nor copied: a request's argument may be several buffers, which leave by one ``sendmsg``; a
reply may be given the buffers that it fills. TLS sockets take and fill the same buffers, one by one. Elsewhere the
kernel keeps the deadlines (``SO_RCVTIMEO``, ``SO_SNDTIMEO``), so that one call fills many buffers: Python's own
timeouts make a socket non-blocking, and cost two calls for each piece that has just arrived.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvstore.errors import DeadlineError, FormatError, UnavailableError

Buffer: TypeAlias = bytes | memoryview
Argument: TypeAlias = Buffer | Sequence[Buffer]
"""One argument of a command; several buffers count as one, end to end."""


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error reply."""

    message: str

    @property
    def kind(self) -> str:
        """Its first word: ``OOM``, ``READONLY``, ``MOVED``, …"""
        return self.message.partition(" ")[0]


Reply: TypeAlias = int | bytes | ServerError | list["Reply"] | None

_JOIN_BYTES = 2048
"""Buffers below this are joined with what stands around them; larger ones are sent from where they are."""
_MOST_BUFFERS = 64
"""Buffers given to one system call."""
_MOST_REPLY_BYTES = 64 << 20
"""Longest reply that was not asked for by its length, and most elements of one: beyond it, the peer talks nonsense."""
_MOST_DEPTH = 4
_MANY = 8
"""Arguments of one length from which on they are written together."""
_END = b"\r\n"
_NIL = b"$-1\r\n"
_TIMEVAL = struct.Struct("@ll")


def encode(commands: Sequence[Sequence[Argument]]) -> list[Buffer]:
    """The bytes of some commands, as buffers to be sent one behind the other."""
    out: list[Buffer] = []
    small: list[bytes] = []
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        if (alike := _alike(command)) is not None:
            small.append(alike)
            continue
        for argument in command:
            if isinstance(argument, bytes) and len(argument) < _JOIN_BYTES:
                small.append(b"$%d\r\n%b\r\n" % (len(argument), argument))
                continue
            buffers = [argument] if isinstance(argument, bytes | memoryview) else argument
            small.append(b"$%d\r\n" % sum(map(len, buffers)))
            for buffer in buffers:
                if len(buffer) < _JOIN_BYTES:
                    small.append(bytes(buffer))
                    continue
                if small:
                    out.append(b"".join(small))
                    small.clear()
                out.append(buffer)
            small.append(b"\r\n")
    out.append(b"".join(small))
    return out


def _alike(arguments: Sequence[Argument]) -> bytes | None:
    """Many short arguments, all but the first of one length, as the names of pages are: without a step of Python for
    each. None: others."""
    if len(arguments) <= _MANY:  # in a Cluster each page is asked for by a command of its own
        return None
    whole = [argument for argument in arguments if isinstance(argument, bytes)]
    if len(whole) < len(arguments):
        return None
    first, *names = whole
    lengths = set(map(len, names))
    if len(lengths) > 1 or max(lengths) >= _JOIN_BYTES:
        return None
    before = b"\r\n$%d\r\n" % lengths.pop()
    return b"$%d\r\n%b%b%b\r\n" % (len(first), first, before, before.join(names))


class RespSocket:
    """One connected socket. After any exception it is out of step, and good for nothing but closing."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._plain = not isinstance(connected, ssl.SSLSocket)
        if self._plain:
            connected.settimeout(None)
        self._buffer = bytearray(16 << 10)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all buffers.

        Raises:
            DeadlineError: not all of them by ``deadline`` (on the clock of ``time.monotonic``).
            UnavailableError: the connection broke.
        """
        views = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        try:
            while first < len(views):
                self._keep_deadline(deadline, socket.SO_SNDTIMEO)
                if not self._plain:
                    self._socket.sendall(views[first])
                    first += 1
                    continue
                sent = self._socket.sendmsg(views[first : first + _MOST_BUFFERS])
                first = _advance(views, first, sent)
        except (TimeoutError, BlockingIOError) as error:
            raise DeadlineError("a request could not be sent in time") from error
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error}") from error

    def receive(self, deadline: float, into: Sequence[Buffer] = (), *, depth: int = 0) -> Reply:
        """The next reply.

        Args:
            deadline: on the clock of ``time.monotonic``.
            into: where a bulk string goes; it is then answered by its length. One of another length than all of these
                together is read and thrown away, and answered by its length as well.
            depth: of this reply within another.

        Raises:
            DeadlineError: not all of it by ``deadline``.
            UnavailableError: the connection broke.
            FormatError: what came is no reply.
        """
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode("ascii", "replace"))
        if kind not in (b":", b"$", b"*"):
            raise FormatError(f"not a reply of Redis: {line[:20]!r}")
        try:
            number = int(rest)
        except ValueError as error:
            raise FormatError(f"not a number in a reply of Redis: {line[:20]!r}") from error
        if kind == b":":
            return number
        if number == -1:
            return None
        if not 0 <= number <= max(_MOST_REPLY_BYTES, sum(len(buffer) for buffer in into)):
            raise FormatError(f"a reply of {number} bytes")
        if kind == b"*":
            if depth == _MOST_DEPTH or number > _MOST_REPLY_BYTES >> 6:
                raise FormatError(f"a reply of {number} elements at depth {depth}")
            return self._array(number, deadline, depth + 1)
        if not into:
            end = self._start + number
            if end + 2 <= self._end and self._buffer[end : end + 2] == b"\r\n":  # all here, as short ones mostly are
                short = bytes(self._view[self._start : end])
                self._start = end + 2
                return short
            data = bytearray(number)
            self._fill([memoryview(data)], deadline)
            self._end_of_bulk(deadline)
            return bytes(data)
        views = [memoryview(buffer) for buffer in into]
        if number != sum(map(len, views)):
            views = [memoryview(bytearray(number))]
        self._fill(views, deadline)
        self._end_of_bulk(deadline)
        return number

    def _array(self, number: int, deadline: float, depth: int) -> list[Reply]:
        """Elements of an array; most are nil, or strings as long as the one before, and all here."""
        end = self._start + number * len(_NIL)
        if end <= self._end and self._buffer.startswith(_NIL * number, self._start, end):  # of a new prompt's pages
            self._start = end
            return [None] * number
        buffer, out = self._buffer, list[Reply]()
        head, length = _NIL, 0
        while len(out) < number:
            start, end = self._start, self._end
            left = number - len(out)
            while left and buffer.startswith(_NIL, start, end):
                start += len(_NIL)
                out.append(None)
                left -= 1
            while left and buffer.startswith(head, start, end):
                begin = start + len(head)
                if not length or not buffer.startswith(_END, begin + length, end):
                    break
                out.append(bytes(self._view[begin : begin + length]))
                start = begin + length + len(_END)
                left -= 1
            self._start = start
            if left and not buffer.startswith(_NIL, start, end):
                value = self.receive(deadline, depth=depth)
                out.append(value)
                if isinstance(value, bytes):
                    length = len(value)
                    head = b"$%d\r\n" % length
        return out

    def _end_of_bulk(self, deadline: float) -> None:
        if self._line(deadline):
            raise FormatError("a reply of Redis does not end where it says")

    def _line(self, deadline: float) -> bytes:
        while True:
            at = self._buffer.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            if self._start:
                rest = bytes(self._view[self._start : self._end])
                self._view[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            if self._end == len(self._buffer):
                raise FormatError("a line of a reply of Redis has no end")
            self._end += self._receive([self._view[self._end :]], deadline, 0)

    def _fill(self, views: list[memoryview], deadline: float) -> None:
        first = 0
        if self._end > self._start:
            here = self._view[self._start : self._end]
            for view in views:
                part = min(len(view), len(here))
                view[:part] = here[:part]
                here = here[part:]
                self._start += part
                first = _advance(views, first, part)
        while first < len(views) and not len(views[first]):
            first += 1
        while first < len(views):
            first = _advance(
                views, first, self._receive(views[first : first + _MOST_BUFFERS], deadline, socket.MSG_WAITALL)
            )

    def _receive(self, views: list[memoryview], deadline: float, flags: int) -> int:
        try:
            self._keep_deadline(deadline, socket.SO_RCVTIMEO)
            count = self._socket.recvmsg_into(views, 0, flags)[0] if self._plain else self._socket.recv_into(views[0])
        except (TimeoutError, BlockingIOError) as error:
            raise DeadlineError("no reply in time") from error
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error}") from error
        if not count:
            raise UnavailableError("the server closed the connection")
        return count

    def _keep_deadline(self, deadline: float, direction: int) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._plain:
            micros = int(left * 1e6) + 1
            self._socket.setsockopt(
                socket.SOL_SOCKET, direction, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
            )
        else:
            self._socket.settimeout(left)


def _advance(views: list[memoryview], first: int, count: int) -> int:
    """Take ``count`` bytes off the views from ``first`` on. Returns the first that has some left."""
    while count or (first < len(views) and not len(views[first])):
        view = views[first]
        if count < len(view):
            views[first] = view[count:]
            break
        count -= len(view)
        first += 1
    return first
