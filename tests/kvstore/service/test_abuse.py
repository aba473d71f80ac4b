"""Clients that abuse a real node, each in its way, while an honest one stores and loads beside them."""

from __future__ import annotations

import itertools
import shutil
import socket
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import pytest
from bulk_peer import frame
from node_process import NodeProcess

import kvstore
from kvstore.errors import LimitExceededError
from kvstore.service.access.rate_limits import TENANT_SHARE
from kvstore.service.grpc.pages import MOST_STREAMS
from kvstore.service.sockets.bulk import MOST_CONNECTIONS
from kvstore.v1 import bulk_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.bulk_pb2_grpc import BulkStub
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore.wire.frame import HEADER_BYTES, Header, Kind

SECONDS = 30.0
PAGE = 64 << 10
NAMES = itertools.count()
RUDE = ("rude", "holder", "crowd", "flood", "glutton")
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def token_of(name: str) -> str:
    return f"{name}-token-of-some-length"


def how(name: str) -> dict[str, object]:
    return {"metadata": [("authorization", f"Bearer {token_of(name)}")], "timeout": SECONDS}


def layout_of(tenant: str, model: str = "tiny", page_bytes: int = PAGE) -> kvstore.Layout:
    return kvstore.Layout(model=model, block_size=16, page_bytes=page_bytes, tenant=tenant)


class Victim(NodeProcess):
    metrics_port = 0
    token_file = Path()

    def serves(self) -> None:
        """An honest client, by a connection of its own: its pages come and go, and probes are answered."""
        hashes = [next(NAMES).to_bytes(32, "big") for _ in range(4)]
        data = np.random.default_rng(1).integers(0, 256, (4, PAGE), dtype=np.uint8)
        with kvstore.connect(self.kv_url, timeout=SECONDS, token_file=self.token_file) as client:
            pages = client.namespace(layout_of("honest"))
            assert pages.store(hashes, data).stored == 4
            into = np.zeros_like(data)
            assert pages.load(hashes, into) == 4
            assert np.array_equal(into, data)

    def probed(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/health", timeout=SECONDS) as reply:
            return reply.read().decode()

    def refused(self) -> str:
        """What the node's metrics say of limits."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.metrics_port}/metrics")
        request.add_header("Authorization", f"Bearer {token_of('operator')}")
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return reply.read().decode()


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A node as a process of its own; what one test does to it, the next one finds."""
    folder = Path(tempfile.mkdtemp(prefix="kv", dir="/tmp"))
    shm = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    tokens, config = folder / "tokens", folder / "config.toml"
    tokens.write_text(
        f"operator:{token_of('operator')}\n"
        + "".join(f"{name}:{token_of(name)} tenant={name}\n" for name in ("honest", *RUDE))
    )
    tokens.chmod(0o600)
    config.write_text(
        '[[tenant]]\nname = "flood"\nrequests_per_second = 20\n'
        '[[tenant]]\nname = "glutton"\nbytes_per_second = "1MiB"\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"token-file": str(tokens), "config": str(config), "metrics": f"127.0.0.1:{port}"}
    node = Victim(folder, shm, **options)
    node.metrics_port = port
    node.token_file = folder / "honest"
    node.token_file.write_text(token_of("honest"))
    node.token_file.chmod(0o600)
    node.start()
    yield node
    assert node.process is not None
    assert node.process.poll() is None, "it is still there"
    node.kill()
    assert "Traceback" not in node.errors.read_text()
    shutil.rmtree(folder)
    shutil.rmtree(shm)


@pytest.fixture
def channel(victim: Victim) -> Iterator[grpc.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{victim.port}", options=options) as channel:
        yield channel


@pytest.fixture
def rude(channel: grpc.Channel) -> CacheStub:
    return CacheStub(channel)


def opened(stub: CacheStub, tenant: str, model: str = "tiny", page_bytes: int = PAGE) -> bytes:
    layout = layout_of(tenant, model, page_bytes).to_json()
    return stub.OpenNamespace(pb.OpenNamespaceRequest(layout=layout), **how(tenant)).fingerprint


def listed(fingerprint: bytes, count: int = 4) -> pb.PageList:
    hashes = b"".join(next(NAMES).to_bytes(32, "big") for _ in range(count))
    return pb.PageList(fingerprint=fingerprint, hashes=hashes)


def refusal(call: Callable[[], object]) -> str:
    """The text of a refusal for a limit's sake."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is EXHAUSTED, caught.value
    return caught.value.details()


class TestUnauthenticated:
    @pytest.mark.parametrize("what", [b"", b"GET / HTTP/1.1\r\n", bytes(1000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    @pytest.mark.parametrize("port", ["port", "bulk_port", "metrics_port"])
    def test_connections_that_say_nothing_or_nonsense(self, victim, port, what):
        with ExitStack() as connections:
            for _ in range(100 if port != "metrics_port" else 70):  # so many wait there before the kernel lets none in
                with suppress(OSError):
                    where = "127.0.0.1", getattr(victim, port)
                    connection = connections.enter_context(socket.create_connection(where, 5.0))
                    connection.sendall(what)
            victim.serves()
        if port == "metrics_port":
            assert in_the_end(victim.probed) == "ok\n"

    @pytest.mark.parametrize("token", [None, "wrong"])
    @pytest.mark.parametrize(
        "method", ["Cache/Lookup", "Cache/Status", "Cache/Flush", "Pages/Load", "Pages/Store", "Bulk/Open"]
    )
    def test_calls_that_never_say_what_they_want(self, victim, channel, method, token):
        """More of them than the node answers at once: none is waited for."""
        metadata = [("authorization", f"Bearer {token_of(token)}")] if token else None
        with Silence() as silence:
            calls = [
                channel.stream_stream(f"/kvstore.v1.{method}")(silence.requests(), metadata=metadata)
                for _ in range(200)
            ]
            victim.serves()
            for call in calls:
                assert call.code() in (grpc.StatusCode.UNAUTHENTICATED, EXHAUSTED)

    def test_health_checks_that_never_say_what_they_want(self, victim, channel, eventually):
        with Silence() as silence:
            calls = [channel.stream_stream("/grpc.health.v1.Health/Check")(silence.requests()) for _ in range(100)]
            victim.serves()
            eventually(lambda: any(call.done() and call.code() is grpc.StatusCode.UNAVAILABLE for call in calls))
            for call in calls:
                call.cancel()
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=SECONDS) == bytes([8, 1])

    @pytest.mark.parametrize(
        "request_text",
        [
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
            b"GET /health HTTP/1.1\r\n" + (b"a: " + b"b" * 60_000 + b"\r\n") * 90 + b"\r\n",
            b"GET /health HTTP/1.1\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
            b"POST /health HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n" + b"a" * 100_000,
            b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer " + b"t" * 60_000 + b"\r\n\r\n",
        ],
    )
    def test_http_requests_of_any_size(self, victim, request_text):
        for _ in range(20):
            with suppress(ConnectionError), socket.create_connection(("127.0.0.1", victim.metrics_port), 5.0) as peer:
                peer.sendall(request_text)
                assert peer.recv(12)[9:10] in (b"4", b"5", b"")
        assert in_the_end(victim.probed) == "ok\n"


class Silence:
    """Requests that never come, until it ends."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def requests(self) -> Iterator[bytes]:
        self._over.wait(SECONDS)
        yield from ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()


def in_the_end(ask: Callable[[], str]) -> str:
    for _ in range(200):
        with suppress(OSError):
            return ask()
    return ask()


class TestTenants:
    def test_payload_streams_that_stand_still(self, victim, channel, eventually):
        store = channel.stream_unary("/kvstore.v1.Pages/Store", response_deserializer=pb.StoreCounts.FromString)
        with Silence() as silence:
            calls = [store.future(silence.requests(), **how("rude")) for _ in range(100)]
            victim.serves()
            eventually(lambda: sum(call.done() for call in calls) >= 100 - MOST_STREAMS // TENANT_SHARE)
            refused = [call for call in calls if call.done()]
            assert all(call.code() is EXHAUSTED for call in refused)
            assert any("payload streams open, the limit" in call.details() for call in refused)
        assert 'kvstore_tenant_refused_total{limit="payload streams",tenant="rude"}' in victim.refused()

    @pytest.mark.parametrize(
        "method", ["kvstore.v1.Events/Watch", "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
    )
    def test_streams_that_nobody_reads(self, victim, channel, eventually, method):
        with Silence() as silence:
            requests = silence.requests if "reflection" in method else lambda: iter([b""])
            calls = [channel.stream_stream(f"/{method}")(requests(), **how("rude")) for _ in range(30)]
            other = channel.stream_stream(f"/{method}")(iter([b""]), **how("honest"))
            assert next(other) is not None
            victim.serves()
            eventually(lambda: sum(call.done() for call in calls) >= 30 - 4)
            assert all(call.code() is EXHAUSTED for call in calls if call.done())
            for call in (*calls, other):
                call.cancel()

    def test_reservations_that_are_never_filled(self, victim, rude):
        """A tenant has a quarter of the arena in hand at most; the rest is refused as it is where nothing is free."""
        fingerprint = opened(rude, "rude")
        reserved = 0
        for _ in range(40):
            request = pb.PrepareStoreRequest(pages=listed(fingerprint, 16), ttl_ms=4_000_000_000)
            reserved += rude.PrepareStore(request, **how("rude")).outcomes.count(0)
        assert 0 < reserved * PAGE <= 4 << 20
        victim.serves()

    def test_holds_that_are_never_ended(self, victim, rude):
        fingerprint = opened(rude, "holder")
        with kvstore.connect(victim.url, timeout=SECONDS) as client:
            pages = client.namespace(layout_of("holder"))
            hashes = [bytes([number]) * 32 for number in range(16)]
            pages.store(hashes, np.ones((16, PAGE), np.uint8))
        request = pb.PrepareLoadRequest(
            pages=pb.PageList(fingerprint=fingerprint, hashes=b"".join(hashes)), ttl_ms=4_000_000_000
        )
        for _ in range(200):
            rude.PrepareLoad(request, **how("holder"))
        victim.serves()

    def test_namespaces_without_end(self, victim, rude):
        for number in range(256):
            opened(rude, "crowd", f"model {number}")
        assert "tenant 'crowd' has 256 namespaces, the limit is 256" in refusal(lambda: opened(rude, "crowd", "more"))
        assert opened(rude, "crowd", "model 7") == layout_of("crowd", "model 7").fingerprint
        victim.serves()
        with kvstore.connect(victim.kv_url, timeout=SECONDS, token_file=victim.token_file) as client:
            client.namespace(layout_of("honest", "another"))

    def test_bulk_connections_that_are_kept(self, victim, channel):
        answers, most = [], MOST_CONNECTIONS // TENANT_SHARE
        with ExitStack() as connections:
            for _ in range(most + 8):
                token = BulkStub(channel).Open(bulk_pb2.OpenBulkRequest(), **how("rude")).token
                peer = connections.enter_context(socket.create_connection(("127.0.0.1", victim.bulk_port), SECONDS))
                peer.sendall(frame(Kind.HELLO, token))
                answers.append(Header.unpack(peer.recv(HEADER_BYTES, socket.MSG_WAITALL)).kind)
            assert answers == [Kind.READY] * most + [Kind.FAILED] * 8
            victim.serves()
        assert 'kvstore_tenant_refused_total{limit="bulk connections",tenant="rude"}' in victim.refused()

    def test_messages_and_lookups_that_are_too_large(self, victim, rude):
        fingerprint = opened(rude, "rude")
        whole = listed(fingerprint, 131_073)
        empty = pb.PageList(fingerprint=fingerprint)
        for text, call in (
            (
                "131073 pages, the limit is 131072",
                lambda: rude.Lookup(pb.LookupRequest(queries=[whole]), **how("rude")),
            ),
            ("the limit is 4096", lambda: rude.Lookup(pb.LookupRequest(queries=[empty] * 4097), **how("rude"))),
            ("the limit is 131072", lambda: rude.Touch(whole, **how("rude"))),
            ("the limit is 131072", lambda: rude.Evict(whole, **how("rude"))),
            ("the limit is 131072", lambda: rude.Pin(pb.PinRequest(pages=whole, seconds=9), **how("rude"))),
            ("the limit is", lambda: rude.PrepareStore(pb.PrepareStoreRequest(pages=whole), **how("rude"))),
            ("the limit is", lambda: rude.PrepareLoad(pb.PrepareLoadRequest(pages=whole), **how("rude"))),
            (
                "the limit is 4096",
                lambda: rude.ReportUse(pb.UseReport(uses=[pb.PageUse(fingerprint=fingerprint)] * 4097), **how("rude")),
            ),
            ("larger than max", lambda: rude.Touch(pb.PageList(hashes=bytes(9 << 20)), **how("rude"))),
        ):
            assert text in refusal(call)
        victim.serves()

    @pytest.mark.parametrize("layout", ["[" * 100_000, '{"model": "' + "m" * 2000 + '"}', "{}", "\0", "1e999"])
    def test_layouts_that_are_none(self, victim, rude, layout):
        with pytest.raises(grpc.RpcError) as caught:
            rude.OpenNamespace(pb.OpenNamespaceRequest(layout=layout), **how("rude"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        victim.serves()

    def test_more_requests_than_a_tenant_may_make(self, victim, rude):
        """The limit is named, and counted; nobody else is in its way."""
        text = refusal(lambda: [rude.Lookup(pb.LookupRequest(), **how("flood")) for _ in range(5000)])
        assert text == "tenant 'flood' makes more than its limit of 20 requests a second; try again later"
        victim.serves()
        assert 'kvstore_tenant_refused_total{limit="requests",tenant="flood"}' in victim.refused()

    def test_more_bytes_than_a_tenant_may_move(self, victim):
        """A call more is a refusal, which a connector takes for a miss; by bulk connections as by streams."""
        token_file = victim.token_file.with_name("glutton")
        token_file.write_text(token_of("glutton"))
        token_file.chmod(0o600)
        with kvstore.connect(victim.kv_url, timeout=SECONDS, token_file=token_file) as client:
            pages = client.namespace(layout_of("glutton"))
            data = np.ones((16, PAGE), np.uint8)
            with pytest.raises(LimitExceededError, match=r"moves more than its limit of 1 MiB a second"):
                for _ in range(100):
                    hashes = [next(NAMES).to_bytes(32, "big") for _ in range(16)]
                    pages.store(hashes, data)
        victim.serves()
        assert 'kvstore_tenant_refused_total{limit="bytes",tenant="glutton"}' in victim.refused()
