"""Real Redis servers: one, with Sentinel, and a Cluster of six; and a proxy that harms what passes through it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, RedisCluster
from redis.exceptions import RedisError

from kvstore.tiers.redis import RedisTier

PATIENCE = 30.0


def program(kind: str) -> str:
    """redis-server or redis-cli; Valkey's will do."""
    found = shutil.which(f"redis-{kind}") or shutil.which(f"valkey-{kind}")
    if found is None:
        pytest.skip(f"redis-{kind} is missing; on Debian or Ubuntu: sudo apt-get install redis-server")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class RedisServer:
    """A redis-server on a port and a Unix socket. It can be killed, paused, and started again as it was."""

    def __init__(self, folder: Path, *options: str, kind: str = "server", config: str = "") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket = folder / "s"
        self.config = folder / "redis.conf"
        self.config.write_text(config)
        self.options = options
        self.kind = kind
        self.process: subprocess.Popen[bytes] | None = None
        self.client = Redis(port=self.port, host="127.0.0.1", socket_timeout=PATIENCE)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        base = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--unixsocket"]
        mode = ["--sentinel"] if self.kind == "sentinel" else ["--save", "", "--appendonly", "no"]
        command = [program("server"), str(self.config), *mode, *base, str(self.socket), *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self.answers)

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (RedisError, OSError):
            return False

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE)

    def close(self) -> None:
        self.client.close()
        self.kill()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not happen: {condition}"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def redis_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvr", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_server(redis_folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(redis_folder / "one")
    yield server
    server.close()


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server that is empty."""
    shared_server.client.flushall()
    return shared_server


@pytest.fixture
def start_server(short_folder: Path) -> Iterator[Callable[..., RedisServer]]:
    """Start a server of the test's own, which it may harm."""
    servers: list[RedisServer] = []

    def start(*options: str, **more: Any) -> RedisServer:
        servers.append(RedisServer(short_folder / str(len(servers)), *options, **more))
        return servers[-1]

    yield start
    for one in servers:
        one.resume()
        one.close()


class Cluster:
    """Three primaries, each with a replica."""

    def __init__(self, folder: Path) -> None:
        self.servers = []
        for number in range(6):
            bus = str(free_port())
            options = ["--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-node-timeout", "1000"]
            self.servers.append(RedisServer(folder / str(number), *options))
        hosts = [f"127.0.0.1:{server.port}" for server in self.servers]
        create = [program("cli"), "--cluster", "create", *hosts, "--cluster-replicas", "1", "--cluster-yes"]
        done = subprocess.run(create, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(self.is_whole)
        self.url = "redis+cluster://" + ",".join(hosts)
        self.client = RedisCluster(host="127.0.0.1", port=self.servers[0].port)

    def is_whole(self) -> bool:
        states = [server.client.cluster("info") for server in self.servers]
        replicas = [server.client.info("replication").get("master_link_status", "up") for server in self.servers]
        return all(state["cluster_state"] == "ok" for state in states) and set(replicas) == {"up"}

    def primaries(self) -> list[RedisServer]:
        return [server for server in self.servers if server.client.info("replication")["role"] == "master"]

    def close(self) -> None:
        self.client.close()
        for server in self.servers:
            server.close()


@pytest.fixture(scope="session")
def shared_cluster(redis_folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(redis_folder / "cluster")
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """A Cluster that is empty."""
    for server in shared_cluster.primaries():
        server.client.flushall()
    return shared_cluster


@pytest.fixture
def start_cluster(short_folder: Path) -> Iterator[Callable[[], Cluster]]:
    """Start a Cluster of the test's own, which it may harm."""
    clusters: list[Cluster] = []

    def start() -> Cluster:
        clusters.append(Cluster(short_folder / f"c{len(clusters)}"))
        return clusters[-1]

    yield start
    for one in clusters:
        one.close()


@pytest.fixture
def open_redis() -> Iterator[Callable[..., RedisTier]]:
    """Open a tier with deadlines for slow machines; it is closed when the test ends."""
    tiers: list[RedisTier] = []

    def start(url: str, limit_bytes: int = 64 << 20, **options: Any) -> RedisTier:
        defaults = {"timeout": 20.0, "lookup_timeout": 20.0, "pause": 0.01}
        tiers.append(RedisTier(url, limit_bytes, **(defaults | options)))
        return tiers[-1]

    yield start
    for tier in tiers:
        tier.close()


class Proxy:
    """A TCP proxy before a server. Its faults hold for what passes from the moment they are set.

    ``drop``: bytes from the server vanish. ``cut_after``: connections end after so many further bytes from the server.
    ``garble``: one bit of each piece from the server is flipped. ``delay``: seconds before each piece.
    ``refuse``: new connections are closed at once. ``cut_up_after``: so many bytes to the server, then the end.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.drop = self.refuse = False
        self.garble: Callable[[bytearray], None] | None = None
        self.delay = 0.0
        self.cut_after: int | None = None
        self.cut_up_after: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def heal(self) -> None:
        self.drop = self.refuse = False
        self.garble = self.cut_after = self.cut_up_after = None
        self.delay = 0.0

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets += [near, far]
            self._start(self._pump, near, far, True)
            self._start(self._pump, far, near, False)

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if self.delay:
                    self._closed.wait(self.delay)
                if up and self.cut_up_after is not None:
                    data = data[: self.cut_up_after]
                    self.cut_up_after -= len(data)
                    sink.sendall(data)
                    if not self.cut_up_after:
                        break
                    continue
                if not up:
                    if self.drop:
                        continue
                    if self.garble is not None:
                        self.garble(data)
                    if self.cut_after is not None:
                        data = data[: self.cut_after]
                        self.cut_after -= len(data)
                        sink.sendall(data)
                        if not self.cut_after:
                            break
                        continue
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.1):
            pass
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for one in self._sockets:
            one.close()


@pytest.fixture
def start_proxy() -> Iterator[Callable[[int], Proxy]]:
    """Start a proxy before the server at a port."""
    proxies: list[Proxy] = []

    def start(port: int) -> Proxy:
        proxies.append(Proxy(port))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


class Books:
    """What lies in Redis under our names, read without the tier, and recounted."""

    def __init__(self, clients: list[Redis], budget: int) -> None:
        values: dict[bytes, tuple[Redis, bytes]] = {}
        for client in clients:
            for name in client.scan_iter(match=b"kvstore:*", count=1000):
                values[name] = (client, name)
        self.entries: dict[bytes, bytes] = {}
        self.used_bytes = 0
        self.pages = 0
        self.chunks: dict[bytes, int] = {}
        self.memory = 0
        """What the servers say that our keys take."""
        parts: set[bytes] = set()
        expected: set[bytes] = set()
        for name, (client, _) in values.items():
            self.memory += client.memory_usage(name, samples=0) or 0
            if name.startswith(b"kvstore:page:"):
                entry = client.get(name)
                if entry is not None:
                    self.entries[name[13:]] = entry
            elif b":chunk:" in name:
                parts.add(name)
            elif name.endswith(b":chunks"):
                base = name[: -len(b"chunks")]
                lines = client.hgetall(name)
                books = client.hgetall(base + b"books")
                assert set(lines) == set(client.zrange(base + b"order", 0, -1))
                charges = 0
                pages = 0
                for nonce, line in lines.items():
                    charge, live, _, count = map(int, line.split(b":"))
                    charges += charge
                    pages += live
                    self.chunks[nonce] = live
                    expected |= {base + b"chunk:%b:%d" % (nonce, part) for part in range(count)}
                assert (charges, pages) == (int(books[b"bytes"]), int(books[b"pages"])), "the books don't add up"
                assert charges <= budget, "a bucket is over its budget"
                self.used_bytes += charges
                self.pages += pages
        assert parts == expected, "a value that no book knows, or the other way round"

    def check_entries(self) -> None:
        """Every entry has its chunk, and every chunk as many entries as it says. Holds when nobody was killed."""
        named: dict[bytes, int] = dict.fromkeys(self.chunks, 0)
        for entry in self.entries.values():
            assert entry[5:21] in named, "an entry whose chunk is gone"
            named[entry[5:21]] += 1
        assert named == self.chunks


@pytest.fixture
def books() -> Callable[..., Books]:
    """Recount what lies in some servers."""

    def recount(*servers: RedisServer, budget: int) -> Books:
        return Books([server.client for server in servers], budget)

    return recount


@pytest.fixture
def start_peer() -> Iterator[Callable[[bytes], int]]:
    """Start a peer that says the same to whoever connects, and nothing else. Returns its port."""
    listeners: list[socket.socket] = []
    connected: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(listener: socket.socket, greeting: bytes) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = listener.accept()
                connected.append(one)
                with contextlib.suppress(OSError):
                    one.sendall(greeting)

    def start(greeting: bytes) -> int:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threads.append(threading.Thread(target=serve, args=(listeners[-1], greeting), daemon=True))
        threads[-1].start()
        return int(listeners[-1].getsockname()[1])

    yield start
    for one in listeners:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
    for thread in threads:
        thread.join(PATIENCE)
    for one in connected:
        one.close()
