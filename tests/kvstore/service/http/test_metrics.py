"""What a scrape of a real node says, who may scrape it, and that docs/metrics.md has all of it."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.client.paths.shm.connection import call
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError, InvalidRequestError, KVStoreError, ResourceError, UnauthenticatedError
from kvstore.namespaces.registry import KnownNamespace
from kvstore.service.http import metrics
from kvstore.service.http.server import (
    Answer,
    Ask,
    WebServer,
    _PooledServer,
)
from kvstore.store.quotas import NamespaceQuotas
from kvstore.v1 import cache_pb2 as pb

DOCUMENT = (Path(__file__).parents[4] / "docs/metrics.md").read_text()
PAGE = 5000
ARENA_STORED = {"tier": "arena", "event": "stored"}


def get(port: int, path: str = "/metrics", token: str = "", scheme: str = "http") -> str:
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", token)
    context = ssl._create_unverified_context() if scheme == "https" else None
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        error.close()
        raise


def get_in_the_end(port: int) -> str:
    """What ``/health`` says, once others no longer keep it busy."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return get(port, "/health")
        except OSError:  # closed without an answer
            if time.monotonic() > deadline:
                raise


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


def hashes(count: int, name: int = 0) -> list[bytes]:
    return [name.to_bytes(16, "big") + number.to_bytes(16, "big") for number in range(count)]


def payload(count: int) -> np.ndarray:
    return np.ones((count, PAGE), np.uint8)


@pytest.fixture
def node(start_node):
    return start_node(metrics="0")


@pytest.fixture
def client(node):
    with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
        yield client


def test_pages_are_counted_with_their_denominators(node, client):
    pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    pages.store(hashes(4), payload(4))
    assert pages.prepare_load([*hashes(4), *hashes(2, 9)]).complete() == 4
    client.flush()
    text = get(node.metrics_port)
    for event, count in (("stored", 4), ("asked", 6), ("hit", 4), ("missed", 2), ("refused", 0)):
        assert value(text, "kvstore_pages_total", tier="arena", event=event) == count, event
    assert value(text, "kvstore_pages_total", tier="disk", event="stored") == 4
    assert value(text, "kvstore_tier_io_bytes_total", tier="disk", direction="written") >= 4 * PAGE
    assert value(text, "kvstore_tier_used_bytes", tier="arena") == 4 * 8192
    assert value(text, "kvstore_tier_limit_bytes", tier="arena") == node.config.arena
    assert value(text, "kvstore_clients") == 1
    assert value(text, "kvstore_dirty_pages", tier="arena") == 0
    name = f"{pages.fingerprint.hex()[:12]} {pages.layout.name}"
    assert value(text, "kvstore_namespace_arena_pages", namespace=name) == 4
    assert value(text, "kvstore_namespace_used_bytes", namespace=name, tier="arena") == 4 * 8192


def test_calls_are_timed_and_their_failures_counted(node, client):
    with pytest.raises(InvalidRequestError):
        client._session.control._connection.call(
            client._session.control._connection.stub.Touch, kvstore_page_list(b"no such namespace", b"odd"), 10.0
        )
    client.status()
    text = get(node.metrics_port)
    assert value(text, "kvstore_call_seconds_count", method="Cache/Status") == 1
    assert value(text, "kvstore_call_seconds_count", method="Cache/Touch") == 1
    assert value(text, "kvstore_call_failures_total", method="Cache/Touch", code="INVALID_ARGUMENT") == 1


def kvstore_page_list(fingerprint: bytes, hashes: bytes):
    from kvstore.v1 import cache_pb2

    return cache_pb2.PageList(fingerprint=fingerprint, hashes=hashes)


def test_streams_are_timed(start_node):
    node = start_node(metrics="0")
    node._bulk.stop(0.0)  # then a client has only the streams
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=60.0) as client:
        pages = client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
        pages.store(hashes(4), payload(4))
        assert pages.load(hashes(4), np.zeros((4, PAGE), np.uint8)) == 4
        text = get(node.metrics_port)
    for method in ("Pages/Store", "Pages/Load"):
        assert value(text, "kvstore_call_seconds_count", method=method) == 1


def test_calls_that_do_not_come_by_grpc_are_timed(start_node, eventually):
    node = start_node(metrics="0", disk_limit=0)

    def counted(*methods: str) -> bool:
        text = get(node.metrics_port)
        return all((f'kvstore_call_seconds_count{{method="{method}"}} 1.0') in text for method in methods)

    layout = kvstore.Layout(model="a", block_size=16, page_bytes=PAGE)
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        pages = client.namespace(layout)
        pages.store(hashes(4), payload(4))
        assert pages.prepare_load(hashes(4)).complete() == 4
        eventually(lambda: counted("Local/PrepareStore", "Local/CompleteStore", "Local/PrepareLoad"))
        deadline = time.monotonic() + 20.0
        with client._session.path._connections.lent(deadline) as connection, pytest.raises(KVStoreError):
            call(connection, pb.PrepareStoreRequest(client=77), deadline)
        text = get(node.metrics_port)
        code = "FAILED_PRECONDITION"
        assert value(text, "kvstore_call_failures_total", method="Local/PrepareStore", code=code) == 1
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=20.0) as client:
        pages = client.namespace(layout)
        pages.store(hashes(2, 10), payload(2))
        assert pages.load(hashes(2, 10), np.zeros((2, PAGE), np.uint8)) == 2
        eventually(lambda: counted("Bulk/Put", "Bulk/Load"))


def test_labels_are_bounded(node, client, monkeypatch):
    monkeypatch.setattr(metrics, "MOST_NAMESPACES", 2)
    for number in range(5):
        pages = client.namespace(kvstore.Layout(model=f"m{number}", block_size=16, page_bytes=PAGE))
        pages.store(hashes(number + 1), payload(number + 1))
    client.flush()  # what they take on disk counts, too
    text = get(node.metrics_port)
    names = {dict(labels)["namespace"] for name, labels in samples(text) if name == "kvstore_namespace_arena_pages"}
    assert len(names) == 3
    assert value(text, "kvstore_namespace_arena_pages", namespace=metrics.OTHERS) == 1 + 2 + 3
    assert value(text, "kvstore_namespace_used_bytes", namespace=metrics.OTHERS, tier="arena") == 6 * 8192
    assert value(text, "kvstore_namespaces") == 5


def test_increases_by_namespace_are_what_happened(node, client, monkeypatch):
    """As Prometheus computes them: a series that falls began at 0 again. Whatever gets a label, is dropped, or comes
    again in between."""
    monkeypatch.setattr(metrics, "MOST_NAMESPACES", 2)
    spaces = [client.namespace(kvstore.Layout(model=f"m{n}", block_size=16, page_bytes=PAGE)) for n in range(4)]
    names = [f"{each.fingerprint.hex()[:12]} {each.layout.name}" for each in spaces]
    stored = 0
    last: dict[str, float] = {}
    increases: Counter[str] = Counter()

    def store(space: int, count: int) -> None:
        nonlocal stored
        stored += spaces[space].store(hashes(count, stored), payload(count)).stored

    def scrape() -> dict[str, float]:
        text = get(node.metrics_port)
        counts = {
            dict(labels)["namespace"]: count
            for (name, labels), count in samples(text).items()
            if name == "kvstore_namespace_stores_total" and ("answer", "stored") in labels
        }
        assert counts.get(metrics.OTHERS, 0.0) >= last.get(metrics.OTHERS, 0.0)
        for name, count in counts.items():
            before = last.get(name, 0.0)
            increases[name] += count - before if count >= before else count
        last.update(counts)
        return counts

    def all_is_counted_once() -> None:
        assert sum(increases.values()) == stored == value(get(node.metrics_port), "kvstore_pages_total", **ARENA_STORED)

    forget = NamespaceQuotas.forget

    def scrape_and_forget(quotas: NamespaceQuotas, known: KnownNamespace) -> None:
        scrape()
        forget(quotas, known)

    for space, count in enumerate((4, 3, 2, 1)):
        store(space, count)
    before = scrape()
    assert before == {names[0]: 4, names[1]: 3, metrics.OTHERS: 3}
    store(3, 20)  # more than any
    assert scrape() == {**before, metrics.OTHERS: 23}, "a label stays"
    all_is_counted_once()
    store(0, 2)  # and nobody looks before it is dropped
    with monkeypatch.context() as patched:
        patched.setattr(
            NamespaceQuotas, "forget", scrape_and_forget
        )  # when it is not listed any more, and not gone yet
        spaces[0].clear()
        spaces[2].clear()
    assert scrape() == {names[1]: 3, names[3]: 0, metrics.OTHERS: 25}
    all_is_counted_once()
    store(3, 5)
    assert scrape() == {names[1]: 3, names[3]: 5, metrics.OTHERS: 25}
    spaces[3].clear()
    spaces[3] = client.namespace(spaces[3].layout)
    store(3, 1)
    assert scrape() == {names[1]: 3, names[3]: 1, metrics.OTHERS: 25}
    all_is_counted_once()
    spaces[1].clear()
    spaces[1] = client.namespace(spaces[1].layout)
    store(1, 2)  # so many that no counter of its own is lower than before
    store(1, 30)
    assert scrape()[metrics.OTHERS] == 25
    assert sum(increases.values()) == stored - 3, "one that is no lower did not begin again, as far as Prometheus knows"


def test_the_document_has_every_metric_and_event(node, client):
    client.namespace(kvstore.Layout(model="a", block_size=16, page_bytes=PAGE))
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(get(node.metrics_port))
    }
    written = {name for name in families if name.startswith("kvstore_") and not name.endswith("_created")}
    assert written == set(re.findall(r"^\| `(kvstore_\w+)` \|", DOCUMENT, re.MULTILINE))
    events = {sample.labels["event"] for sample in families["kvstore_pages_total"].samples}
    listed = DOCUMENT[DOCUMENT.index("Events of the arena") :].partition("## ")[0]
    assert events == set(re.findall(r"`(\w+)`", listed))


class TestHttp:
    def test_health_and_what_is_not_there(self, node):
        assert get(node.metrics_port, "/health") == "ok\n"
        with pytest.raises(urllib.error.HTTPError) as error:
            get(node.metrics_port, "/nothing")
        assert error.value.code == 404

    def test_a_stopping_node_says_so(self, start_node):
        node = start_node(metrics="0")
        node._health.stop()
        with pytest.raises(urllib.error.HTTPError) as error:
            get(node.metrics_port, "/health")
        assert error.value.code == 503

    def test_without_the_setting_there_is_none(self, start_node):
        assert start_node().metrics_port == 0

    def test_a_token_is_wanted_where_clients_need_one(self, start_node, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text("prom:a-secret-of-prometheus\n")
        tokens.chmod(0o600)
        node = start_node(metrics="0", token_file=tokens)
        assert get(node.metrics_port, "/health") == "ok\n"
        for token in ("", "Bearer wrong", "Basic a-secret-of-prometheus"):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(node.metrics_port, token=token)
            assert error.value.code == 401
        with kvstore.connect(f"kv://127.0.0.1:{node.port}") as client, pytest.raises(UnauthenticatedError):
            client.status()
        text = get(node.metrics_port, token="Bearer a-secret-of-prometheus")
        assert value(text, "kvstore_call_failures_total", method="Cache/Status", code="UNAUTHENTICATED") == 1

    def test_connections_that_say_little_do_not_keep_others_out_for_ever(self, node, monkeypatch):
        monkeypatch.setattr("kvstore.service.http.server._LONGEST_SECONDS", 0.3)
        slow = [socket.create_connection(("127.0.0.1", node.metrics_port)) for _ in range(8)]
        answered = threading.Event()

        def say_little() -> None:
            while not answered.wait(0.05):
                for each in slow[::2]:  # the others say nothing
                    with suppress(OSError):
                        each.sendall(b"x")

        thread = threading.Thread(target=say_little)
        thread.start()
        try:
            assert get_in_the_end(node.metrics_port) == "ok\n"
        finally:
            answered.set()
            thread.join()
            for each in slow:
                each.close()

    def test_where_all_threads_are_taken_the_oldest_connection_is_closed(self, node, monkeypatch):
        monkeypatch.setattr("kvstore.service.http.server._MOST_CONNECTIONS", 6)
        idle = [socket.create_connection(("127.0.0.1", node.metrics_port), timeout=60) for _ in range(6)]
        try:
            assert get(node.metrics_port, "/health") == "ok\n"
            assert idle[0].recv(1) == b""
        finally:
            for each in idle:
                each.close()

    def test_a_flood_of_silent_connections_keeps_nobody_out(self, node, monkeypatch):
        monkeypatch.setattr("kvstore.service.http.server._LONGEST_SECONDS", 3600.0)
        with ExitStack() as stack:
            for _ in range(3):
                for _ in range(100):
                    stack.enter_context(socket.create_connection(("127.0.0.1", node.metrics_port), timeout=60))
                assert "kvstore_info" in get(node.metrics_port)

    def test_a_flood_of_requests_for_pages_that_take_long_takes_few_descriptors(self, eventually, monkeypatch):
        monkeypatch.setattr(_PooledServer, "request_queue_size", 512)
        go_on = threading.Event()

        def slow(ask: Ask) -> Answer:
            go_on.wait(60)
            return Answer("text/plain", b"")

        server = WebServer(("127.0.0.1", 0), {"/slow": slow}, lambda: True, lambda: (), None, None)
        try:
            with ExitStack() as stack:
                before = len(list(Path("/proc/self/fd").iterdir()))
                flood = []
                for _ in range(400):
                    flood.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)))
                    flood[-1].sendall(b"GET /slow HTTP/1.0\r\n\r\n")
                assert all(each.recv(1) == b"" for each in flood[-100:-64])  # every thread is busy, these are closed
                assert len(list(Path("/proc/self/fd").iterdir())) - before - len(flood) < 5 * 64
                go_on.set()
                eventually(lambda: get_in_the_end(server.port) == "ok\n")
        finally:
            go_on.set()
            server.stop()

    def test_a_version_that_is_no_number_gets_the_plain_format(self, node):
        request = urllib.request.Request(
            f"http://127.0.0.1:{node.metrics_port}/metrics", headers={"Accept": "text/plain; version=newest"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert b"kvstore_info" in answer.read()

    def test_garbage_ends_one_connection_only(self, node):
        with socket.create_connection(("127.0.0.1", node.metrics_port)) as connection:
            connection.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
            connection.settimeout(20)
            connection.recv(1000)
        assert "kvstore_info" in get(node.metrics_port)


def test_a_port_in_use_is_told(start_node, node):
    with pytest.raises(ResourceError, match=f"can't listen on 127.0.0.1:{node.metrics_port} for metrics"):
        start_node(
            metrics=str(node.metrics_port),
            socket=node.config.socket.with_name("t"),
            disk_limit=0,
            arena_dir=node.config.arena_directory.with_name("other"),
        )


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "[::]:0", "example.org:80"])
def test_other_hosts_only_with_tls_and_a_token(address):
    with pytest.raises(ConfigError, match=r"metrics: .* can be reached from other hosts"):
        NodeConfig(metrics=address)
    assert NodeConfig(metrics=address, insecure=True).metrics == address
