"""The gRPC connection to a node, and over it the calls that move no pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import grpc

from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.reachability import Finding
from kvstore.client.paths.use_reports import UseReports
from kvstore.client_name import name_of_process
from kvstore.errors import ConfigError, DeadlineError, KVStoreError, UnauthenticatedError, UnavailableError
from kvstore.host.cutting import cuttable, work_here
from kvstore.host.forking import register_forked, unforked
from kvstore.host.uninterrupted import abandonable
from kvstore.layout import Layout
from kvstore.limits import LONGEST_LEASE
from kvstore.page_codes import NEWEST_TIER
from kvstore.status import ClientStatus, LookupTotals, NamespaceStatus, Status, TierHealth, TierState, TierStatus
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.bulk_pb2_grpc import BulkStub
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore.wire.messages import (
    LOAD_STREAM,
    MOST_MESSAGE_BYTES,
    STORE_STREAM,
    error_of,
    is_answer,
    join_hashes,
)

Reply = TypeVar("Reply")
Metadata = tuple[tuple[str, str], ...]
_log = logging.getLogger(__name__)
_LOOK_SECONDS = 10.0
"""From one look at a node that can't be reached to the next."""
_OPTIONS = [
    # Two clients in one process are two clients to the node.
    ("grpc.use_local_subchannel_pool", 1),
    # A node that comes back is found again within a second, not within two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # In spite of its name: how long one attempt to connect may take. A node that is slow is slow, not away.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    # An error's text may name a namespace, and its name is as long as a layout allows.
    ("grpc.max_metadata_size", 64 << 10),
]


_parents_channels: list[Any] = []
"""In a forked child: its parent's, which are kept so that nothing closes them."""


class Connection:
    """A channel to one node, and the project's errors instead of gRPC's. Connects when first used.

    Args:
        target: gRPC's name of the node.
        name: what people call it, for errors.
        credentials: for TLS; None: the channel is plain.
        metadata: reads what every call carries: at once, and again when the node knows it no longer.
        traced: whether calls carry the current span's context, too.
        look: why the node can't be reached, asked when a call fails before any was answered: whether it was late, and
            how many seconds a look may take.
        client: what people call this client; empty: as its process.
    """

    def __init__(
        self,
        target: str,
        name: str,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Callable[[], Metadata] = tuple,
        *,
        traced: bool = False,
        look: Callable[[bool, float], Finding | None] = lambda late, seconds: None,
        client: str = "",
    ) -> None:
        self.name = name
        self._client = client
        self.answered = False
        """Whether the node has answered a call."""
        self._look = look
        self._next_look = 0.0
        self._found: Finding | None = None
        self._read_metadata = metadata
        self.metadata = metadata()
        self._target = target
        self._credentials = credentials
        self._traced = traced
        self._closed = False
        self._open()
        register_forked(self)

    @property
    def client(self) -> str:
        """What people call this client; one that was given no name is called by the process that it is in now."""
        return self._client or name_of_process()

    def _open(self) -> None:
        """Make the channel, and what makes calls over it."""
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self._target, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(self._target, self._credentials, options=_OPTIONS)
        if self._traced:
            from kvstore.tracing import ContextInCalls  # OpenTelemetry, for who asks for it alone

            self._channel = grpc.intercept_channel(self._channel, ContextInCalls())
        self.stub = CacheStub(self._channel)  # type: ignore[no-untyped-call]
        self.bulk = BulkStub(self._channel)  # type: ignore[no-untyped-call]
        self.load: grpc.UnaryStreamMultiCallable[pb.LoadPages, bytes] = self._channel.unary_stream(
            LOAD_STREAM, request_serializer=pb.LoadPages.SerializeToString, response_deserializer=None
        )
        self.store: grpc.StreamUnaryMultiCallable[bytes, pb.StoreCounts] = self._channel.stream_unary(
            STORE_STREAM, request_serializer=None, response_deserializer=pb.StoreCounts.FromString
        )

    def forked(self) -> None:
        """In a child: its parent's channel is left as it is, since closing it would speak to the node, too."""
        _parents_channels.append((self._channel, self.stub, self.bulk, self.load, self.store))
        if not self._closed:
            self._open()

    @abandonable
    def call(self, method: Callable[..., Reply], request: Any, timeout: float) -> Reply:
        """One unary call.

        Raises:
            KVStoreError: what the node answered, or that it did not.
        """

        end = time.monotonic() + timeout

        def ask() -> Reply:
            try:
                with self.errors():
                    reply = self._ask(method, request, timeout)
            except (UnavailableError, DeadlineError) as error:
                failed = error.__cause__
                self.answered |= isinstance(failed, grpc.RpcError) and is_answer(failed)
                if self.answered or isinstance(failed, grpc.FutureCancelledError):
                    raise
                raise self._explained(error, end) from failed
            except KVStoreError:
                self.answered = True
                raise
            self.answered = True
            return reply

        return self.as_known(ask)

    def _explained(self, error: UnavailableError | DeadlineError, end: float) -> UnavailableError | DeadlineError:
        """The same error with what a look at the node's socket or port shows, within the call's own time."""
        late = isinstance(error, DeadlineError)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._found = self._look(late, end - now)
        if self._found is None:
            return error
        failed = "did not answer in time" if late else "can't be reached"
        explained = type(error)(f"{self.name} {failed}: {self._found}")
        explained.advice = self._found.advice
        return explained

    def _ask(self, method: Callable[..., Reply], request: Any, timeout: float) -> Reply:
        work = work_here()
        if work is None:
            return method(request, timeout=timeout, metadata=self.metadata)
        late = work.is_cut
        timed = work.seconds(timeout)
        begun = cast("Any", method).future(request, timeout=timed, metadata=self.metadata)
        return cast("Reply", self.awaited(begun, late=late))

    def awaited(self, call: Any, *, late: bool = False) -> Any:
        """What a call under way answers. Giving this thread's work up cancels it, unless it was begun ``late``: behind
        that.

        Raises:
            grpc.RpcError: what the node answered, or that it did not.
            UnavailableError: it was cancelled.
        """
        try:
            with nullcontext() if late else cuttable(call.cancel):
                return call.result()
        except grpc.FutureCancelledError as error:
            raise UnavailableError(f"the call to {self.name} was given up, or its client closed") from error

    def as_known(self, ask: Callable[[], Reply], shown: Metadata | None = None) -> Reply:
        """What ``ask`` returns; where the node no longer knows the token, once more with the one that is in the file
        now: tokens are rotated while clients run. ``shown``: what was sent already, where ``ask`` waits for that."""
        shown = self.metadata if shown is None else shown
        try:
            return ask()
        except UnauthenticatedError:
            if self.metadata is shown and not self._read_again():
                raise
        return ask()

    def _read_again(self) -> bool:
        """Whether the token in the file is another one by now."""
        try:
            metadata = self._read_metadata()
        except ConfigError as error:
            _log.warning("%s does not know the token any more, and the file can't be read again: %s", self.name, error)
            return False
        if metadata == self.metadata:
            return False
        self.metadata = metadata
        return True

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise the project's errors for those of gRPC."""
        try:
            with unforked():
                yield
        except grpc.RpcError as error:
            raise error_of(error, self.name) from error
        except ValueError as error:
            if not self._closed:
                raise
            raise UnavailableError(f"the client of {self.name} is closed") from error

    def close(self) -> None:
        """End the channel; calls under way fail."""
        self._closed = True
        self._channel.close()


class RemoteControl:
    """:class:`kvstore.client.paths.path.Control` over a connection."""

    def __init__(
        self, connection: Connection, arena_folder: Callable[[str, str], str] = lambda at_node, from_socket: at_node
    ) -> None:
        self._connection = connection
        self._arena_folder = arena_folder
        self.reports = UseReports(partial(_report_use, connection))  # not a method: the two would keep each other
        """What the node is told of later."""

    @property
    def answered(self) -> bool:
        """Whether the node has answered a call."""
        return self._connection.answered

    def open_namespace(self, layout: Layout, durability: str, label: str, timeout: float) -> OpenedNamespace:
        """Name the layout of this client's pages."""
        request = pb.OpenNamespaceRequest(layout=layout.to_json(), durability=durability, label=label)
        reply = self._connection.call(self._connection.stub.OpenNamespace, request, timeout)
        arena_folder = self._arena_folder(reply.arena_directory, reply.arena_beside_socket)
        return OpenedNamespace(layout, reply.fingerprint, reply.batch_pages, arena_folder, reply.number, reply.edition)

    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]], timeout: float) -> list[bytes]:
        """For each (fingerprint, hashes) one byte a page."""
        request = pb.LookupRequest(queries=[_page_list(fingerprint, hashes) for fingerprint, hashes in queries])
        return list(self._connection.call(self._connection.stub.Lookup, request, timeout).tiers)

    def count_lookup(self, fingerprint: bytes, asked: int, arena: int, disk: int, redis: int, objects: int = 0) -> None:
        """Tell the node with the next call, or a moment later."""
        self.reports.note_lookup(fingerprint, asked, arena, disk, redis, objects)

    def explain(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> tuple[bytes, bytes]:
        """For each page the tier that has it, and why none has."""
        reply = self._connection.call(self._connection.stub.Explain, _page_list(fingerprint, hashes), timeout)
        return reply.tiers, reply.absences

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """Mark pages as used."""
        return self._count(self._connection.stub.Touch, _page_list(fingerprint, hashes), timeout)

    def evict(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float, *, pinned: bool) -> int:
        """Drop pages from every tier."""
        request = pb.PageList(fingerprint=fingerprint, hashes=join_hashes(hashes), pinned=pinned)
        return self._count(self._connection.stub.Evict, request, timeout)

    def promote(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> tuple[int, int]:
        """Bring the leading pages up into the arena, and hold them there: a load that reads nothing."""
        pages = _page_list(fingerprint, hashes)
        request = pb.PrepareLoadRequest(pages=pages, ttl_ms=max(1, int(min(timeout, LONGEST_LEASE) * 1000)))
        held = self._connection.call(self._connection.stub.PrepareLoad, request, timeout)
        return len(held.tiers), held.ticket

    def let_go(self, hold: int, timeout: float) -> None:
        """End a hold."""
        self._connection.call(self._connection.stub.CompleteLoad, pb.CompleteLoadRequest(ticket=hold), timeout)

    def pin(self, fingerprint: bytes, hashes: Sequence[bytes], seconds: int, timeout: float) -> int:
        """Keep the leading pages in the arena."""
        request = pb.PinRequest(pages=_page_list(fingerprint, hashes), seconds=seconds)
        return self._count(self._connection.stub.Pin, request, timeout)

    def unpin(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """End that."""
        return self._count(self._connection.stub.Unpin, _page_list(fingerprint, hashes), timeout)

    def clear(self, fingerprint: bytes, timeout: float) -> int:
        """Drop a namespace with all its pages."""
        return self._count(self._connection.stub.Clear, pb.ClearRequest(fingerprint=fingerprint), timeout)

    def flush(self, timeout: float) -> int:
        """Return when everything stored is durable."""
        return self._count(self._connection.stub.Flush, pb.FlushRequest(), timeout)

    def status(self, timeout: float) -> Status:
        """What the node says of itself."""
        reply = self._connection.call(self._connection.stub.Status, pb.StatusRequest(), timeout)
        return Status(
            version=reply.version,
            instance=reply.instance,
            pid=reply.pid,
            uptime_seconds=reply.uptime_seconds,
            tiers=tuple(
                TierStatus(
                    tier.name,
                    tier.used_bytes,
                    tier.limit_bytes,
                    tier.pages,
                    dict(tier.counters),
                    TierHealth(TierState.of(tier.health.state), tier.health.since, tier.health.reason),
                    dict(tier.requests),
                    tier.requests_dollars,
                )
                for tier in reply.tiers
            ),
            namespaces=tuple(
                NamespaceStatus(
                    each.name,
                    each.fingerprint,
                    each.page_bytes,
                    each.arena_pages,
                    dict(each.used_bytes),
                    dict(each.quota_bytes),
                    each.durability,
                    each.pinned_pages,
                    each.layout,
                    each.age_seconds,
                    each.idle_seconds,
                    dict(each.counters),
                    tuple(each.labels),
                )
                for each in reply.namespaces
            ),
            clients=reply.clients,
            arena_directory=reply.arena_directory,
            disk_directory=reply.disk_directory,
            time=reply.time,
            hash_check=reply.hash_check,
            connected=tuple(ClientStatus(each.name, each.way, each.seconds, each.host) for each in reply.connected),
            certificate_begins=reply.certificate_begins,
            certificate_ends=reply.certificate_ends,
            lookups=LookupTotals(
                reply.lookups.asked,
                reply.lookups.arena,
                reply.lookups.disk,
                reply.lookups.redis,
                reply.lookups.objects,
            ),
            core=reply.core,
        )

    def close(self) -> None:
        """Tell the node what it does not know yet, and end the connection."""
        self.reports.close()
        self._connection.close()

    def _count(self, method: Callable[..., Any], request: Any, timeout: float) -> int:
        return int(self._connection.call(method, request, timeout).pages)


def _report_use(connection: Connection, report: pb.UseReport, timeout: float) -> None:
    connection.call(connection.stub.ReportUse, report, timeout)


def _page_list(fingerprint: bytes, hashes: Sequence[bytes]) -> pb.PageList:
    return pb.PageList(fingerprint=fingerprint, hashes=join_hashes(hashes), newest_tier=NEWEST_TIER)
