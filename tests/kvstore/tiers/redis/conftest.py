"""Real Redis servers, alone and with a Cluster of six, proxies before them, and a recount of what lies there."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import Proxy
from redis_recount import Recount
from redis_servers import PATIENCE, Cluster, RedisServer, wait_until

from kvstore.tiers.redis import RedisTier


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
def servers_at(request: pytest.FixtureRequest) -> Callable[[str], tuple[list[RedisServer], str]]:
    """Servers that are empty, and the url of them all: one (``single``), or the primaries of a ``cluster``."""

    def find(kind: str) -> tuple[list[RedisServer], str]:
        if kind == "single":
            one: RedisServer = request.getfixturevalue("server")
            return [one], one.url
        several: Cluster = request.getfixturevalue("cluster")
        return several.primaries(), several.url

    return find


@pytest.fixture
def steady_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """A Cluster that is empty, and stays as it is while one of its servers stands still."""

    def configure(*, no_failover: str, full_coverage: str) -> None:
        for one in cluster.servers:
            one.client.config_set("cluster-replica-no-failover", no_failover)
            one.client.config_set("cluster-require-full-coverage", full_coverage)

    configure(no_failover="yes", full_coverage="no")
    yield cluster
    for one in cluster.servers:
        one.resume()
    wait_until(cluster.is_whole)
    configure(no_failover="no", full_coverage="yes")


@pytest.fixture
def start_cluster(short_folder: Path) -> Iterator[Callable[..., Cluster]]:
    """Start a Cluster of the test's own, which it may harm."""
    clusters: list[Cluster] = []

    def start(**options: Any) -> Cluster:
        clusters.append(Cluster(short_folder / f"c{len(clusters)}", **options))
        return clusters[-1]

    yield start
    for one in clusters:
        one.close()


@pytest.fixture
def open_redis() -> Iterator[Callable[..., RedisTier]]:
    """Open a tier with deadlines for slow machines; it is closed when the test ends."""
    tiers: list[RedisTier] = []

    def start(url: str, limit_bytes: int = 64 << 20, **options: Any) -> RedisTier:
        defaults = {"timeout": 20.0, "lookup_timeout": 20.0, "pause": 0.01, "refresh": 0.05}
        tiers.append(RedisTier(url, limit_bytes, **(defaults | options)))
        return tiers[-1]

    yield start
    for tier in tiers:
        tier.close()


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


@pytest.fixture
def recount() -> Callable[..., Recount]:
    """Recount what lies in some servers."""

    def count(*servers: RedisServer, budget: int) -> Recount:
        return Recount([server.client for server in servers], budget)

    return count


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
