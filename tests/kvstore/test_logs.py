"""The log of a process that serves: one line a second of each kind that others can cause, and none beside it."""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from ports import free_port

from kvstore.cli.logs import log_to_stderr
from kvstore.logs import LeftOutCollector, RepeatFilter
from kvstore.service import event_publisher
from kvstore.service.http.recent_errors import RecentErrors

ATTEMPTS = 60
SECONDS = 30.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def record_of(logger: str, line: int, text: str = "word %s", *words: object) -> logging.LogRecord:
    return logging.LogRecord(logger, logging.ERROR, "where.py", line, text, words or ("x",), None)


def test_one_line_a_second_of_each_kind():
    clock = Clock()
    limit = RepeatFilter(clock)
    assert [limit.filter(record_of("grpc._common", 7)) for _ in range(5)] == [True] + [False] * 4
    assert limit.filter(record_of("grpc._common", 8)), "another place in the code"
    assert limit.left_out() == {"grpc._common": 4}
    clock.now += 1.0
    record = record_of("grpc._common", 7, "word %s", "y")
    assert limit.filter(record)
    assert record.getMessage() == "word y (and 4 more like this, which were left out)"
    clock.now += 1.0
    record = record_of("grpc._common", 7)
    assert limit.filter(record)
    assert record.getMessage() == "word x"


def test_what_comes_from_here_is_all_said():
    limit = RepeatFilter(Clock())
    for logger in ("kvstore.store.pins", "kvstore.cli.serve", "grpcio", "kvstore.services", event_publisher._log.name):
        assert all(limit.filter(record_of(logger, 7)) for _ in range(5)), logger
    assert not limit.left_out()


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What this process logs as a node does, until the test ends."""
    root, hook = logging.getLogger(), threading.excepthook
    handlers, level = root.handlers[:], root.level
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root.handlers = []
    log_to_stderr("info", "text")
    yield written
    root.handlers, threading.excepthook = handlers, hook
    root.setLevel(level)


def test_the_logs_of_grpc_and_of_threads_are_limited_and_counted(stderr):
    def left_out() -> dict[str, float]:
        [family] = LeftOutCollector().collect()
        return {sample.labels["logger"]: sample.value for sample in family.samples}

    def fail() -> None:
        raise ValueError("as it happens")

    before = left_out()
    for _ in range(ATTEMPTS):
        logging.getLogger("grpc._server").error("Exception calling application")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    log_to_stderr("info", "json")  # as a reload does: what was counted stays
    after = left_out()
    said = stderr.getvalue()
    for logger, line in (("grpc._server", "Exception calling"), ("kvstore.threads", "a thread ended by an error")):
        dropped = after[logger] - before.get(logger, 0.0)
        assert said.count(line) + dropped == ATTEMPTS
        assert dropped > 0
    assert said.count("Traceback") == said.count("a thread ended by an error")


def test_the_console_keeps_room_for_other_errors():
    kept = RecentErrors()
    try:
        for _ in range(ATTEMPTS):
            logging.getLogger("kvstore.service.http.server").error("web: a request failed")
        assert len(kept.latest()) < ATTEMPTS
    finally:
        kept.close()


def test_malformed_messages_are_no_lines_at_all(node_process):
    node = node_process()
    with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        for path in ("grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", "kvstore.v1.Cache/Lookup"):
            for _ in range(ATTEMPTS):
                with suppress(grpc.RpcError):
                    list(channel.stream_stream(f"/{path}")(iter([b"\xff" * 100]), timeout=SECONDS))
    assert node.errors.read_text() == ""


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + b"\xff" * 300, b""])
def test_handshakes_that_fail_are_no_lines_at_all(node_process, tmp_path: Path, said: bytes):
    authority = Authority(tmp_path)
    certificate, key = authority.sign("node", "127.0.0.1")
    metrics = free_port()
    node = node_process(tls_cert=str(certificate), tls_key=str(key), metrics=f"127.0.0.1:{metrics}")
    for port in (node.port, node.bulk_port, metrics):
        for _ in range(ATTEMPTS):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), SECONDS) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass
    assert node.errors.read_text() == ""
