"""``kvstore proxy`` with TLS, with real certificates: towards clients, and towards instances."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import ssl
from pathlib import Path

import pytest
from certificates import DAY, Authority
from openai_instance import words_of
from proxy_process import PATIENCE

import kvstore.connector.proxy.server
from kvstore.cli import main as cli
from kvstore.connector.proxy.instances import Instances
from kvstore.connector.proxy.server import Deadlines, Proxy
from kvstore.security.tls import server_context


class Files:
    """Authority, the proxy's certificate, a client's, and a foreign authority's."""

    def __init__(self, folder: Path) -> None:
        authority, foreign = Authority(folder), Authority(folder, "foreign")
        self.ca, self.foreign_ca = authority.ca, foreign.ca
        self.server = authority.sign("server", "127.0.0.1")
        self.client = authority.sign("client")
        self.foreign_client = foreign.sign("stranger")
        self.foreign_server = foreign.sign("impostor", "127.0.0.1")

    @property
    def flags(self) -> dict[str, Path]:
        return dict(zip(("tls_cert", "tls_key"), self.server, strict=True))

    def context(self, ca: Path | None = None, cert: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=ca or self.ca)
        if cert is not None:
            context.load_cert_chain(*cert)
        return context


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_clients_are_answered_through_tls_streams_included(instance, proxy, files):
    prefill, decode = instance("p"), instance("d")
    front = proxy([prefill], [decode], tls=files.context(), **files.flags)
    assert front.text() == "".join(words_of("hello"))
    status, body = front.complete(stream=True)
    assert (status, body.count(b"data: ")) == (200, len(words_of("hello")) + 1)
    assert front.ask("GET", "/health")[0] == 200

    front.tls = files.context(files.foreign_ca)
    with pytest.raises(ssl.SSLCertVerificationError):
        front.text()
    front.tls = None
    with pytest.raises((http.client.HTTPException, OSError)):  # no plain HTTP there
        front.text()


def test_where_clients_show_certificates_others_get_nothing(instance, proxy, files):
    prefill, decode = instance("p"), instance("d")
    front = proxy([prefill], [decode], tls=files.context(cert=files.client), client_ca=files.ca, **files.flags)
    assert front.text() == "".join(words_of("hello"))
    seen = len(decode.seen())
    for cert in (None, files.foreign_client):
        front.tls = files.context(cert=cert)
        with pytest.raises(OSError):  # an ssl.SSLError, or the connection's end
            front.text()
    assert len(decode.seen()) == seen


def test_instances_are_asked_through_tls_and_shown_a_certificate(instance, proxy, files):
    tls = (*files.server, files.ca)
    prefill, decode = instance("p", "ok", *tls), instance("d", "ok", *tls)
    flags = {"upstream_ca": files.ca, "upstream_cert": files.client[0], "upstream_key": files.client[1]}
    front = proxy([prefill], [decode], **flags)
    assert front.text() == "".join(words_of("hello"))
    assert front.metric('prefills_total{outcome="ticket"}') == 1


@pytest.mark.parametrize("wrong", ["its certificate", "the proxy's"])
def test_an_instance_that_is_not_trusted_or_does_not_trust_is_not_asked(instance, proxy, files, wrong):
    tls = files.foreign_server if wrong == "its certificate" else (*files.server, files.ca)
    prefill, decode = instance("p", "ok", *tls), instance("d")
    cert, key = files.foreign_client
    front = proxy([prefill], [decode], upstream_ca=files.ca, upstream_cert=cert, upstream_key=key)
    assert front.text() == "".join(words_of("hello")), "decode computes it"
    assert front.metric('prefills_total{outcome="failed"}') == 1
    assert prefill.seen() == []


def issuer_on(port: int, client: tuple[Path, Path], *authorities: Path) -> str:
    """Who signed the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.load_cert_chain(*client)
    for ca in authorities:
        context.load_verify_locations(ca)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as shown,
    ):
        return dict(pair for name in shown.getpeercert()["issuer"] for pair in name)["commonName"]


def test_renewed_files_count_for_new_connections_and_open_ones_go_on(instance, proxy, files, eventually):
    front = proxy([instance("p")], [instance("d")], tls=files.context(), **files.flags)
    kept = front.open("GET", "/health")
    assert kept.getresponse().read()
    for path, new in zip(files.server, files.foreign_server, strict=True):
        path.write_bytes(new.read_bytes())
    front.process.send_signal(signal.SIGHUP)
    eventually(lambda: issuer_on(front.port, files.client, files.ca, files.foreign_ca) == "foreign")
    kept.request("GET", "/health")
    assert kept.getresponse().status == 200, "its certificate is the old one"
    kept.close()
    front.tls = files.context(files.foreign_ca)
    assert front.text() == "".join(words_of("hello"))

    files.server[1].write_bytes(files.client[1].read_bytes())
    front.process.send_signal(signal.SIGHUP)
    eventually(lambda: "SIGHUP: nothing was reloaded: tls_cert" in front.log.read_text())
    assert front.text() == "".join(words_of("hello"))


def test_renewed_files_count_for_instances_too(instance, proxy, files, tmp_path, eventually):
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(files.ca.read_bytes())
    servers = [instance(name, "ok", *files.foreign_server) for name in "pd"]
    front = proxy(servers[:1], servers[1:], upstream_ca=trusted)
    assert front.complete()[0] in (502, 503), "it trusts neither"
    trusted.write_bytes(files.foreign_ca.read_bytes())
    front.process.send_signal(signal.SIGHUP)
    eventually(lambda: front.complete()[0] == 200)


def test_one_connection_too_many_is_closed_before_a_handshake_and_failed_ones_take_no_place(files, monkeypatch):
    monkeypatch.setattr(kvstore.connector.proxy.server, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(kvstore.connector.proxy.server, "HANDSHAKE_SECONDS", 100 * PATIENCE)

    def ask(port: int) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=files.context())
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    def has_ended(stranger: socket.socket) -> bool:
        """What is said before, as TLS's alert, is passed over."""
        try:
            while stranger.recv(1 << 10):
                pass
        except ConnectionError:
            pass
        return True

    async def attempt() -> None:
        front = Proxy(Instances(["http://127.0.0.1:9"], ["http://127.0.0.1:10"]), Deadlines(), tls)
        port = await front.start("127.0.0.1", 0)
        try:
            silent = [await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), PATIENCE) for _ in "1234"]
            one_more = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), PATIENCE)
            assert await asyncio.to_thread(has_ended, one_more)
            one_more.close()
            for each in silent:
                await asyncio.to_thread(each.sendall, b"no TLS at all, but words")
                assert await asyncio.to_thread(has_ended, each)
                each.close()
            assert await asyncio.to_thread(ask, port) in (200, 503)
        finally:
            await front.stop()

    tls = server_context(*files.server, None)
    asyncio.run(attempt())


URLS = ["--prefill", "https://a:1", "--decode", "http://b:1"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:0"], "which needs TLS"),
        (["--tls-cert", "server.pem"], "--tls-cert and --tls-key are given together"),
        (["--client-ca", "ca.pem"], "--client-ca needs TLS"),
        (["--tls-cert", "gone.pem", "--tls-key", "server.key"], "tls_cert gone.pem can't be read: No such file"),
        (["--tls-cert", "server.pem", "--tls-key", "gone.key"], "tls_key gone.key can't be read: No such file"),
        (["--tls-cert", "server.key", "--tls-key", "server.key"], "can't be used"),
        (["--tls-cert", "server.pem", "--tls-key", "client.key"], "can't be used"),
        (["--tls-cert", "server.pem", "--tls-key", "open.key"], "chmod 600"),
        (["--tls-cert", "server.pem", "--tls-key", "server.key", "--client-ca", "server.key"], "client_ca server.key"),
        (["--upstream-cert", "client.pem"], "--upstream-cert and --upstream-key are given together"),
        (["--upstream-ca", "gone.pem"], "ca gone.pem"),
        (["--upstream-cert", "client.pem", "--upstream-key", "open.key"], "chmod 600"),
        (["--prefill", "http://a:1", "--upstream-ca", "ca.pem"], "are for https:// instances"),
    ],
)
def test_files_and_flags_that_cannot_be_used_are_one_line(files, tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    Path("open.key").write_bytes(files.server[1].read_bytes())
    urls = URLS[2:] if "--prefill" in flags else URLS
    assert cli.main(["proxy", *urls, *flags]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_certificate_that_ended_is_told_at_the_start_and_at_a_reload(instance, proxy, tmp_path, eventually):
    cert, key = Authority(tmp_path).sign("server", "127.0.0.1", ends=-DAY)
    front = proxy([instance("p")], [instance("d")], tls_cert=cert, tls_key=key)
    said = f"the certificate {cert} ended 1 day ago"
    eventually(lambda: said in front.log.read_text())
    front.process.send_signal(signal.SIGHUP)
    eventually(lambda: front.log.read_text().count(said) == 2)
