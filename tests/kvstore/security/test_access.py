"""TLS and tokens, with real certificates: who gets in, by which path, and what the others are told."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
from certificates import Authority

import kvstore
from kvstore.cli import main as cli
from kvstore.client.paths.bulk.pool import BulkPool
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError, DeadlineError, InvalidRequestError, UnauthenticatedError, UnavailableError
from kvstore.security.secret_files import read_tokens
from kvstore.service.grpc.health_reflection import SERVING
from kvstore.v1 import bulk_pb2
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.bulk_pb2_grpc import BulkStub
from kvstore.v1.cache_pb2_grpc import CacheStub

LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=300_000)
TOKEN, OTHER = "a-token-of-some-length", "another-token-of-some-length"
SECONDS = 50.0


def hashes_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def payload_of(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, LAYOUT.page_bytes), dtype=np.uint8)


@dataclass
class Files:
    folder: Path

    def __post_init__(self) -> None:
        self.authority = Authority(self.folder)
        self.cert, self.key = self.authority.sign("node", "127.0.0.1", "localhost")
        self.ca = self.authority.ca
        self.tokens = self.secret("tokens", f"# who\nfirst:{TOKEN}\n\n{OTHER}\n")

    def secret(self, name: str, text: str, mode: int = 0o600) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(mode)
        return path

    @property
    def tls(self) -> dict[str, Path]:
        return {"tls_cert": self.cert, "tls_key": self.key}


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


def check_all_paths(node, url: str, **shown: object) -> None:
    """Store and load by bulk connections, and by streams."""
    data = payload_of(4)
    for bulk in (True, False):
        with kvstore.connect(url, timeout=SECONDS, **shown) as client:
            pages = client.namespace(LAYOUT)
            if not bulk:
                node._bulk.stop(1.0)
                pages.evict(hashes_of(4))
            assert pages.store(hashes_of(4), data).stored == 4
            into = np.zeros_like(data)
            assert pages.load(hashes_of(4), into) == 4
            assert np.array_equal(into, data)
            assert node._bulk.connections == bulk


class TestTls:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    def test_pages_go_through_tls(self, start_node, files, host):
        node = start_node(**files.tls)
        check_all_paths(node, f"kvs://{host}:{node.port}", ca=files.ca)

    def test_the_unix_socket_needs_nothing(self, start_node, files):
        node = start_node(**files.tls, client_ca=files.ca, token_file=files.tokens)
        with kvstore.connect(f"unix://{node.config.socket}", timeout=SECONDS) as client:
            pages = client.namespace(LAYOUT)
            assert pages.store(hashes_of(4), payload_of(4)).stored == 4
            assert client.status().clients == 1

    def test_a_node_that_somebody_else_signed(self, start_node, files, tmp_path):
        (tmp_path / "other").mkdir()
        other = Authority(tmp_path / "other")
        node = start_node(**files.tls)
        url = f"kvs://127.0.0.1:{node.port}"
        with kvstore.connect(url, ca=other.ca) as client, pytest.raises(UnavailableError, match="can't be reached"):
            client.status()

    def test_a_certificate_of_another_host(self, start_node, files):
        cert, key = files.authority.sign("elsewhere", "cache.example.net")
        node = start_node(tls_cert=cert, tls_key=key)
        url = f"kvs://127.0.0.1:{node.port}"
        with kvstore.connect(url, ca=files.ca) as client, pytest.raises(UnavailableError):
            client.status()

    def test_neither_side_speaks_plainly(self, start_node, files):
        node = start_node(**files.tls)
        url = f"kv://127.0.0.1:{node.port}"
        with kvstore.connect(url, timeout=2.0) as client, pytest.raises((UnavailableError, DeadlineError)):
            client.status()

    def test_the_bulk_port_speaks_tls_only(self, start_node, files, eventually):
        node = start_node(**files.tls)
        with kvstore.connect(f"kvs://127.0.0.1:{node.port}", ca=files.ca) as client:
            client.status()
            connection = client._session.control._connection
            pool = BulkPool(connection, "127.0.0.1", None)  # has a token, and no TLS
            reply = connection.bulk.Open(bulk_pb2.OpenBulkRequest(), timeout=SECONDS)
            with pytest.raises((kvstore.KVStoreError, OSError)):
                pool._connect(reply.port, reply.token, time.monotonic() + 5.0)
        eventually(lambda: node._bulk.connections == 0)

    def test_clients_show_certificates_where_asked(self, start_node, files, tmp_path):
        node = start_node(**files.tls, client_ca=files.ca)
        cert, key = files.authority.sign("engine-1")
        check_all_paths(node, f"kvs://127.0.0.1:{node.port}", ca=files.ca, cert=cert, key=key)
        (tmp_path / "other").mkdir()
        cert, key = Authority(tmp_path / "other").sign("unknown")
        for shown in ({}, {"cert": cert, "key": key}):
            client = kvstore.connect(f"kvs://127.0.0.1:{node.port}", ca=files.ca, timeout=2.0, **shown)
            with client, pytest.raises((UnavailableError, DeadlineError)):
                client.status()


class TestTokens:
    @pytest.mark.parametrize("shown", [f"me:{TOKEN}", OTHER])
    @pytest.mark.parametrize("tls", [False, True])
    def test_one_of_the_files_tokens_opens(self, start_node, files, shown, tls):
        node = start_node(**(files.tls if tls else {}), token_file=files.tokens)
        mine = files.secret("mine", shown)
        url = f"{'kvs' if tls else 'kv'}://127.0.0.1:{node.port}"
        check_all_paths(node, url, token_file=mine, **({"ca": files.ca} if tls else {}))

    @pytest.mark.parametrize("shown", ["", "not-one-of-the-tokens", TOKEN[:-1] + "!", "first:" + TOKEN + "x"])
    def test_no_other_token_does(self, start_node, files, shown):
        node = start_node(token_file=files.tokens)
        mine = {"token_file": files.secret("mine", shown)} if shown else {}
        with kvstore.connect(f"kv://127.0.0.1:{node.port}", **mine) as client:
            for call in (client.status, client.flush, lambda: client.namespace(LAYOUT)):
                with pytest.raises(UnauthenticatedError, match="this node"):
                    call()

    def test_every_kind_of_call_is_refused(self, start_node, files):
        """Unary calls and both payload streams, and with UNAUTHENTICATED; health is for everybody."""
        node = start_node(token_file=files.tokens)
        with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
            calls = [
                lambda how: CacheStub(channel).Status(pb.StatusRequest(), **how),
                lambda how: BulkStub(channel).Open(bulk_pb2.OpenBulkRequest(), **how),
                lambda how: BulkStub(channel).Settle(bulk_pb2.SettleRequest(), **how),
                lambda how: list(channel.unary_stream("/kvstore.v1.Pages/Load")(b"", **how)),
                lambda how: channel.stream_unary("/kvstore.v1.Pages/Store")(iter([b""]), **how),
                lambda how: list(
                    channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(
                        iter([b""]), **how
                    )
                ),
            ]
            bad = ["Bearer wrong-token-wrong-token", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN} {TOKEN}", ""]
            for metadata in [None, *([("authorization", value)] for value in bad)]:
                for call in calls:
                    with pytest.raises(grpc.RpcError) as caught:
                        call({"metadata": metadata, "timeout": SECONDS})
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            both = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")]
            with pytest.raises(grpc.RpcError) as caught:
                calls[0]({"metadata": both, "timeout": SECONDS})
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert calls[0]({"metadata": [("authorization", f"Bearer {TOKEN}")], "timeout": SECONDS}).pid == os.getpid()
            check = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=SECONDS)
            assert check == bytes([8, SERVING])

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "holds no token"),
            ("# nothing\n\n", "holds no token"),
            ("short", "at least 16 ASCII characters"),
            ("name:short", "line 1: a token has at least 16"),
            ("with spaces in between", "no spaces"),
            ("tökens-are-plain-ascii", "ASCII"),
            (f"a:{TOKEN}\nb:{TOKEN}", "line 2: the same token as a"),
        ],
    )
    def test_files_that_cannot_be_right(self, files, text, words):
        with pytest.raises(ConfigError, match=words) as caught:
            read_tokens(files.secret("bad", text))
        assert TOKEN not in str(caught.value)


class TestFiles:
    @pytest.mark.parametrize("mode", [0o644, 0o620, 0o604, 0o660, 0o666])
    def test_secrets_that_others_can_read_are_refused(self, start_node, files, mode):
        files.key.chmod(mode)
        with pytest.raises(ConfigError, match=rf"tls_key .*node.key has mode {mode:04o}: .*chmod 600"):
            start_node(**files.tls)
        files.key.chmod(0o600)
        files.tokens.chmod(mode)
        with pytest.raises(ConfigError, match=r"token file .*chmod 600"):
            start_node(token_file=files.tokens)
        cert, key = files.authority.sign("client")
        key.chmod(mode)
        with pytest.raises(ConfigError, match=r"key .*chmod 600"):
            kvstore.connect("kvs://127.0.0.1", ca=files.ca, cert=cert, key=key)
        files.tokens.chmod(0o600)
        start_node(**files.tls, token_file=files.tokens)

    def test_files_that_are_not_there_or_something_else(self, start_node, files, tmp_path):
        _, other_key = files.authority.sign("other", "127.0.0.1")
        text = files.secret("text", "no PEM at all")
        none = tmp_path / "none"
        for settings, words in (
            ({"tls_cert": none, "tls_key": files.key}, "tls_cert .*none can't be read: No such file"),
            ({"tls_cert": files.cert, "tls_key": none}, "tls_key .*none can't be read: No such file"),
            ({"tls_cert": files.cert, "tls_key": other_key}, "can't be used"),
            ({"tls_cert": text, "tls_key": files.key}, "can't be used"),
            ({**files.tls, "client_ca": text}, "client_ca .*text can't be used"),
            ({"token_file": none}, "token file .*none can't be read"),
            ({"tls_cert": files.cert}, "tls_cert and tls_key are given together"),
            ({"client_ca": files.ca}, "client_ca needs TLS"),
        ):
            with pytest.raises(ConfigError, match=words):
                start_node(**settings)
        with pytest.raises(ConfigError, match="can't be"):
            kvstore.connect("kvs://127.0.0.1", ca=text)

    def test_files_where_they_have_no_use(self, files):
        cert, _ = files.authority.sign("client")
        for url, shown, words in (
            ("unix:///run/s", {"ca": files.ca}, "a Unix socket has no TLS"),
            ("kv://127.0.0.1", {"ca": files.ca}, "write kvs://"),
            ("kv://10.0.0.1", {"token_file": files.tokens}, "not sent to another host without TLS"),
            ("kv://cache.example.net", {"token_file": files.tokens}, "not sent to another host without TLS"),
            ("kvs://127.0.0.1", {"cert": cert}, "given together"),
            ("embedded:///nowhere", {"ca": files.ca}, "an embedded store has neither"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                kvstore.connect(url, **shown)


class TestListening:
    @pytest.mark.parametrize("listen", ["0.0.0.0:7420", "[::]:7420", "10.0.0.7:7420", "cache.example.net:7420"])
    def test_other_addresses_than_loopback_need_tls_and_a_check_of_clients(self, files, listen):
        for settings, words in (
            ({}, r"needs TLS \(tls_cert and tls_key\) and a token_file or a client_ca; with insecure"),
            ({"token_file": files.tokens}, r"needs TLS \(tls_cert and tls_key\); with"),
            (files.tls, "needs a token_file or a client_ca; with"),
        ):
            with pytest.raises(ConfigError, match=words):
                NodeConfig(listen=listen, **settings)
        for enough in ({"token_file": files.tokens, **files.tls}, {"client_ca": files.ca, **files.tls}):
            NodeConfig(listen=listen, **enough)
        NodeConfig(listen=listen, insecure=True)

    @pytest.mark.parametrize("listen", ["", "7420", "127.0.0.1:0", "127.1.2.3:0", "localhost:0", "[::1]:0"])
    def test_loopback_needs_nothing(self, listen):
        NodeConfig(listen=listen)

    def test_insecure_is_warned_of(self, start_node, caplog):
        start_node(listen="0.0.0.0:0", insecure=True)
        assert "insecure: whoever reaches 0.0.0.0" in caplog.text


def test_the_command_line_takes_files_from_the_environment(start_node, files, monkeypatch, capsys):
    node = start_node(**files.tls, token_file=files.tokens)
    url = f"kvs://127.0.0.1:{node.port}"
    assert cli.main(["status", url]) == 1
    assert "its certificate is not accepted" in capsys.readouterr().err
    monkeypatch.setenv("KVSTORE_CONNECT_CA", str(files.ca))
    assert cli.main(["status", url]) == 1
    assert "no token; this node wants one" in capsys.readouterr().err
    monkeypatch.setenv("KVSTORE_CONNECT_TOKEN_FILE", str(files.tokens))
    assert cli.main(["status", url]) == 0
    assert cli.main(["status", f"unix://{node.config.socket}"]) == 0
