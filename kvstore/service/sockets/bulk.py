"""The server of bulk connections: frames over TCP (:mod:`kvstore.wire`), a thread each, buffered by the kernel alone.

Pages are sent from the arena and received into it. A peer that is slow costs its own connection and, until the deadline
of its request, the slots that it asked for; a peer that sends nonsense, or nothing, costs a thread for a while.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from kvstore.client_name import shown_name
from kvstore.errors import (
    DeadlineError,
    FormatError,
    InvalidRequestError,
    KVStoreError,
    LimitExceededError,
    ResourceError,
    UnauthenticatedError,
    UnknownNamespaceError,
)
from kvstore.hashing import HASH_BYTES
from kvstore.limits import LONGEST_LEASE
from kvstore.page_codes import as_known
from kvstore.security.grants import READ, WRITE, Grant
from kvstore.service.access.gate import Access, Tls
from kvstore.service.access.one_time_tokens import TOKEN_BYTES, Issued, OneTimeTokens
from kvstore.service.access.rate_limits import TENANT_SHARE, TenantLimits
from kvstore.service.call_times import CallTimes
from kvstore.service.calls import answering
from kvstore.service.incoming import incoming
from kvstore.service.page_calls import reserve
from kvstore.service.receipts import Receipts
from kvstore.service.sockets.frame_server import FrameServer, told
from kvstore.status import ClientStatus
from kvstore.store.leases import NODE
from kvstore.store.results import Published
from kvstore.store.store import Store
from kvstore.v1 import bulk_pb2, bulk_pb2_grpc
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.channel import Channel
from kvstore.wire.frame import (
    NUMBERED,
    Kind,
    pack_frame,
    payload_bytes,
)
from kvstore.wire.messages import AT_ONCE_BYTES, split_hashes

METHODS = {kind: f"Bulk/{kind.name.title()}" for kind in (Kind.LOAD, Kind.RESERVE, Kind.PUT)}
"""What each request is in metrics."""
MOST_CONNECTIONS = 128
"""Most authenticated connections, unless the node is told otherwise."""
MOST_UNAUTHENTICATED = 32
"""Most connections that have not shown a token yet."""
MOST_TOKENS = 256
TOKEN_SECONDS = 10.0
HELLO_SECONDS = 5.0
"""How long a connection may take to show its token, TLS included."""
IDLE_SECONDS = 120.0
"""How long a connection may wait for its next request."""
MESSAGE_SECONDS = 5.0
"""How long the message behind a header, or an answer without payload, may take."""
_log = logging.getLogger(__name__)


class _Peer(NamedTuple):
    """Who is at the other end of a connection."""

    name: str
    """What they call themselves."""
    host: str
    since: float
    """On the clock of ``time.monotonic``."""


class BulkServer(FrameServer[socket.socket]):
    """Listens for bulk connections and answers them from a store.

    Args:
        store: what is served.
        address: host and port to listen on; port 0 is any free one.
        receipts: told what became of stores.
        access: what whoever was given a connection's token may do.
        limits: of tenants.
        tls: the node's TLS; None: connections are plain.
        times: told how long requests take.
        most: most authenticated connections.

    Raises:
        ResourceError: the address can't be had.
    """

    def __init__(
        self,
        store: Store,
        address: tuple[str, int],
        receipts: Receipts,
        access: Access,
        limits: TenantLimits,
        tls: Tls | None = None,
        times: CallTimes | None = None,
        most: int = MOST_CONNECTIONS,
    ) -> None:
        self._times = times
        self._most = most
        self._store = store
        self._access = access
        self._limits = limits
        self._receipts = receipts
        self._tls = tls
        self.tokens = OneTimeTokens(MOST_TOKENS, TOKEN_SECONDS)
        self._unauthenticated: dict[socket.socket, socket.socket] = {}
        """Each with a second descriptor of its connection, to cut it by; the oldest first."""
        self._peers: dict[Channel, _Peer] = {}
        """Who is at the other end of authenticated connections."""
        listener = _listen(address)
        self.port: int = listener.getsockname()[1]
        super().__init__(listener, "kvstore-bulk")

    @property
    def connections(self) -> int:
        """How many are open, unauthenticated ones included."""
        with self._lock:
            return len(self._channels) + len(self._unauthenticated)

    def connected(self) -> list[ClientStatus]:
        """Who is at the other end of each authenticated connection."""
        now = time.monotonic()
        with self._lock:
            peers = list(self._peers.values())
        return [ClientStatus(each.name, "bulk", now - each.since, each.host) for each in peers]

    def _cut_all(self) -> None:
        super()._cut_all()
        for connection in self._unauthenticated.values():
            _cut(connection)

    def _take_in(self, connected: socket.socket) -> socket.socket | None:
        """Count a connection as an unauthenticated one. None: it is closed, since there are too many threads by now.

        Of too many, the oldest goes: it has had its time to show a token, and who comes to stay needs little of that.
        """
        try:
            duplicate = connected.dup()
        except OSError:  # no descriptors left
            connected.close()
            return None
        with self._lock:
            if len(self._threads) >= self._most + 2 * MOST_UNAUTHENTICATED:
                duplicate.close()
                connected.close()
                return None
            if len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
                oldest = next(iter(self._unauthenticated))
                _cut(self._unauthenticated[oldest])
                self._unauthenticated.pop(oldest).close()
            self._unauthenticated[connected] = duplicate
        return connected

    def _serve(self, connected: socket.socket) -> None:
        channel = None
        try:
            channel, holder = self._authenticate(connected)
            with self._slot(channel, holder):
                while not self._stopping.is_set():
                    self._answer(channel, holder)
        except (KVStoreError, OSError) as error:
            _log.debug("a bulk connection ended: %s", error)
        finally:
            if channel is not None:
                with self._lock:
                    self._channels.pop(channel, None)
                    self._peers.pop(channel, None)
                    self._idle.notify_all()
                channel.close()
            self._forget(connected, threading.current_thread())

    def _forget(self, connected: socket.socket, thread: threading.Thread) -> None:
        with self._lock:
            self._forget_unauthenticated(connected)
            self._threads.discard(thread)
        with contextlib.suppress(OSError):
            connected.close()

    def _forget_unauthenticated(self, connected: socket.socket) -> None:
        """The caller has the lock."""
        if (duplicate := self._unauthenticated.pop(connected, None)) is not None:
            duplicate.close()

    @contextlib.contextmanager
    def _slot(self, channel: Channel, holder: bytes) -> Iterator[None]:
        """One of the connections that a holder's tenant may have, and the word that requests may come.

        Raises:
            KVStoreError: the tenant has as many as it may.
        """
        with ExitStack() as slot:
            try:
                slot.enter_context(self._limits.slot(self._access.holder(holder), "bulk connections"))
            except KVStoreError as error:
                _fail(channel, error)
                raise
            channel.answering = NUMBERED
            channel.send(Kind.READY)
            yield

    def _authenticate(self, connected: socket.socket) -> tuple[Channel, bytes]:
        """Let a connection in that shows a token, and say whose that is.

        Raises:
            KVStoreError: it does not.
        """
        deadline = time.monotonic() + HELLO_SECONDS
        host = _host_of(connected)  # now: wrapped, this socket is no more
        encrypted = connected
        if self._tls is not None:
            connected.settimeout(HELLO_SECONDS)
            encrypted = self._tls.context.wrap_socket(connected, server_side=True)
        channel = Channel(encrypted, deadline)
        try:
            issued = self._check_hello(channel)
            self._admit(connected, channel, _Peer(issued.name, host, time.monotonic()))
        except BaseException:
            with self._lock:
                self._channels.pop(channel, None)
                self._peers.pop(channel, None)
            channel.close()
            raise
        return channel, issued.holder

    def _admit(self, connected: socket.socket, channel: Channel, peer: _Peer) -> None:
        """Count a connection as an authenticated one.

        Raises:
            LimitExceededError: there are too many.
        """
        with self._lock:
            if len(self._channels) < self._most:
                self._forget_unauthenticated(connected)
                self._channels[channel] = False
                self._peers[channel] = peer
                return
        error = LimitExceededError(f"{self._most} bulk connections are open, the limit")
        _fail(channel, error)
        raise error

    def _check_hello(self, channel: Channel) -> Issued:
        """Receive a token, use it up, and say for whom it was.

        Raises:
            KVStoreError: it is not good.
        """
        header = channel.receive_header()
        if header.kind is not Kind.HELLO or header.message != TOKEN_BYTES:
            raise FormatError("a bulk connection begins with its token")
        issued = self.tokens.redeem(channel.receive_message(header))
        if issued is None:
            error = UnauthenticatedError("the token is unknown, was used before, or is too old")
            _fail(channel, error)
            raise error
        return issued

    def _answer(self, channel: Channel, holder: bytes) -> None:
        """One request.

        Raises:
            KVStoreError: the connection is of no more use.
        """
        channel.deadline = time.monotonic() + IDLE_SECONDS
        header = channel.receive_header()
        channel.answering = header.number
        start = time.monotonic()
        channel.deadline = start + MESSAGE_SECONDS
        with self._lock:
            self._channels[channel] = True
        try:
            message = channel.receive_message(header)
            deadline = start + min(header.milliseconds / 1000, LONGEST_LEASE)
            grant = self._grant(channel, holder)
            try:
                if header.kind is Kind.LOAD:
                    self._load(channel, grant, pb.LoadPages.FromString(message).pages, deadline)
                elif header.kind is Kind.RESERVE:
                    self._reserve(channel, grant, pb.PrepareStoreRequest.FromString(message))
                elif header.kind is Kind.PUT:
                    self._limits.spend(grant, header.payload)
                    self._put(channel, grant, pb.StorePages.FromString(message), header.payload, deadline)
                else:
                    raise FormatError(f"a frame of kind {header.kind.name} is no request")
            except DecodeError as error:
                raise FormatError("a request's message can't be read") from error
            if self._times is not None:
                self._times.took(METHODS[header.kind], time.monotonic() - start)
        except KVStoreError as error:
            if self._times is not None and header.kind in METHODS:
                self._times.failed(METHODS[header.kind], error)
            raise
        finally:
            with self._lock:
                self._channels[channel] = False
                self._idle.notify_all()

    def _refuse(self, channel: Channel, kind: Kind, error: KVStoreError) -> None:
        """Answer a request with an error; the connection stays good."""
        if self._times is not None:
            self._times.failed(METHODS[kind], error)
        _fail(channel, error)

    def _grant(self, channel: Channel, holder: bytes) -> Grant:
        """What whoever a connection belongs to may do now.

        Raises:
            UnauthenticatedError: nothing any more; that has been said.
        """
        try:
            return self._access.holder(holder)
        except UnauthenticatedError as error:
            _fail(channel, error)
            raise

    def _reserve(self, channel: Channel, grant: Grant, request: pb.PrepareStoreRequest) -> None:
        try:
            self._access.check_pages(grant, request.pages.fingerprint, WRITE)
            self._limits.begin(grant)
            reply = reserve(self._store, NODE, request)
        except KVStoreError as error:
            self._refuse(channel, Kind.RESERVE, error)
            return
        channel.deadline = time.monotonic() + MESSAGE_SECONDS
        channel.send(Kind.RESERVED, reply.SerializeToString())

    def _load(self, channel: Channel, grant: Grant, pages: pb.PageList, deadline: float) -> None:
        try:
            self._access.check_pages(grant, pages.fingerprint, READ)
            self._limits.begin(grant)
            known = self._store.namespaces.get(pages.fingerprint)
            if known is None:
                raise UnknownNamespaceError("unknown namespace: open it first")
            hashes = split_hashes(pages.hashes)
            held = self._store.prepare_load(NODE, pages.fingerprint, hashes, deadline - time.monotonic())
        except KVStoreError as error:
            self._refuse(channel, Kind.LOAD, error)
            return
        channel.deadline = deadline
        if not held.lease:
            channel.send(Kind.RUN, pb.PageRun().SerializeToString())
            return
        try:
            checksums = self._store.checksums(NODE, held.lease)
            if checksums is None:
                raise DeadlineError("reading the pages took longer than they can be held")
            page_bytes = known.layout.page_bytes
            self._limits.spend(grant, len(held.frames) * page_bytes)
            head = pack_frame(
                Kind.RUN,
                pb.PageRun(tiers=as_known(held.tiers, pages.newest_tier)).SerializeToString(),
                payload=payload_bytes(len(held.frames), page_bytes),
                milliseconds=channel.answering,
            )
            views = [self._store.arena.view(frame, page_bytes) for frame in held.frames]
            for _ in channel.send_pages(views, checksums, head=head):
                if not self._store.still_held(NODE, held.lease):
                    raise DeadlineError("the reader was slower than pages can be held")
        finally:
            self._store.complete_load(NODE, held.lease)

    def _put(self, channel: Channel, grant: Grant, request: pb.StorePages, payload: int, deadline: float) -> None:
        channel.deadline = deadline
        with ExitStack() as stack:
            try:
                if request.HasField("request"):  # a reservation's was looked at when it was made
                    self._access.check_pages(grant, request.request.pages.fingerprint, WRITE)
                    self._limits.begin(grant)
                arrival = stack.enter_context(incoming(self._store, self._receipts, request, channel.cut))
            except KVStoreError as error:
                if payload > _most_payload(request):
                    raise FormatError(f"a payload of {payload} bytes came with nothing to receive") from error
                channel.discard(payload)
                self._refuse(channel, Kind.PUT, error)
                return
            pages = arrival.pages
            if pages is None:
                channel.discard(payload)
            else:
                if payload != sum(payload_bytes(1, page.size) for page in pages):
                    raise FormatError(f"a payload of {payload} bytes came for {len(pages)} reserved pages")
                checksums = [made for made in channel.receive_pages(pages) if made is not None]
                if len(checksums) == len(pages):
                    arrival.checksums = checksums
        channel.deadline = time.monotonic() + MESSAGE_SECONDS
        if pages is None or arrival.checksums is not None:
            channel.send(Kind.STORED, _counts(arrival.published).SerializeToString())
        else:
            damaged = len(pages) - len(checksums)
            what = f"{damaged} pages' bytes do not have the checksums sent with them"
            self._refuse(channel, Kind.PUT, InvalidRequestError(what))


class BulkServicer(bulk_pb2_grpc.BulkServicer):
    """Answers ``kvstore.v1.Bulk``."""

    def __init__(self, store: Store, server: BulkServer | None, receipts: Receipts, access: Access) -> None:
        self._store = store
        self._access = access
        self._server = server
        self._receipts = receipts

    @answering
    def Open(self, request: bulk_pb2.OpenBulkRequest, context: grpc.ServicerContext) -> bulk_pb2.OpenBulkReply:
        """A token for one connection."""
        if self._server is None:
            raise InvalidRequestError("this node listens on no TCP port, so it has no bulk connections")
        tokens = self._server.tokens
        holder = self._access.pass_of_call(context)
        if not self._access.holder(holder).every and tokens.waiting(holder) >= MOST_TOKENS // TENANT_SHARE:
            raise LimitExceededError(f"{tokens.waiting(holder)} tokens for bulk connections wait to be used, the limit")
        return bulk_pb2.OpenBulkReply(
            port=self._server.port,
            token=tokens.issue(holder, shown_name(request.name)),
            expires_ms=int(tokens.seconds * 1000),
        )

    @answering
    def Settle(self, request: bulk_pb2.SettleRequest, context: grpc.ServicerContext) -> bulk_pb2.SettleReply:
        """What became of a store, by the number that it was sent under."""
        remaining = context.time_remaining()
        try:
            published = self._receipts.settle(request.ticket, min(remaining or MESSAGE_SECONDS, MESSAGE_SECONDS))
        except TimeoutError as error:
            raise DeadlineError("the pages are still being received") from error
        if published is None:
            given_up = self._store.complete_store(NODE, request.ticket, publish=False)
            published = given_up if given_up.refused else None
        if published is None:
            return bulk_pb2.SettleReply(known=False)
        counts = _counts(published)
        return bulk_pb2.SettleReply(known=True, stored=counts.stored, present=counts.present, refused=counts.refused)


def _counts(published: Published) -> pb.StoreCounts:
    return pb.StoreCounts(stored=published.stored, present=published.present, refused=published.refused)


def _most_payload(request: pb.StorePages) -> int:
    """Most bytes that may come with a request that is refused, and be thrown away."""
    pages = len(request.request.pages.hashes) // HASH_BYTES
    return AT_ONCE_BYTES + payload_bytes(pages, 0)


def _fail(channel: Channel, error: KVStoreError) -> None:
    """Answer with an error; the connection stays good."""
    channel.deadline = time.monotonic() + MESSAGE_SECONDS
    channel.send(Kind.FAILED, told(error))


def _host_of(connected: socket.socket) -> str:
    """The address at the other end; an IPv4 one is written as such."""
    host = str(connected.getpeername()[0])
    return host.removeprefix("::ffff:")


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(
            where[:2], family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6 and host == "::"
        )
    except OSError as error:
        raise ResourceError(f"can't listen on {host}:{port} for bulk connections: {error.strerror or error}") from error
