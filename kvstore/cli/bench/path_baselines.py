"""What ``kvstore bench path`` compares: each path of kvstore, and the copy, socket or stream that bounds it."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.cli.bench.node_process import without_settings
from kvstore.cli.bench.path_peer import LOAD, REQUEST, STORE, receive
from kvstore.client.client import Client
from kvstore.client.paths.control import Connection, RemoteControl
from kvstore.client.paths.grpc import GrpcPath
from kvstore.errors import ResourceError
from kvstore.wire.messages import fill, raw_messages

Bytes = npt.NDArray[np.uint8]
_TIMEOUT = 30.0


class Side(Protocol):
    """One way for pages to move, as it is measured."""

    pid: int
    """The process at the other end."""

    def store(self, hashes: Sequence[bytes], at: int, data: Bytes) -> None:
        """Move pages there; ``at`` is where they lie in a memory without an index."""
        ...

    def load(self, hashes: Sequence[bytes], at: int, into: Bytes) -> None:
        """Move them back."""
        ...

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Drop them, so that other pages fit."""
        ...


@dataclass(frozen=True, slots=True)
class Ends:
    """The processes at the other end."""

    node: int
    socket: Path
    port: int
    peer: int
    tcp_port: int
    grpc_port: int


@contextmanager
def ends(arena: int, memory: int, lower_tiers: Sequence[str] = ("--disk-limit", "0")) -> Iterator[Ends]:
    """A node with an arena of so many bytes, as it is deployed but for its lower tiers, whose flags are given (without:
    none), and a peer with so much memory.

    Raises:
        ResourceError: one of them does not start.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        shm = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir="/dev/shm"))
        flags = ["--socket", f"{folder}/s", "--listen", "0", "--arena", str(arena), "--arena-dir", f"{shm}/arena"]
        errors = folder / "errors"
        node, ready = _started(stack, ["kvstore.cli", "serve", *flags, *lower_tiers], errors)
        port = re.search(r" port (\d+)", ready)
        if port is None:
            raise ResourceError(f"the benchmark's node does not start: {_last_line(errors)}")
        peer, line = _started(stack, ["kvstore.cli.bench.path_peer", str(memory)], errors)
        if not line:
            raise ResourceError(f"what paths are measured beside does not start: {_last_line(errors)}")
        tcp_port, grpc_port = map(int, line.split())
        yield Ends(node, folder / "s", int(port[1]), peer, tcp_port, grpc_port)


def _started(stack: ExitStack, arguments: Sequence[str], errors: Path) -> tuple[int, str]:
    """A process of this Python, ended with the stack, and its first line. What it complains of goes to a file."""
    with errors.open("w") as complaints:
        process = subprocess.Popen(  # noqa: S603 - this very program
            [sys.executable, "-m", *arguments],
            env=without_settings(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )
    stack.enter_context(process)
    stack.callback(process.terminate)
    assert process.stdout is not None
    return process.pid, process.stdout.readline()


def _last_line(errors: Path) -> str:
    return (errors.read_text(errors="replace").strip().splitlines() or ["it does not say why"])[-1]


class KVStoreSide:
    """A path of kvstore: a client of the node."""

    def __init__(self, client: Client, layout: kvstore.Layout, pid: int) -> None:
        self.pid = pid
        self._pages = client.namespace(layout)

    def store(self, hashes: Sequence[bytes], at: int, data: Bytes) -> None:
        """Through the client."""
        if self._pages.store(hashes, data).stored != len(hashes):
            raise ResourceError("the node did not store every page")

    def load(self, hashes: Sequence[bytes], at: int, into: Bytes) -> None:
        """Through the client."""
        if self._pages.load(hashes, into) != len(hashes):
            raise ResourceError("the node did not load every page")

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Evict them."""
        self._pages.evict(hashes)


class RawTcp:
    """One TCP connection, ``sendall`` and ``recv_into``."""

    def __init__(self, port: int, pid: int) -> None:
        self.pid = pid
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def store(self, hashes: Sequence[bytes], at: int, data: Bytes) -> None:
        """Send, and wait for a byte."""
        self._socket.sendall(REQUEST.pack(True, at, data.size))
        self._socket.sendall(data.data)
        self._socket.recv(1)

    def load(self, hashes: Sequence[bytes], at: int, into: Bytes) -> None:
        """Ask, and receive."""
        self._socket.sendall(REQUEST.pack(False, at, into.size))
        receive(self._socket, into.data)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class PlainGrpc:
    """gRPC streams of raw messages, of the same size as kvstore's."""

    def __init__(self, channel: grpc.Channel, pid: int) -> None:
        self.pid = pid
        self._load: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(LOAD)
        self._store: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(STORE)

    def store(self, hashes: Sequence[bytes], at: int, data: Bytes) -> None:
        """Send, and wait for the answer."""

        def messages() -> Iterator[bytes]:
            yield REQUEST.pack(True, at, data.size)
            yield from raw_messages([data])

        self._store(messages(), timeout=_TIMEOUT)

    def load(self, hashes: Sequence[bytes], at: int, into: Bytes) -> None:
        """Ask, and copy into place."""
        fill([into], self._load(REQUEST.pack(False, at, into.size), timeout=_TIMEOUT))

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Nothing."""


class Memcpy:
    """Plain copies of pages to and from the node's arena, whose slots are free just then."""

    def __init__(self, arena: Bytes, page_bytes: int, pid: int) -> None:
        self.pid = pid
        self._arena = arena
        self._page_bytes = page_bytes

    def store(self, hashes: Sequence[bytes], at: int, data: Bytes) -> None:
        """Copy there, page by page."""
        self._copy(self._arena[at : at + data.size], data)

    def load(self, hashes: Sequence[bytes], at: int, into: Bytes) -> None:
        """Copy back."""
        self._copy(into, self._arena[at : at + into.size])

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Nothing."""

    def _copy(self, target: Bytes, source: Bytes) -> None:
        for start in range(0, source.size, self._page_bytes):
            np.copyto(target[start : start + self._page_bytes], source[start : start + self._page_bytes])


Pair = Callable[[ExitStack, Ends, kvstore.Layout], tuple[Side, Side]]


def shared_pair(stack: ExitStack, ends: Ends, layout: kvstore.Layout) -> tuple[Side, Side]:
    """The mapped arena beside memcpy to and from the same mapping."""
    client = stack.enter_context(kvstore.connect(f"unix://{ends.socket}", timeout=_TIMEOUT))
    own = KVStoreSide(client, layout, ends.node)
    if client.arena is None:
        raise ResourceError("the node's arena can't be mapped")
    return own, Memcpy(client.arena, layout.page_bytes, ends.node)


def bulk_pair(stack: ExitStack, ends: Ends, layout: kvstore.Layout) -> tuple[Side, Side]:
    """Bulk connections beside raw TCP."""
    client = stack.enter_context(kvstore.connect(f"kv://127.0.0.1:{ends.port}", timeout=_TIMEOUT))
    limit = stack.enter_context(contextlib.closing(RawTcp(ends.tcp_port, ends.peer)))
    return KVStoreSide(client, layout, ends.node), limit


def grpc_pair(stack: ExitStack, ends: Ends, layout: kvstore.Layout) -> tuple[Side, Side]:
    """kvstore's streams, as they are used where no bulk connection can be made, beside plain ones."""
    connection = Connection(f"127.0.0.1:{ends.port}", "the benchmark's node")
    client = Client("", RemoteControl(connection), _TIMEOUT, lambda directory, left: GrpcPath(connection))
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{ends.grpc_port}"))
    return KVStoreSide(stack.enter_context(client), layout, ends.node), PlainGrpc(channel, ends.peer)


PATHS: dict[str, tuple[str, Pair]] = {
    "shm": ("memcpy", shared_pair),
    "bulk": ("raw TCP", bulk_pair),
    "grpc": ("plain gRPC", grpc_pair),
}
"""By a path's name: what it is measured beside, and the function that opens both."""
