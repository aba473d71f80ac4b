"""Conventions of the gRPC calls: how hashes are joined, tokens shown and errors coded, and what the page streams carry.

* Hashes: a block hash is 32 bytes; a field of several has them back to back, head of the prefix first.
* Tokens: each call has the metadata ``authorization: bearer TOKEN`` where the node asks for one.
* Errors: a failed call has a status (``_CODES``), its text as details, and in the trailing metadata ``kvstore-reason``
  the name of the class in :mod:`kvstore.errors`, which is the nearest one that has a status of its own.
* Pages: ``/kvstore.v1.Pages/Load`` and ``/kvstore.v1.Pages/Store`` carry serialized messages and between them *raw
  messages*, whose bodies are bytes of pages and no protobuf: pages back to back, cut every 2 MiB wherever that falls.
  proto/kvstore/v1/cache.proto has their order. Checksums are xxh3_64 (seed 0).
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import grpc
import numpy as np
import numpy.typing as npt

from kvstore import errors
from kvstore.core import choice
from kvstore.hashing import HASH_BYTES, RunningChecksum

Bytes = npt.NDArray[np.uint8]

LOAD_STREAM = "/kvstore.v1.Pages/Load"
STORE_STREAM = "/kvstore.v1.Pages/Store"
MESSAGE_BYTES = 2 << 20
"""Largest raw message of a payload stream: larger ones are several times slower, smaller ones cost more calls."""
AT_ONCE_BYTES = 4 << 20
"""Most bytes of pages that are sent with the request that stores them: a call less, for bytes that may come in vain."""
MOST_REQUEST_BYTES = 5 << 20
"""Largest message that a node takes: the hashes of the largest lookup fit, and a message of a payload."""
MOST_MESSAGE_BYTES = 8 << 20
"""Largest message that a client takes."""
REASON_KEY = "kvstore-reason"
"""Trailing metadata: the name of the error class behind a failed call."""

TOKEN_KEY = "authorization"  # noqa: S105 - no token itself
"""Metadata: the client's token, behind ``TOKEN_SCHEME`` and a space."""
TOKEN_SCHEME = "bearer"  # noqa: S105

_CODES: dict[type[errors.KVStoreError], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LayoutMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnknownNamespaceError: grpc.StatusCode.NOT_FOUND,
    errors.NotAttachedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ResourceError: grpc.StatusCode.INTERNAL,
}
_REASONS = {error.__name__: error for error in _CODES}


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """Block hashes as one field, back to back.

    Raises:
        InvalidRequestError: a hash has not 32 bytes.
    """
    if type(hashes) is not list and not isinstance(hashes, Sequence):
        raise errors.InvalidRequestError(f"hashes must be a list or tuple of bytes, got {type(hashes).__name__}")
    if (core := choice.native()) is not None and (joined_there := core.join(hashes)) is not None:
        return joined_there
    try:  # many times faster than the loop below
        joined = b"".join(hashes)  # first, since it is the fastest at what is not in the caches
        if {*map(type, hashes)} <= {bytes} and {*map(len, hashes)} <= {HASH_BYTES}:
            return joined
    except TypeError:
        pass
    for place, block_hash in enumerate(hashes):
        if not isinstance(block_hash, bytes) or len(block_hash) != HASH_BYTES:
            got = f"{len(block_hash)} bytes" if isinstance(block_hash, bytes) else repr(type(block_hash).__name__)
            raise errors.InvalidRequestError(f"hash {place} must be {HASH_BYTES} bytes long, got {got}")
    return b"".join(hashes)


def count_hashes(joined: bytes) -> int:
    """How many block hashes one field has.

    Raises:
        InvalidRequestError: the field is not whole hashes.
    """
    if len(joined) % HASH_BYTES:
        raise errors.InvalidRequestError(f"hashes take {HASH_BYTES} bytes each, the field has {len(joined)}")
    return len(joined) // HASH_BYTES


def split_hashes(joined: bytes) -> list[bytes]:
    """The block hashes of one field. Errors as :func:`count_hashes`."""
    count_hashes(joined)
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def raw_messages(pages: Iterable[Bytes]) -> Iterator[bytes]:
    """The bytes of ``pages``, back to back, in messages of ``MESSAGE_BYTES`` (the last one shorter)."""
    waiting: list[memoryview] = []
    size = 0
    for page in pages:
        rest = page.data
        while rest:
            piece, rest = rest[: MESSAGE_BYTES - size], rest[MESSAGE_BYTES - size :]
            waiting.append(piece)
            size += len(piece)
            if size == MESSAGE_BYTES:
                yield b"".join(waiting)
                waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def fill(pages: Sequence[Bytes], messages: Iterator[bytes], checksums: list[int] | None = None) -> int:
    """Write raw messages into ``pages``, one behind the other, until these are full.

    Args:
        pages: where the bytes go.
        messages: where they come from; no more are taken than fill the pages.
        checksums: gets that of each page that came whole, made of the messages, which are in the processor's caches.

    Returns:
        How many bytes came.

    Raises:
        InvalidRequestError: the last message carries more than fits.
    """
    total = sum(page.size for page in pages)
    came = place = filled = 0
    running = RunningChecksum()
    while came < total:
        message = next(messages, None)
        if message is None:
            break
        came += len(message)
        if came > total:
            raise errors.InvalidRequestError(f"the stream carries more than the {total} bytes of its pages")
        data = np.frombuffer(message, np.uint8)
        while data.size:
            page = pages[place]
            take = min(data.size, page.size - filled)
            if checksums is not None:
                running.update(data[:take].data)
            np.copyto(page[filled : filled + take], data[:take])
            data, filled = data[take:], filled + take
            if filled == page.size:
                if checksums is not None:
                    checksums.append(running.intdigest())
                    running.reset()
                place, filled = place + 1, 0
    return came


def unix_target(path: Path) -> str:
    """gRPC's name of a Unix socket."""
    return "unix:" + urllib.parse.quote(str(path.absolute()))


def code_of(error: errors.KVStoreError) -> grpc.StatusCode:
    """The gRPC status that stands for an error."""
    return _CODES.get(_kind_of(error), grpc.StatusCode.INTERNAL)


def reason_of(error: errors.KVStoreError) -> str:
    """What ``REASON_KEY`` says of an error."""
    return _kind_of(error).__name__


def error_named(reason: str, text: str) -> errors.KVStoreError:
    """The error that a node named, as :func:`reason_of` names them."""
    return _REASONS.get(reason, errors.UnavailableError)(text)


def _kind_of(error: errors.KVStoreError) -> type[errors.KVStoreError]:
    """The nearest class of an error that has a status of its own."""
    return next((kind for kind in type(error).__mro__ if kind in _CODES), type(error))


def _in_short(details: str) -> str:
    """What gRPC says of a connection that can't be made, without what everybody knows."""
    reason = details.partition("last error: ")[2] or details
    for words in (" error: ", "Failed to connect to remote host: "):
        reason = reason.rpartition(words)[2]
    return re.sub(r"^[A-Z_]+: ipv[46]:\S+: ", "", reason) or details


def is_answer(call: grpc.RpcError) -> bool:
    """Whether a call failed by the node's own word: it was reached."""
    metadata = cast("grpc.Call", call).trailing_metadata() or ()
    return any(key == REASON_KEY for key, _ in metadata)


def error_of(call: grpc.RpcError, node: str) -> errors.KVStoreError:
    """The error that a failed call stands for. ``node`` names the other end for people."""
    # Every RpcError that a channel raises is the finished call as well; the types don't say so.
    finished = cast("grpc.Call", call)
    code, details = finished.code(), finished.details() or ""
    metadata = cast("Sequence[tuple[str, str | bytes]]", finished.trailing_metadata() or ())
    for key, value in metadata:
        if key == REASON_KEY and str(value) in _REASONS:
            return _REASONS[str(value)](details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineError(f"{node} did not answer in time")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return errors.UnavailableError(f"{node} can't be reached: {_in_short(details)}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.FormatError(f"{node} does not know this call: {details}")
    return errors.UnavailableError(f"{node} failed: {details}")
