"""When a node's certificate ends: read from its file, said in the log, in the status and as a metric."""

from __future__ import annotations

import json
import signal
import ssl
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import DAY, Authority
from cryptography import x509
from node_process import NodeProcess
from ports import free_port

import kvstore
from kvstore.cli import main as cli
from kvstore.node.certificate_watch import CertificateWatch
from kvstore.security.certificate import Validity, tell_of_end, validity_of
from kvstore.service.access.gate import Tls

DAY_SECONDS = 86_400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class TestDates:
    @pytest.mark.parametrize("days", [-3, 1, 400, 40_000])  # the last in the form for years from 2050 on
    @pytest.mark.parametrize("ca", [None, True, False])
    def test_they_are_read_as_a_library_reads_them(self, authority: Authority, days: int, ca: bool | None) -> None:
        cert, _ = authority.sign("node", "127.0.0.1", ends=days * DAY, began=10 * DAY, ca=ca)
        read = x509.load_pem_x509_certificate(cert.read_bytes())
        validity = validity_of(b"a comment\n" + cert.read_bytes() + authority.ca.read_bytes())
        assert validity == (read.not_valid_before_utc.timestamp(), read.not_valid_after_utc.timestamp())

    def test_what_is_none_has_no_end(self, authority: Authority) -> None:
        cert, key = authority.sign("node")
        pem = cert.read_bytes()
        assert validity_of(b"") is validity_of(key.read_bytes()) is None
        lines = pem.splitlines(keepends=True)
        assert validity_of(b"".join([*lines[:2], lines[-1]])) is None
        assert validity_of(pem[:60] + b"!" + pem[61:]) is None
        assert validity_of(lines[0] + b"MAA=\n" + lines[-1]) is None


class TestWhenIsItSaid:
    @pytest.mark.parametrize(
        ("begins", "ends", "level"),
        [
            (-100, 200, None),
            (-100, 31, None),
            (-100, 29, "WARNING"),
            (-100, 6, "ERROR"),
            (-100, -1, "ERROR"),
            (-0.1, 0.9, None),  # one for a day, as some authorities give them: nobody is to be told each day
            (-0.7, 0.3, "WARNING"),
            (-0.95, 0.05, "ERROR"),
            (1, 200, "ERROR"),
        ],
    )
    def test_by_the_days_that_are_left(
        self, caplog: pytest.LogCaptureFixture, begins: float, ends: float, level: str | None
    ) -> None:
        now = 1_800_000_000.0
        tell_of_end("it", Validity(now + begins * DAY_SECONDS, now + ends * DAY_SECONDS), now)
        assert [record.levelname for record in caplog.records] == ([level] if level else [])

    def test_it_is_said_again_each_day(
        self, authority: Authority, caplog: pytest.LogCaptureFixture, eventually: Callable[..., None]
    ) -> None:
        cert, key = authority.sign("node", "127.0.0.1", ends=-DAY, began=3 * DAY)
        watch = CertificateWatch(Tls(cert, key, None), cert, seconds=0.01)
        eventually(lambda: len(caplog.records) >= 3)
        watch.stop()
        assert all("clients that verify it refuse to connect" in record.getMessage() for record in caplog.records)


def start(node_process: Callable[..., NodeProcess], files: tuple[Path, Path], folder: Path) -> NodeProcess:
    return node_process(tls_cert=str(files[0]), tls_key=str(files[1]), metrics=str(free_port()))


def metric(node: NodeProcess, ca: Path) -> float | None:
    context = ssl.create_default_context(cafile=ca)
    context.verify_mode = ssl.CERT_REQUIRED
    with urllib.request.urlopen(
        f"https://127.0.0.1:{node.options['metrics']}/metrics", context=context, timeout=60
    ) as answer:
        lines = answer.read().decode().splitlines()
    name = "kvstore_certificate_end_timestamp_seconds "
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), None)


def test_a_node_whose_certificate_ends(
    node_process: Callable[..., NodeProcess],
    authority: Authority,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    eventually: Callable[..., None],
) -> None:
    """It starts, since engines on its host need no certificate, and says so at once; a reload says how it is then."""
    year = 365 * DAY
    node = start(node_process, authority.sign("node", "127.0.0.1", ends=-DAY, began=year), tmp_path)
    assert " ERROR " in node.errors.read_text()
    assert "ended 1 day ago" in node.errors.read_text()
    assert "clients that verify it refuse to connect" in node.errors.read_text()
    with kvstore.connect(node.url) as client:
        assert client.status().certificate_ends == pytest.approx(time.time() - DAY_SECONDS, abs=60)
        assert cli.main(["status", "--url", node.url]) == 0
        assert "\ncertificate: ended 1 day ago" in capsys.readouterr().out
        assert cli.main(["doctor", "--url", node.url, "--json"]) == 1
        assert level_of("certificate", capsys) == "fail"

        authority.sign("node", "127.0.0.1", ends=20 * DAY, began=year)
        node.signal(signal.SIGHUP)
        eventually(lambda: "ends in 19 days" in node.errors.read_text())
        assert " WARNING " in node.errors.read_text()
        assert client.status().certificate_ends == pytest.approx(time.time() + 20 * DAY_SECONDS, abs=60)
        assert metric(node, authority.ca) == client.status().certificate_ends
        cli.main(["status", "--url", node.url])
        assert "\ncertificate: ends in 19 days" in capsys.readouterr().out
        cli.main(["doctor", "--url", node.url, "--json"])
        assert level_of("certificate", capsys) == "warn"

        before = len(node.errors.read_text())
        authority.sign("node", "127.0.0.1", ends=200 * DAY, began=year)
        node.signal(signal.SIGHUP)
        eventually(lambda: "were reloaded" in node.errors.read_text()[before:])
        assert "certificate /" not in node.errors.read_text()[before:]
        cli.main(["status", "--url", node.url])
        assert "certificate" not in capsys.readouterr().out
        cli.main(["doctor", "--url", node.url, "--json"])
        assert level_of("certificate", capsys) == "ok"


def test_one_of_days_is_told_of_everywhere_from_its_last_third_on(
    node_process: Callable[..., NodeProcess],
    authority: Authority,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    eventually: Callable[..., None],
) -> None:
    """An authority that gives certificates for days renews them as often: nobody is to be told each day."""
    node = start(node_process, authority.sign("node", "127.0.0.1", ends=2 * DAY, began=DAY), tmp_path)
    with kvstore.connect(node.url) as client:
        status = client.status()
    assert status.certificate_begins == pytest.approx(time.time() - DAY_SECONDS, abs=60)
    assert "certificate /" not in node.errors.read_text()
    assert cli.main(["status", "--url", node.url]) == 0
    assert "certificate" not in capsys.readouterr().out
    cli.main(["doctor", "--url", node.url, "--json"])
    assert level_of("certificate", capsys) == "ok"

    authority.sign("node", "127.0.0.1", ends=DAY, began=3 * DAY)
    node.signal(signal.SIGHUP)
    eventually(lambda: "ends in 23 hours" in node.errors.read_text())
    cli.main(["status", "--url", node.url])
    assert "\ncertificate: ends in 23 hours" in capsys.readouterr().out
    cli.main(["doctor", "--url", node.url, "--json"])
    assert level_of("certificate", capsys) == "warn"


def test_one_that_does_not_hold_yet(
    node_process: Callable[..., NodeProcess], authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = start(node_process, authority.sign("node", "127.0.0.1", ends=200 * DAY, began=-2 * DAY), tmp_path)
    assert "clients that verify it refuse to connect until then" in node.errors.read_text()
    cli.main(["status", "--url", node.url])
    assert "\ncertificate: holds from " in capsys.readouterr().out
    assert cli.main(["doctor", "--url", node.url, "--json"]) == 1
    assert level_of("certificate", capsys) == "fail"


def level_of(subject: str, capsys: pytest.CaptureFixture[str]) -> str:
    findings = json.loads(capsys.readouterr().out)["findings"]
    return next(each["level"] for each in findings if each["subject"] == subject)
