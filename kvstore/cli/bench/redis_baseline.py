"""The bare client that the Redis tier is measured beside, and a server for both."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from redis import ConnectionPool, Redis
from redis.exceptions import RedisError

from kvstore.errors import ConfigError, UnavailableError
from kvstore.tiers.redis.format.key_names import BUCKETS, FORMAT
from kvstore.tiers.redis.net.address import Kind, parse_address

_START_SECONDS = 10.0
_AHEAD = 2


class BareClient:
    """The fastest that a Python client can be: one socket, requests and replies straight from and to memory.

    It sends ``SET`` with ``sendall`` and receives ``GET`` with ``recv_into``: no entries, no checksums, no accounting.

    Args:
        url: of one server.

    Raises:
        ConfigError: the URL can't be read, or does not name one server.
        UnavailableError: the server is away.
    """

    def __init__(self, url: str) -> None:
        if parse_address(url).kind is not Kind.SINGLE:
            raise ConfigError("one server is measured: redis://, rediss:// or unix://")
        self._pool = ConnectionPool.from_url(url, protocol=2)
        try:
            self._connection = self._pool.get_connection()
        except (RedisError, OSError) as error:
            raise UnavailableError(f"Redis can't be reached: {error}") from error
        connected: Any = self._connection
        self._socket: socket.socket = connected._sock  # noqa: SLF001 - redis-py has no public name for it
        self._socket.settimeout(None)

    def is_used(self) -> bool:
        """Whether a kvstore's pages are there."""
        return bool(self._number(b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(BUCKETS), BUCKETS)))

    def server_cpu_seconds(self) -> float:
        """Processor time that the server has used since its start, all of its threads, for whomever."""
        self._socket.sendall(b"*2\r\n$4\r\nINFO\r\n$3\r\ncpu\r\n")
        text = bytearray(int(self._line(b"$")) + 2)
        self._receive(memoryview(text))
        values = dict(line.split(b":", 1) for line in bytes(text).split(b"\r\n") if b":" in line)
        return float(values[b"used_cpu_user"]) + float(values[b"used_cpu_sys"])

    def clear(self) -> None:
        """Delete what a tier leaves when all its pages are removed; claims and summaries would end by themselves."""
        names = [BUCKETS, FORMAT]
        client = Redis(connection_pool=self._pool)
        for pattern in ("kvstore:{*}:claim:*", "kvstore:summary:*"):
            names += client.scan_iter(pattern, count=1000)
        self.remove(names)

    def remove(self, names: Sequence[bytes]) -> None:
        """Delete values."""
        self._number(
            b"*%d\r\n$3\r\nDEL\r\n" % (len(names) + 1) + b"".join(b"$%d\r\n%b\r\n" % (len(n), n) for n in names)
        )

    def store(self, names: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """``SET`` all, then wait for all replies."""
        for name, value in zip(names, values, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
            self._socket.sendall(head)
            self._socket.sendall(value)
            self._socket.sendall(b"\r\n")
        expected = b"+OK\r\n" * len(names)
        replies = bytearray(len(expected))
        self._receive(memoryview(replies))
        if replies != expected:
            raise UnavailableError("Redis does not take what is stored; has it room for it?")

    def load(self, names: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """``GET`` all, each into its place, all of its length. Two are asked for at a time: a server that has more
        large replies to keep is slower."""
        asks = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names]
        self._socket.sendall(b"".join(asks[:_AHEAD]))
        for number, value in enumerate(values):
            self._receive(memoryview(bytearray(len(b"$%d\r\n" % len(value)))))
            self._receive(value)
            self._receive(memoryview(bytearray(2)))
            if number + _AHEAD < len(asks):
                self._socket.sendall(asks[number + _AHEAD])

    def miss(self, names: Sequence[bytes]) -> None:
        """``MGET`` of names that are nowhere."""
        asks = [b"*%d\r\n$4\r\nMGET\r\n" % (len(names) + 1), *(b"$%d\r\n%b\r\n" % (len(name), name) for name in names)]
        self._socket.sendall(b"".join(asks))
        self._line(b"*")
        self._receive(memoryview(bytearray(len(b"$-1\r\n") * len(names))))

    def close(self) -> None:
        """Disconnect."""
        self._pool.disconnect()

    def _number(self, command: bytes) -> int:
        self._socket.sendall(command)
        return int(self._line(b":"))

    def _line(self, kind: bytes) -> bytes:
        """The rest of a reply's line, which begins with this byte."""
        reply = b""
        while not reply.endswith(b"\r\n"):
            reply += self._socket.recv(1)
        if not reply.startswith(kind):
            raise UnavailableError(f"Redis refuses: {reply[1:].decode('ascii', 'replace').strip()}")
        return reply[1:]

    def _receive(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise UnavailableError("Redis closed the connection")
            view = view[count:]


@contextlib.contextmanager
def own_server() -> Iterator[list[str]]:
    """Start a redis-server without persistence; it ends with the context.

    Returns:
        Its URLs: over a Unix socket, and over TCP.

    Raises:
        UnavailableError: no such program, or it does not start.
    """
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise UnavailableError(
            "redis-server is missing; on Debian or Ubuntu: sudo apt-get install redis-server; or give --redis URL"
        )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvb") as name:
        path = Path(name) / "s"
        options = ["--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(path), "--save", ""]
        command = [program, *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=name) as process:  # noqa: S603 - our own words
            try:
                end = time.monotonic() + _START_SECONDS
                while not _listens(path):  # last of all, and some time after its file is there
                    if process.poll() is not None or time.monotonic() > end:
                        raise UnavailableError(f"{program} does not start")
                    time.sleep(0.01)
                yield [f"unix://{path}", f"redis://127.0.0.1:{port}"]
            finally:
                process.terminate()


def _listens(path: Path) -> bool:
    """Whether somebody takes connections at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as trial:
        return trial.connect_ex(str(path)) == 0
