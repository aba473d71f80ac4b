"""docs/security.md: its commands make certificates that nodes and clients take, and renew them."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from node_process import NodeProcess

import kvstore
from kvstore.cli import main as cli
from kvstore.errors import UnavailableError

DOCUMENT = Path(__file__).parents[2] / "docs/security.md"
SECONDS = 50.0


@pytest.fixture
def blocks(tmp_path: Path) -> list[str]:
    """The commands of the chapter about certificates, block by block."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    [chapter] = re.findall(r"^## Certificates\n(.*?)^## ", DOCUMENT.read_text(), re.M | re.S)
    return re.findall(r"^```sh\n(.*?)^```", chapter, re.M | re.S)


def run(block: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-euc", block], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def serial_on(port: int, folder: Path) -> str:
    """The number of the certificate that a port shows to a client of the recipe's, names and purposes checked."""
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python's default from 3.13 on
    context.load_cert_chain(folder / "engine.pem", folder / "engine.key")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as shown,
    ):
        return str(shown.getpeercert()["serialNumber"])


def test_the_recipe_makes_certificates_that_are_taken_and_renewed(
    blocks: list[str],
    node_process: Callable[..., NodeProcess],
    tmp_path: Path,
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    *making, renewing, showing = blocks
    for block in making:
        run(block, tmp_path)
    assert (tmp_path / "cache-1.key").stat().st_mode & 0o077 == 0
    node = node_process(
        tls_cert=str(tmp_path / "cache-1.pem"),
        tls_key=str(tmp_path / "cache-1.key"),
        client_ca=str(tmp_path / "ca.pem"),
    )
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "engine.pem", "engine.key"))
    for host in ("127.0.0.1", "localhost"):
        with kvstore.connect(f"kvs://{host}:{node.port}", ca=ca, cert=cert, key=key, timeout=SECONDS) as client:
            assert client.status().pid == node.pid
    with (
        kvstore.connect(f"kvs://localhost:{node.port}", ca=ca, timeout=SECONDS) as stranger,
        pytest.raises(UnavailableError),
    ):
        stranger.status()
    for name, path in (("CA", ca), ("CERT", cert), ("KEY", key)):
        monkeypatch.setenv(f"KVSTORE_CONNECT_{name}", str(path))
    assert cli.main(["status", "--url", f"kvs://localhost:{node.port}"]) == 0, capsys.readouterr().err

    before = {port: serial_on(port, tmp_path) for port in (node.port, node.bulk_port)}
    run(renewing, tmp_path)
    node.signal(signal.SIGHUP)
    eventually(lambda: all(serial_on(port, tmp_path) != before[port] for port in before))
    assert "IP Address:127.0.0.1" in run(showing, tmp_path)
