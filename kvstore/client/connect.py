"""From a connection string to a client: which control calls and which path for pages a node's address means."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from kvstore.client.arguments import checked_file, checked_timeout
from kvstore.client.client import Client
from kvstore.client.credentials import Credentials
from kvstore.client.paths.bulk.path import BulkPath
from kvstore.client.paths.bulk.pool import BulkPool
from kvstore.client.paths.control import Connection, RemoteControl
from kvstore.client.paths.grpc import GrpcPath
from kvstore.client.paths.path import Control, Path
from kvstore.client.paths.reachability import Finding, PortLooks, look_at_socket
from kvstore.client.paths.shm.path import ShmPath
from kvstore.client.url import EmbeddedConfig, RemoteUrl, parse_url
from kvstore.client_name import checked_name
from kvstore.core.choice import check_choice
from kvstore.errors import InvalidRequestError, PermissionDeniedError, ResourceError
from kvstore.host.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TIMEOUT = 5.0
"""Seconds for a call where nothing else is said."""
_log = logging.getLogger(__name__)


def connect(
    url: str,
    *,
    timeout: float = TIMEOUT,
    ca: FilePath | str | None = None,
    cert: FilePath | str | None = None,
    key: FilePath | str | None = None,
    token_file: FilePath | str | None = None,
    traces: TracerProvider | None = None,
    name: str = "",
) -> Client:
    """A client of the node at ``url``.

    ``unix:///run/kvstore.sock`` is a node on this host, whose arena is mapped; ``kv://host:port`` one elsewhere,
    ``kvs://host:port`` one with TLS; ``embedded:///folder?arena=256MiB&disk_limit=4GiB`` a store inside this process.

    A node need not run yet: it is connected to by the first call, and again whenever it comes back. In a forked child a
    client connects for itself; an embedded store is one process's alone, and its use there raises
    :class:`UnavailableError`. Handlers of signals may raise during any call (Ctrl-C); where pages are sent or received
    over TCP, and in an embedded store, what they raise comes behind the call's end, within ``timeout``.

    Args:
        url: where the pages are.
        timeout: seconds that any one method may take before it raises :class:`DeadlineError`; a day at most.
        ca: PEM file of the authorities that may have signed the node's certificate; by default those of the system.
        cert: PEM file of this client's certificate, where the node asks for one.
        key: PEM file of its private key, which nobody else may read.
        token_file: a file with the token that the node asks for: the first one in it, ``token`` or ``name:token``. It
            is read again when the node no longer knows that token.
        traces: OpenTelemetry's provider that gets spans of what the client does, and whose traces go on in the node;
            needs the extra ``tracing``.
        name: what people call this client in the node's status and console; 128 characters at most. By default the
            program's name and process id. An embedded store, which is its process's alone, shows it nowhere.

    Raises:
        InvalidRequestError: not such a URL, a timeout or a name out of its range, or no file's path.
        InUseError: an embedded folder that another process has open.
        ResourceError: an embedded folder that can't be used.
        ConfigError: a file that can't be used, or ``KVSTORE_CORE`` wants a native core that is not there.
    """
    check_choice()
    timeout = checked_timeout(timeout)
    checked_name(name)
    where = parse_url(url)
    files = {"ca": ca, "cert": cert, "key": key, "token_file": token_file}
    credentials = Credentials(*(checked_file(argument, file) for argument, file in files.items()))
    if traces is not None and not hasattr(traces, "get_tracer"):
        raise InvalidRequestError(f"traces must be a provider of OpenTelemetry, got {traces!r}")
    if isinstance(where, EmbeddedConfig):
        if credentials:
            raise InvalidRequestError(f"{url}: an embedded store has neither TLS nor tokens")
        from kvstore.client.paths.embedded import EmbeddedStore  # all of a node, for who has one inside alone

        @uninterrupted
        def open_here(config: EmbeddedConfig) -> Client:
            store = EmbeddedStore(config)
            try:
                return _client(url, store, timeout, lambda directory, left: store, traces)
            except BaseException:  # OpenTelemetry is not there: nobody else would close it
                store.close()
                raise

        return open_here(where)
    credentials.check(where, url)
    context = credentials.context() if where.tls else None
    ports = PortLooks()
    connection = Connection(
        where.target,
        url,
        credentials.channel_credentials() if where.tls else None,
        credentials.metadata,
        traced=traces is not None,
        look=lambda late, seconds: _look(where, ports, late, seconds),
        client=name,
    )
    control = RemoteControl(connection, where.arena_folder)

    def make_path(directory: str, left: float) -> Path:
        if where.local and not directory:  # this token's tenant is not the arena's
            return GrpcPath(connection)
        if where.local:
            try:
                return ShmPath(connection, FilePath(directory), left, control.reports)
            except (ResourceError, PermissionDeniedError) as error:
                _log.warning("pages go through the socket instead of shared memory: %s", error)
            return GrpcPath(connection)
        return BulkPath(connection, BulkPool(connection, where.host, context, ports))

    return _client(url, control, timeout, make_path, traces)


def _look(where: RemoteUrl, ports: PortLooks, late: bool, seconds: float) -> Finding | None:
    """Why a node can't be reached."""
    if where.socket is not None:
        return look_at_socket(where.socket, late=late)
    return ports.look(where.host, where.port, tls=where.tls, seconds=seconds)


def _client(
    url: str, control: Control, timeout: float, make_path: Callable[[str, float], Path], traces: TracerProvider | None
) -> Client:
    if traces is None:
        return Client(url, control, timeout, make_path)
    from kvstore.client.traced import TracedClient

    return TracedClient(url, control, timeout, make_path, traces)
