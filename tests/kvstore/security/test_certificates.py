"""A certificate that is renewed while a node runs, on every TCP port: new connections get it, open ones go on."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from certificates import Authority
from node_process import NodeProcess
from ports import free_port

import kvstore
from kvstore.errors import ConfigError, DeadlineError, UnavailableError
from kvstore.security.tls import server_context
from kvstore.service.access import gate as access

LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=300_000)
HASHES = [number.to_bytes(32, "big") for number in range(4)]
SECONDS = 50.0


class Files:
    """A node's certificate, its key, and whose clients may come: of an old authority, then of a new one."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = Authority(folder, "old"), Authority(folder, "new")
        self.cert, self.key = self.old.sign("node", "127.0.0.1")
        self.client_ca = folder / "clients.pem"
        self.client_ca.write_bytes(self.old.ca.read_bytes())
        self.old_client, self.new_client = self.old.sign("before"), self.new.sign("behind")

    def renew(self, authority: Authority) -> None:
        authority.sign("node", "127.0.0.1")
        self.client_ca.write_bytes(authority.ca.read_bytes())


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def node(node_process: Callable[..., NodeProcess], files: Files) -> NodeProcess:
    tls = {"tls_cert": str(files.cert), "tls_key": str(files.key), "client_ca": str(files.client_ca)}
    return node_process(metrics=str(free_port()), **tls)


def issuer_on(port: int, client: tuple[Path, Path]) -> str:
    """Who signed the certificate that a port shows to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(*client)
    for known in client[0].parent.glob("*.pem"):
        if known.stem in ("old", "new"):
            context.load_verify_locations(known)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection,
        context.wrap_socket(connection) as shown,
    ):
        return dict(pair for name in shown.getpeercert()["issuer"] for pair in name)["commonName"]


def ports_of(node: NodeProcess) -> list[int]:
    return [node.port, node.bulk_port, int(node.options["metrics"])]


def check_pages(client: kvstore.Client, seed: int) -> None:
    """Store and load, in a namespace of its own."""
    data = np.random.default_rng(seed).integers(0, 256, (len(HASHES), LAYOUT.page_bytes), dtype=np.uint8)
    pages = client.namespace(kvstore.Layout(model=f"tiny-{seed}", block_size=16, page_bytes=LAYOUT.page_bytes))
    stored = pages.store(HASHES, data)
    assert stored.stored + stored.present == len(HASHES)
    into = np.zeros_like(data)
    assert pages.load(HASHES, into) == len(HASHES)
    assert np.array_equal(into, data)


def test_new_connections_get_the_new_files_and_open_ones_go_on(node, files, eventually):
    url = f"kvs://127.0.0.1:{node.port}"
    cert, key = files.old_client
    with kvstore.connect(url, ca=files.old.ca, cert=cert, key=key, timeout=SECONDS) as before:
        check_pages(before, 0)
        assert [issuer_on(port, files.old_client) for port in ports_of(node)] == ["old"] * 3
        for authority, name in ((files.new, "new"), (files.old, "old"), (files.new, "new")):
            files.renew(authority)
            node.signal(signal.SIGHUP)
            eventually(lambda name=name: [issuer_on(port, files.new_client) for port in ports_of(node)] == [name] * 3)
        check_pages(before, 0)  # it knows the old authority alone: it could not connect again

        new_cert, new_key = files.new_client
        with kvstore.connect(url, ca=files.new.ca, cert=new_cert, key=new_key, timeout=SECONDS) as behind:
            check_pages(behind, 1)
            assert behind.status().pid == node.pid
        with (
            kvstore.connect(url, ca=files.new.ca, cert=cert, key=key, timeout=2.0) as late,
            pytest.raises((UnavailableError, DeadlineError)),
        ):
            late.status()


def test_files_that_change_while_they_are_read_are_not_used(files, monkeypatch):
    def slow(*paths: Path | None) -> ssl.SSLContext:
        context = server_context(*paths)
        files.renew(files.new)
        return context

    monkeypatch.setattr(access, "server_context", slow)
    with pytest.raises(ConfigError, match="changed while they were read"):
        access.Tls(files.cert, files.key, files.client_ca)


def put_foreign_key(files: Files) -> str:
    files.key.write_bytes(files.new_client[1].read_bytes())
    return "can't be used"


def put_garbage(files: Files) -> str:
    files.cert.write_text("no PEM at all")
    return "can't be used"


def put_nothing(files: Files) -> str:
    files.cert.unlink()
    return "can't be read: No such file"


def open_key(files: Files) -> str:
    files.key.chmod(0o644)
    return "chmod 600"


def put_no_authority(files: Files) -> str:
    files.client_ca.write_text("no PEM at all")
    return "client_ca"


@pytest.mark.parametrize("spoil", [put_foreign_key, put_garbage, put_nothing, open_key, put_no_authority])
def test_files_that_cannot_be_used_change_nothing(node, files, eventually, spoil):
    files.renew(files.new)
    words = spoil(files)
    node.signal(signal.SIGHUP)
    eventually(lambda: "SIGHUP: nothing was reloaded" in node.errors.read_text())
    [line] = [line for line in node.errors.read_text().splitlines() if "nothing was reloaded" in line]
    assert words in line
    assert [issuer_on(port, files.old_client) for port in ports_of(node)] == ["old"] * 3
    cert, key = files.old_client
    with kvstore.connect(
        f"kvs://127.0.0.1:{node.port}", ca=files.old.ca, cert=cert, key=key, timeout=SECONDS
    ) as client:
        check_pages(client, 0)
