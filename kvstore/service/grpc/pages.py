"""The handler of payload streams: pages as raw gRPC messages, for clients that do not share the arena.

The slots are held (or reserved) while a stream runs. A reader that is too slow for its hold is cut off instead of
being sent bytes that may have changed; gRPC's flow control keeps what waits for it to a message or two. Every stream
has a deadline, at which gRPC ends it here, too, whatever the other side does: nobody keeps slots by standing still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import DeadlineError, InvalidRequestError, KVStoreError, LimitExceededError, UnknownNamespaceError
from kvstore.hashing import HASH_BYTES
from kvstore.limits import LONGEST_LEASE, MOST_LOOKUP_PAGES
from kvstore.page_codes import as_known
from kvstore.security.grants import WRITE
from kvstore.service.access.gate import Access
from kvstore.service.calls import ConcurrencyLimit, abort
from kvstore.service.incoming import incoming
from kvstore.service.receipts import Receipts
from kvstore.store.leases import NODE
from kvstore.store.results import Published
from kvstore.store.store import Store
from kvstore.tiers.tier import PageBytes
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.frame import MOST_MESSAGE_BYTES
from kvstore.wire.messages import (
    LOAD_STREAM,
    STORE_STREAM,
    count_hashes,
    fill,
    raw_messages,
    split_hashes,
)

MOST_STREAMS = 64
"""Most payload streams at once."""


class _Method(NamedTuple):
    load: grpc.RpcMethodHandler[pb.LoadPages, bytes]
    store: grpc.RpcMethodHandler[bytes, pb.StoreCounts]


class PagesHandler(grpc.GenericRpcHandler):
    """Answers the payload streams from a store."""

    def __init__(self, store: Store, receipts: Receipts, access: Access) -> None:
        self._store = store
        self._access = access
        self._receipts = receipts
        self._limit = ConcurrencyLimit("payload streams", MOST_STREAMS)
        self._methods = _Method(
            grpc.unary_stream_rpc_method_handler(
                self._load, request_deserializer=pb.LoadPages.FromString, response_serializer=None
            ),
            grpc.stream_unary_rpc_method_handler(
                self._save, request_deserializer=None, response_serializer=pb.StoreCounts.SerializeToString
            ),
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]
        """The handler of a call by its path."""
        if handler_call_details.method == LOAD_STREAM:
            return self._methods.load
        return self._methods.store if handler_call_details.method == STORE_STREAM else None

    def _load(self, request: pb.LoadPages, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with self._limit.slot():
                yield from self._runs(request, _time_left(context))
        except KVStoreError as error:
            abort(context, error)

    def _runs(self, request: pb.LoadPages, seconds: float) -> Iterator[bytes]:
        fingerprint, joined = request.pages.fingerprint, request.pages.hashes
        if (pages := count_hashes(joined)) > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"a load of {pages} pages, the limit is {MOST_LOOKUP_PAGES}")
        known = self._store.namespaces.get(fingerprint)
        if known is None:
            raise UnknownNamespaceError(f"unknown namespace {fingerprint.hex()[:16] or '(empty)'}: open it first")
        batch = self._store.batch_pages(known)
        for start in range(0, len(joined), batch * HASH_BYTES):
            asked = split_hashes(joined[start : start + batch * HASH_BYTES])
            held = self._store.prepare_load(NODE, fingerprint, asked, seconds)
            if not held.lease:
                return
            try:
                checksums = self._store.checksums(NODE, held.lease)
                if checksums is None:
                    raise DeadlineError("reading the pages took longer than they can be held")
                yield pb.PageRun(
                    tiers=as_known(held.tiers, request.pages.newest_tier), checksums=checksums
                ).SerializeToString()
                views = [self._store.arena.view(frame, known.layout.page_bytes) for frame in held.frames]
                for message in raw_messages(views):
                    # The message is a copy: good if the hold lasted until it was made.
                    if not self._store.still_held(NODE, held.lease):
                        raise DeadlineError("the reader was slower than pages can be held")
                    yield message
            finally:
                self._store.complete_load(NODE, held.lease)
            if len(held.frames) < len(asked):
                return

    def _save(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> pb.StoreCounts:
        try:
            with self._limit.slot():
                _time_left(context)
                done = self._receive(messages, context)
        except KVStoreError as error:
            abort(context, error)
        return pb.StoreCounts(stored=done.stored, present=done.present, refused=done.refused)

    def _receive(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Published:
        request = _head(messages, "a store stream begins with a StorePages message")
        if request.HasField("request"):  # a reservation's namespace was looked at when it was made
            self._access.check_pages(self._access.caller(context), request.request.pages.fingerprint, WRITE)
        with incoming(self._store, self._receipts, request, context.cancel) as arrival:
            if arrival.pages is None:
                return Published(0, 0, refused=len(request.checksums))
            arrival.checksums = self._fill(arrival.pages, request.checksums, messages)
        return arrival.published

    def _fill(self, views: Sequence[PageBytes], checksums: Sequence[int], messages: Iterator[bytes]) -> list[int]:
        """Receive the payloads of reserved slots, and verify them; checksums that did not come first come last.

        Returns:
            Their checksums.

        Raises:
            InvalidRequestError: what came is not these pages.
        """
        last = not checksums
        if not last:
            _check_number(checksums, len(views))
        total = sum(view.size for view in views)
        made: list[int] = []
        came = fill(views, messages, made)
        if came < total:
            raise InvalidRequestError(f"the stream ended after {came} of {total} bytes; none of it was stored")
        if last:
            checksums = _last_checksums(messages, len(views))
        if next(messages, None) is not None:
            raise InvalidRequestError(f"the stream carries more than the {total} bytes of its pages")
        if made != list(checksums):
            raise InvalidRequestError("a page's bytes do not have the checksum that was sent with them")
        return made


def _last_checksums(messages: Iterator[bytes], pages: int) -> Sequence[int]:
    """The checksums that come behind the payloads.

    Raises:
        InvalidRequestError: they don't.
    """
    checksums = _head(messages, "no checksums came, neither before nor after the pages").checksums
    _check_number(checksums, pages)
    return checksums


def _head(messages: Iterator[bytes], otherwise: str) -> pb.StorePages:
    """The next message of a stream, which is no payload.

    Raises:
        InvalidRequestError: ``otherwise``: it is something else.
    """
    try:
        message = next(messages)
        if len(message) > MOST_MESSAGE_BYTES:
            raise InvalidRequestError(f"{otherwise}: {len(message)} bytes, the limit is {MOST_MESSAGE_BYTES}")
        return pb.StorePages.FromString(message)
    except (StopIteration, DecodeError) as error:
        raise InvalidRequestError(otherwise) from error


def _check_number(checksums: Sequence[int], pages: int) -> None:
    if len(checksums) != pages:
        raise InvalidRequestError(f"{len(checksums)} checksums came for {pages} reserved pages")


def _time_left(context: grpc.ServicerContext) -> float:
    """How long a stream may take.

    Raises:
        InvalidRequestError: it has no deadline, or one too far away.
    """
    seconds = context.time_remaining()
    if seconds is None or int(seconds) > LONGEST_LEASE:  # gRPC rounds up on the way
        got = "none" if seconds is None or seconds > 1e9 else f"one of {seconds:.0f} s"
        raise InvalidRequestError(f"a payload stream needs a deadline of at most {LONGEST_LEASE:.0f} s, it has {got}")
    return seconds
