"""A node: its store, maintenance and servers, built in order and stopped in reverse."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

import grpc

from kvstore.arena.arena import Progress
from kvstore.config.node import NodeConfig, parse_address
from kvstore.errors import ResourceError, UnavailableError
from kvstore.host.forking import register_forked
from kvstore.node.certificate_watch import CertificateWatch
from kvstore.node.grpc_server import HANDLERS, make_server
from kvstore.node.listeners import bind, own_socket
from kvstore.node.reload import plan_reload
from kvstore.node.web import NodeWeb
from kvstore.security.secret_files import read_tokens
from kvstore.security.socket_group import SocketGroup
from kvstore.segments.log import default_segment_bytes
from kvstore.service.access.connection_guard import UnauthenticatedConnections
from kvstore.service.access.descriptor_budget import DescriptorBudget, connections_within
from kvstore.service.access.gate import (
    Access,
    Gate,
    tls_of,
)
from kvstore.service.access.rate_limits import TENANT_SHARE, TenantLimits
from kvstore.service.call_times import CallTimes
from kvstore.service.event_publisher import EventPublisher
from kvstore.service.grpc.cache import CacheServicer
from kvstore.service.grpc.events import MOST_WATCHERS, EventsServicer
from kvstore.service.grpc.health_reflection import (
    STANDARD_FILES,
    Health,
    Reflection,
)
from kvstore.service.grpc.pages import MOST_STREAMS, PagesHandler
from kvstore.service.http.metrics import ObjectsCollector
from kvstore.service.listening_sockets import bound_to, let_sockets_go
from kvstore.service.page_calls import PageCalls
from kvstore.service.receipts import Receipts
from kvstore.service.sockets.bulk import BulkServer, BulkServicer
from kvstore.service.sockets.local import LocalServer
from kvstore.status import Status
from kvstore.store.maintenance import Maintenance
from kvstore.store.open import open_store
from kvstore.store.report import status_of
from kvstore.v1 import bulk_pb2, bulk_pb2_grpc, cache_pb2, cache_pb2_grpc, events_pb2, events_pb2_grpc
from kvstore.wire.local import SOCKET_NAME

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_LOOK_SECONDS = 0.1
"""How often who waits for a disk looks whether to leave that."""
_TRACES_SECONDS = 1.0
"""How long a stopping node waits for its last spans to be sent."""
_SERVICES = ("kvstore.v1.Cache", "kvstore.v1.Pages", "kvstore.v1.Bulk", "kvstore.v1.Events")
_PROTOS = (cache_pb2, bulk_pb2, events_pb2)
_log = logging.getLogger(__name__)


class Node:
    """A running node. It serves from the moment it is made until ``stop``, and in no forked child.

    Args:
        config: what to serve, and where.
        progress: told how far the arena's memory is populated.

    Raises:
        InUseError: another process owns the socket or a folder.
        ResourceError: a port, a folder or the memory can't be had.
        ConfigError: a file of TLS or tokens can't be used.
    """

    def __init__(self, config: NodeConfig, progress: Progress = lambda done, size: None) -> None:
        self.config = config
        if config.listen:
            config = dataclasses.replace(config, connections=_most_connections(config))
        self._tls = tls_of(config)
        tokens = read_tokens(config.token_file) if config.token_file is not None else None
        self.access = access = Access(tokens, lambda fingerprint: self.store.namespaces.get(fingerprint))
        self.limits = TenantLimits(
            config.tenant,
            calls=HANDLERS // TENANT_SHARE,
            streams=MOST_STREAMS // TENANT_SHARE,
            others=MOST_WATCHERS // TENANT_SHARE,
            connections=config.bulk_connections // TENANT_SHARE,
        )
        self._unauthenticated: UnauthenticatedConnections | None = None
        self._certificate: CertificateWatch | None = None
        known_by = access.asks or config.client_ca is not None
        gates: list[grpc.ServerInterceptor] = [Gate(access, self.limits, self._note)]
        self._web: NodeWeb | None = None
        times: CallTimes | None = None
        if config.metrics:
            self._web = NodeWeb(self._status, self.limits, lambda: self.store.lower_tiers.times.all())
            times = self._web.times
            gates.insert(0, times)  # around the gate: who is turned away is counted
        self._traces: TracerProvider | None = None
        self._written_back = False
        self._resizing = threading.Lock()
        self.left_pages = 0
        """Behind ``stop``: pages of the arena that were not written back in time."""
        self.instance = secrets.randbits(63)
        self.port = 0
        self._inherited = False
        self._health = Health(_SERVICES, self._watched_by)
        self._handlers = futures.ThreadPoolExecutor(HANDLERS, thread_name_prefix="kvstore-call")
        self._bulk: BulkServer | None = None
        self.publisher: EventPublisher | None = None
        """Of page events over ZeroMQ, where there is one."""
        self._local: LocalServer | None = None
        register_forked(self)
        receipts = Receipts()
        group = config.sharers
        with ExitStack() as undo:  # what ``stop`` needs is not all there yet
            self._socket_lock = own_socket(config.socket, group)
            undo.callback(self._socket_lock.release)
            if config.traces:
                from kvstore.tracing import ServerSpans, open_provider  # OpenTelemetry, for who asks for it alone

                self._traces = open_provider(config.traces)
                undo.callback(self._traces.shutdown)
                gates.insert(0, ServerSpans(self._traces))
            self.store = open_store(config, progress)
            undo.callback(lambda: self.store.close(time.monotonic() + config.drain_seconds))
            self._started = time.monotonic()
            self._maintenance = Maintenance(self.store)
            undo.callback(self._maintenance.stop)
            self._descriptors = DescriptorBudget()
            undo.callback(self._descriptors.stop)
            if self._web is not None:
                self._web.register(self._descriptors)
                objects = self.store.lower_tiers.objects
                self._web.register(ObjectsCollector(None if objects is None else objects.traffic))
            handlers: list[grpc.GenericRpcHandler] = [
                PagesHandler(self.store, receipts, access),
                self._health,
                Reflection([*(each.DESCRIPTOR.serialized_pb for each in _PROTOS), *STANDARD_FILES]),
            ]
            self._server = make_server(self._handlers, handlers, gates, config.connections)
            cache = CacheServicer(self.store, self._status, access, config.socket)
            cache_pb2_grpc.add_CacheServicer_to_server(cache, self._server)  # type: ignore[no-untyped-call]
            self._events = EventsServicer(self.store, self.instance, access)
            events_pb2_grpc.add_EventsServicer_to_server(self._events, self._server)  # type: ignore[no-untyped-call]
            undo.pop_all()
        try:
            self.port = bind(self._server, config, group, self._tls)
            self._local = self._serve_locally(group, times)
            if config.listen:
                host, _ = parse_address(config.listen)
                self._bulk = BulkServer(
                    self.store,
                    (host, config.bulk_port),
                    receipts,
                    access,
                    self.limits,
                    self._tls,
                    times,
                    config.bulk_connections,
                )
            bulk_pb2_grpc.add_BulkServicer_to_server(
                BulkServicer(self.store, self._bulk, receipts, access), self._server
            )  # type: ignore[no-untyped-call]
            if known_by and self.port:
                self._unauthenticated = UnauthenticatedConnections(self.port, config.connections, access.grant_of)
            self._server.start()
            if self._tls is not None and config.tls_cert is not None:
                self._certificate = CertificateWatch(self._tls, config.tls_cert)
            if self._web is not None:
                self._web.start(
                    config.metrics,
                    self.store,
                    access,
                    self._tls,
                    lambda: self._health.serving,
                    lambda: self._bulk.connections if self._bulk is not None else 0,
                )
            if config.events:
                self.publisher = EventPublisher(
                    self.store, config.events, config.events_replay, config.published_tenants, config.events_keys
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> bool:
        """Refuse new calls, let those under way end, write back, and give everything up. Once; again does nothing.

        Returns:
            Whether all of it was done, every page written back, before ``drain_seconds`` were over.
        """
        if self._inherited or not self._socket_lock.held:
            return True
        deadline = time.monotonic() + self.config.drain_seconds
        self._health.stop()
        self._events.stop()
        if self.publisher is not None:
            self.publisher.stop()
        # Half of the time at most for calls under way: a peer that stands still must not keep pages from the disk.
        stopped = self._server.stop(self.config.drain_seconds / 2)
        if self._unauthenticated is not None:
            self._unauthenticated.stop()
        self._descriptors.stop()
        if self._certificate is not None:
            self._certificate.stop()
        if self._bulk is not None:
            self._bulk.stop(self.config.drain_seconds / 2)
        if self._local is not None:
            self._local.stop(max(0.0, deadline - self.config.drain_seconds / 2 - time.monotonic()))
        stopped.wait(max(0.0, deadline - self.config.drain_seconds / 2 - time.monotonic()))
        self._handlers.shutdown(wait=False)
        if self._web is not None:  # until now it said that the node is stopping
            self._web.stop()
        if self._traces is not None:  # sends what it has, to a collector that may hang
            sending = threading.Thread(target=self._traces.shutdown, name="kvstore-traces", daemon=True)
            sending.start()
            sending.join(_TRACES_SECONDS)
        # Writing back may hang with the disk that it writes to, so it is waited for, not done, here.
        closing = threading.Thread(target=self._close, args=(deadline,), name="kvstore-close", daemon=True)
        closing.start()
        closing.join(max(0.1, deadline - time.monotonic()))
        self.left_pages = self.store.dirty_pages
        self.config.socket.unlink(missing_ok=True)
        self._socket_lock.release()
        return not closing.is_alive() and self._written_back

    def reload(self, config: NodeConfig, leave: Callable[[], bool] = lambda: False) -> tuple[list[str], list[str]]:
        """Take over what can change while the node runs: limits, rules, and what is in the files of tokens and of TLS.

        Calls under way go on. Tokens count first. A limit that is smaller than what is used lets pages leave before
        this returns; where they can't, that is logged, and they leave later. The first quota of a namespace with many
        pages takes longest, up to a minute. Once ``leave`` says so, neither is waited for.

        Returns:
            The settings that are others now, and those that differ and need a restart.

        Raises:
            ConfigError: a file of TLS or tokens can't be used, or a limit; nothing was changed.
            UnavailableError: this is a forked child of the node's process.
        """
        if self._inherited:
            raise UnavailableError("this node is the parent process's")
        taken, left = plan_reload(self.config, config)
        tls = tls_of(self.config)
        tokens = read_tokens(self.config.token_file) if self.config.token_file is not None else None
        lower_tiers = self.store.lower_tiers
        if "redis_limit" in taken and lower_tiers.shared is not None:
            lower_tiers.shared.check_limit(config.redis_limit)
        if "objects_limit" in taken and lower_tiers.objects is not None:
            lower_tiers.objects.check_limit(config.objects_limit)
        for own in lower_tiers.own if "disk_limit" in taken else ():
            own.check_limit(config.disk_limit)
        if self.publisher is not None:
            self.publisher.read_keys()
        self.limits.replace(config.tenant)
        if tokens is not None:  # before whatever may wait for a disk: a token that was removed can't
            self.access.replace(tokens)
        if self._tls is not None and tls is not None:
            self._tls.replace(tls)
        if self._certificate is not None:
            self._certificate.look()
        self.config = dataclasses.replace(self.config, **{key: getattr(config, key) for key in taken})
        if "redis_limit" in taken and lower_tiers.shared is not None:
            lower_tiers.shared.set_limit(config.redis_limit)
        # By a thread of its own: who stops the node does not wait for a disk that hangs.
        resizing = threading.Thread(target=self._resize, args=(taken,), name="kvstore-resize", daemon=True)
        resizing.start()
        self.store.set_rules(config.namespace, config.expire_namespaces, config.tenant, leave)
        while resizing.is_alive() and not leave():
            resizing.join(_LOOK_SECONDS)
        return taken, left

    def _resize(self, taken: Sequence[str]) -> None:
        with self._resizing:  # nobody may wait for an earlier one; the last one reads what holds now
            for own in self.store.lower_tiers.own:
                if "disk_write_limit" in taken:
                    own.set_write_limit(self.config.disk_write_limit)
                try:
                    if "disk_limit" in taken:
                        own.set_limit(self.config.disk_limit)
                except ResourceError as error:  # it holds for what comes
                    _log.error("%s", error)
            self._resize_objects(taken)  # last: a bucket may hang for longer than a disk

    def _resize_objects(self, taken: Sequence[str]) -> None:
        objects = self.store.lower_tiers.objects
        if objects is None:
            return
        if "objects_write_limit" in taken:
            objects.set_write_limit(self.config.objects_write_limit)
        if "objects_prefix_limit" in taken:
            objects.set_prefix_limit(self.config.objects_prefix_limit)
        try:
            if "objects_limit" in taken:
                objects.set_limit(self.config.objects_limit)
        except ResourceError as error:  # it holds for what comes
            _log.error("%s", error)

    def forked(self) -> None:
        """In a child: the sockets are the parent's, and end with that."""
        self._inherited = True
        endpoints = [bound_to(endpoint) for endpoint in (self.config.events, self.config.events_replay)]
        let_sockets_go(
            {str(self.config.socket), str(self.store.arena.directory / SOCKET_NAME), *(path for path, _ in endpoints)}
            - {""},
            {self.port, self.bulk_port, self.metrics_port, *(port for _, port in endpoints)} - {0},
        )

    @property
    def metrics_port(self) -> int:
        """The TCP port of metrics, 0 without one."""
        return self._web.port if self._web is not None else 0

    @property
    def bulk_port(self) -> int:
        """The TCP port of bulk connections, 0 without one."""
        return self._bulk.port if self._bulk is not None else 0

    def _close(self, deadline: float) -> None:
        self._maintenance.stop()
        try:
            self.store.close(deadline)
        except ResourceError as error:
            _log.warning("stopping: %s", error)
        else:
            self._written_back = True

    def _note(self, peer: str, shown: bytes) -> None:
        if self._unauthenticated is not None:
            self._unauthenticated.note(peer, shown)

    def _watched_by(self, peer: str) -> AbstractContextManager[None]:
        return self._unauthenticated.watched_by(peer) if self._unauthenticated is not None else nullcontext()

    def _status(self) -> Status:
        disk = str(self.config.disk) if self.config.disk_limit else ""
        validity = self._tls.validity if self._tls is not None else None
        status = status_of(self.store, self.instance, time.monotonic() - self._started, disk, validity)
        if self._bulk is None:
            return status
        return dataclasses.replace(status, connected=(*status.connected, *self._bulk.connected()))

    def _serve_locally(self, group: SocketGroup, times: CallTimes | None) -> LocalServer | None:
        try:
            return LocalServer(PageCalls(self.store), self.store.arena.directory, group, times)
        except ResourceError as error:
            _log.warning("clients on this host make all of their calls through gRPC: %s", error)
            return None


def _most_connections(config: NodeConfig) -> int:
    """Most connections by TCP, as many as its descriptors allow beside its segments."""
    segments = config.disk_limit // default_segment_bytes(config.disk_limit) if config.disk_limit else 0
    return connections_within(config.connections, segments)
