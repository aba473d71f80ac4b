"""Frames: the header, its checksum, and the kinds that there are.

All numbers are little-endian::

    bytes   header
    0-3     b"KVB1": the last letter is the version of the frames
    4       kind (:class:`Kind`)
    5-7     zero
    8-11    milliseconds; of an answer, the number of its request
    12-15   length of the message, 65,536 at most
    16-23   length of the payload; 0 but for PUT and RUN
    24-31   xxh3_64 (seed 0) of bytes 0-23 and the message

Behind the header come the message and the payload; :mod:`kvstore.wire` says which frame carries what. Lengths are
checked before anything is allocated for them.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import xxhash

from kvstore.errors import FormatError

MAGIC = b"KVB1"
"""The last letter is the version of the frames."""
HEADER = struct.Struct("<4sB3xIIQ")
"""Bytes 0-23: magic, kind, zeros, milliseconds, length of the message, length of the payload."""
CHECKSUM = struct.Struct("<Q")
"""xxh3_64: behind the header, of header and message; behind each page of a payload, of the page."""
HEADER_BYTES = HEADER.size + CHECKSUM.size
MOST_MESSAGE_BYTES = 64 << 10
"""Longest message: the hashes of the largest batch fit several times over."""
NUMBERED = 1
"""What a READY has for its number: this node's answers say which request they answer. Older ones say 0 everywhere."""


class Kind(enum.IntEnum):
    """What a frame is: a request below 64, an answer above. LOAD to PUT, RUN to STORED are of bulk connections
    (:mod:`kvstore.wire`), PREPARE_STORE to LOOKUP, ANSWER and PART of local ones (:mod:`kvstore.wire.local`)."""

    HELLO = 1
    LOAD = 2
    RESERVE = 3
    PUT = 4
    PREPARE_STORE = 5
    COMPLETE_STORE = 6
    PREPARE_LOAD = 7
    COMPLETE_LOAD = 8
    LOOKUP = 9
    READY = 65
    RUN = 66
    RESERVED = 67
    STORED = 68
    FAILED = 69
    ANSWER = 70
    PART = 71


_KINDS = {kind.value: kind for kind in Kind}
_ZEROS = bytes(3)
_WITH_PAYLOAD = (Kind.PUT, Kind.RUN)


class Header(NamedTuple):
    """The header of one frame."""

    kind: Kind
    milliseconds: int
    """How long the node may work on a request; of an answer, the request's number."""
    message: int
    """Bytes of the message."""
    payload: int
    """Bytes of the payload: pages and checksums."""
    checksum: int
    """Of the fields above and the message."""

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        """A header that came.

        Raises:
            FormatError: it is none, or says lengths that no frame has.
        """
        magic, kind, milliseconds, message, payload = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise FormatError(f"the bulk connection carries something else than frames: {bytes(data[:4])!r}")
        if kind not in _KINDS or data[5:8] != _ZEROS:
            raise FormatError(f"an unknown kind of frame on the bulk connection: {kind}")
        if message > MOST_MESSAGE_BYTES:
            raise FormatError(f"a frame's message has {message} bytes, the limit is {MOST_MESSAGE_BYTES}")
        if payload and kind not in _WITH_PAYLOAD:
            raise FormatError(f"a frame of kind {_KINDS[kind].name} has no payload, this one has {payload} bytes")
        return cls(_KINDS[kind], milliseconds, message, payload, *CHECKSUM.unpack_from(data, HEADER.size))

    @property
    def number(self) -> int:
        """What an answer to this request says in its milliseconds: the low 32 bits of the request's checksum, or 1
        where these are 0. It stands for all of the request, the hashes of its pages included: a client that gets an
        answer meant for another (of its own, or of a process that it was forked from) sees it."""
        return _number(self.checksum)

    def check(self, message: bytes) -> None:
        """Whether this is the header of that message.

        Raises:
            FormatError: one of them is not what was sent.
        """
        fields = HEADER.pack(MAGIC, self.kind, self.milliseconds, self.message, self.payload)
        if xxhash.xxh3_64_intdigest(fields + message) != self.checksum:
            raise FormatError("a frame was damaged on the bulk connection")


def pack_frame(kind: int, message: bytes, *, payload: int = 0, milliseconds: int = 0) -> bytes:
    """Header and message as they travel."""
    fields = HEADER.pack(MAGIC, kind, milliseconds, len(message), payload)
    return fields + CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields + message)) + message


def number_of(frame: bytes) -> int:
    """:attr:`Header.number` of a frame as it travels."""
    return _number(*CHECKSUM.unpack_from(frame, HEADER.size))


def payload_bytes(pages: int, page_bytes: int) -> int:
    """Length of a payload of so many pages."""
    return pages * (page_bytes + CHECKSUM.size)


def _number(checksum: int) -> int:
    return checksum & 0xFFFFFFFF or 1
