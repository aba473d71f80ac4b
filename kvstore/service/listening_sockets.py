"""Closes a node's sockets in a forked child of its process: open there, they would outlive the node.

Its ports would stay taken, and whoever was connected to it would wait for an answer instead of being told that it is
gone. gRPC and ZeroMQ tell nobody which sockets are theirs, so they are found by what they are bound to.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Container

from kvstore.host.descriptors import redirect_to_null
from kvstore.wire.local import SOCKET_NAME


def let_sockets_go(paths: Container[str], ports: Container[int]) -> None:
    """Close, in this process, the sockets that listen at these paths and ports or in an arena's folder, and the
    connections that these took in. Whoever is at the other end is told nothing."""

    def is_one(fd: int) -> bool:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        looked_at = socket.socket(fileno=fd)
        try:
            name = looked_at.getsockname()
        finally:
            looked_at.detach()
        if isinstance(name, tuple):
            return len(name) > 1 and name[1] in ports
        return name in paths or (name[:14] == "/proc/self/fd/" and name.endswith(f"/{SOCKET_NAME}"))

    redirect_to_null(is_one)


def bound_to(endpoint: str) -> tuple[str, int]:
    """The path or the port of a ZeroMQ endpoint; empty or 0 where it has none."""
    scheme, _, rest = endpoint.partition("://")
    port = rest.rpartition(":")[2]
    return (rest, 0) if scheme == "ipc" else ("", int(port) if port.isascii() and port.isdigit() else 0)
