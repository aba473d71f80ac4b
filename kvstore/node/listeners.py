"""A node's gRPC listeners: its Unix socket, which one process at a time owns, and its TCP port."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import grpc

from kvstore.config.node import NodeConfig, default_socket, is_loopback, parse_address
from kvstore.errors import InUseError, ResourceError
from kvstore.host.process_lock import ProcessLock
from kvstore.security.socket_group import SocketGroup
from kvstore.service.access.gate import Tls
from kvstore.wire.messages import unix_target

_log = logging.getLogger(__name__)


def own_socket(path: Path, group: SocketGroup) -> ProcessLock:
    """Lock a socket's path for this process."""
    try:
        group.make_folder(path.parent)
        group.check_way_to(path)
        if path.exists() and not path.is_socket():
            raise ResourceError(f"{path} exists and is no socket; it is left alone")
        user = path.parent.stat().st_uid
        if user not in (0, os.geteuid()):  # who could put another socket there
            raise ResourceError(f"{path.parent} belongs to user {user}, not to {os.geteuid()} or root")
        lock = ProcessLock(path.with_name(path.name + ".lock"), f"socket {path} is served")
    except OSError as error:
        if isinstance(error, ResourceError):
            raise
        reason = f"{path.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
        if isinstance(error, PermissionError):
            reason = (
                f"{reason} for user {os.geteuid()}; name one in a folder of your own (the default: {default_socket()})"
            )
        raise ResourceError(f"socket {path}: {reason}") from error
    if _is_answered(path):
        lock.release()
        raise InUseError(f"socket {path} is served by a process that is no kvstore node; it is left alone")
    return lock


def bind(server: grpc.Server, config: NodeConfig, group: SocketGroup, tls: Tls | None) -> int:
    """Listen on the socket, and on the port where one is asked for. Returns the TCP port, 0 without one.

    Raises:
        ResourceError: there is no listening there.
    """
    config.socket.unlink(missing_ok=True)  # a killed node's; its lock is ours
    old = os.umask(0o177)
    try:
        _listen(server, unix_target(config.socket))
    finally:
        os.umask(old)
    group.set_modes(config.socket, 0o600, 0o660)
    if not config.listen:
        return 0
    host, port = parse_address(config.listen)
    if config.insecure and not is_loopback(host):
        _log.warning("insecure: whoever reaches %s may be able to read and write pages", host)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _check_port(host, port, address)
    return _listen(server, address, tls)


def _listen(server: grpc.Server, address: str, tls: Tls | None = None) -> int:
    try:
        port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise ResourceError(f"can't listen on {address}: {error}") from error
    if not port:
        raise ResourceError(f"can't listen on {address}")
    return port


def _check_port(host: str, port: int, address: str) -> None:
    """Find out why a port can't be had, which gRPC would not say."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        raise ResourceError(f"can't listen on {address}: {error.strerror or error}") from error


def _is_answered(path: Path) -> bool:
    """Whether some process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True
        except OSError:
            return False
    return True
