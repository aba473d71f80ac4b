"""A connected socket that frames go over: TCP, TLS or Unix, each send and receive until a deadline.

Plain sockets block in the kernel with its own timeouts (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): one system call moves a
whole piece, where a Python timeout would make several of it. TLS sockets have Python's timeouts.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import DeadlineError, UnavailableError
from kvstore.wire.frame import (
    CHECKSUM,
    HEADER_BYTES,
    Header,
    Kind,
    pack_frame,
)

Bytes = npt.NDArray[np.uint8]
PIECE_BYTES = 1 << 20
"""What is sent by one call: in the cache still from its checksum. More calls would wake the other end more often."""
FIRST_BYTES = 64 << 10
"""What goes with a request: the other end prepares for it while the next checksum is made."""
RECEIVED_BYTES = 256 << 10
"""What is received by one call, while the other end sends on: in the cache still when its checksum is made, and little
enough that the last one's is made soon."""
RUN_BYTES = 8 << 20
"""The same where no checksum is made on the way."""
_PIECE_BUFFERS = 256
"""Most buffers of one call; Linux takes 1,024."""
_TIMEVAL = struct.Struct("ll")


class _Part(NamedTuple):
    """A run of bytes of one page."""

    page: int
    data: memoryview
    last: bool


class Channel:
    """One end of a connection that carries frames. Not safe for threads, but for ``cut``.

    Attributes:
        deadline: when sends and receives are given up, on the clock of ``time.monotonic``.
        answering: number of the request that the node's frames answer; 0: they answer none.

    Every method that moves bytes raises :class:`UnavailableError` when the connection is lost, and
    :class:`DeadlineError` when the deadline passed; the connection can then only be closed.
    """

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._plain = not isinstance(connected, ssl.SSLSocket)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._plain:
            connected.setblocking(True)
        self.deadline = deadline
        self.answering = 0
        self._armed = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        """The kernel's timeouts as they are set, in seconds."""

    def send(self, kind: Kind, message: bytes = b"") -> None:
        """Send a frame without payload."""
        self._send([memoryview(pack_frame(kind, message, milliseconds=self.answering))])

    def send_pages(
        self, pages: Sequence[Bytes], checksums: Sequence[int] | None = None, *, head: bytes = b""
    ) -> Iterator[int]:
        """Send a payload. Checksums that are not given are made on the way.

        Args:
            pages: what is sent.
            checksums: of each.
            head: header and message before it. Sent alone they would wake the other end for nothing.

        Yields:
            Behind each piece how many pages have gone as a whole.
        """
        digest = xxhash.xxh3_64()
        buffers = [memoryview(head)] if head else []
        made_here = checksums is None
        first = FIRST_BYTES if head and made_here else None
        for piece in _pieces(pages, PIECE_BYTES if made_here else RUN_BYTES, first):
            for page, data, last in piece:
                buffers.append(data)
                if checksums is None:
                    digest.update(data)
                if last:
                    made = digest.intdigest() if checksums is None else checksums[page]
                    buffers.append(memoryview(CHECKSUM.pack(made)))
                    digest.reset()
            self._send(buffers)
            buffers = []
            yield piece[-1].page + piece[-1].last
        if buffers:
            self._send(buffers)

    def receive(self) -> tuple[Header, bytes]:
        """Receive the header and the message of a frame.

        Raises:
            FormatError: what came is no frame.
        """
        header = self.receive_header()
        return header, self.receive_message(header)

    def receive_header(self) -> Header:
        """Receive a header.

        Raises:
            FormatError: what came is none.
        """
        data = bytearray(HEADER_BYTES)
        self._receive([memoryview(data)])
        return Header.unpack(data)

    def receive_message(self, header: Header) -> bytes:
        """Receive the message behind a header.

        Raises:
            FormatError: header or message was damaged.
        """
        data = bytearray(header.message)
        if data:
            self._receive([memoryview(data)])
        message = bytes(data)
        header.check(message)
        return message

    def receive_pages(self, pages: Sequence[Bytes]) -> Iterator[int | None]:
        """Receive a payload into place.

        Yields:
            For each page its checksum, made of what was received; None when that is not the one that was sent.
        """
        digest = xxhash.xxh3_64()
        for piece in _pieces(pages, RECEIVED_BYTES):
            buffers, sums = [], []
            for _, data, last in piece:
                buffers.append(data)
                if last:
                    sums.append(bytearray(CHECKSUM.size))
                    buffers.append(memoryview(sums[-1]))
            self._receive(buffers)
            came = iter(sums)
            for _, data, last in piece:
                digest.update(data)
                if last:
                    made = digest.intdigest()
                    digest.reset()
                    yield made if CHECKSUM.unpack(next(came)) == (made,) else None

    def discard(self, length: int) -> None:
        """Receive so many bytes for nobody."""
        scratch = memoryview(bytearray(min(length, PIECE_BYTES)))
        while length:
            piece = scratch[:length]
            self._receive([piece])
            length -= len(piece)

    def is_quiet(self) -> bool:
        """Whether nothing came: between a frame and the next request, anything, the end included, means a break."""
        try:
            if not self._plain:
                self._socket.settimeout(0)
                self._socket.recv(1)
            else:
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            return False
        return False

    def cut(self) -> None:
        """End the connection under whoever uses it, from any thread."""
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown, which would let its user read on without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket up."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, buffers: list[memoryview]) -> None:
        left = sum(map(len, buffers))
        while True:
            try:
                if self._plain:
                    self._arm(socket.SO_SNDTIMEO)
                    sent = self._socket.sendmsg(buffers)
                else:
                    self._socket.settimeout(self._left())
                    sent = self._socket.send(buffers[0])
            except (BlockingIOError, TimeoutError) as error:
                raise DeadlineError("the other end took too long to receive") from error
            except OSError as error:
                raise UnavailableError(f"the bulk connection broke: {error.strerror or error}") from error
            left -= sent
            if not left:
                return
            buffers = _behind(buffers, sent)

    def _receive(self, buffers: list[memoryview]) -> None:
        left = sum(map(len, buffers))
        while True:
            try:
                if self._plain:
                    self._arm(socket.SO_RCVTIMEO)
                    came = self._socket.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
                else:
                    self._socket.settimeout(self._left())
                    came = self._socket.recv_into(buffers[0])
            except (BlockingIOError, TimeoutError) as error:
                raise DeadlineError("the other end took too long to send") from error
            except OSError as error:
                raise UnavailableError(f"the bulk connection broke: {error.strerror or error}") from error
            if not came:
                raise UnavailableError("the bulk connection was closed by the other end")
            left -= came
            if not left:
                return
            buffers = _behind(buffers, came)

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline passed before the work was done")
        return left

    def _arm(self, option: int) -> None:
        """Give the next system call the time until the deadline; a little more, where that saves setting it."""
        left = max(self._left(), 1e-3)  # zero would be for ever
        if not left <= self._armed[option] <= 1.25 * left:
            self._armed[option] = left
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6)))


def _pieces(pages: Sequence[Bytes], most: int, first: int | None = None) -> Iterator[list[_Part]]:
    """Pages, whole or in parts, as one call each sends or receives them: ``most`` bytes, the first one ``first``."""
    piece: list[_Part] = []
    size, limit = 0, first or most
    for place, page in enumerate(pages):
        rest = page.data
        while rest:
            data, rest = rest[: limit - size], rest[limit - size :]
            piece.append(_Part(place, data, not rest))
            size += len(data)
            if size == limit or len(piece) == _PIECE_BUFFERS:
                yield piece
                piece, size, limit = [], 0, most
    if piece:
        yield piece


def _behind(buffers: list[memoryview], length: int) -> list[memoryview]:
    """What is left of buffers behind their first ``length`` bytes."""
    for place, data in enumerate(buffers):
        if length < len(data):
            return [data[length:], *buffers[place + 1 :]]
        length -= len(data)
    return []
