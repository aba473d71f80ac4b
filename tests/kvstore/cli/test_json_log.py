"""`kvstore serve --log-format json`: every line on stderr is one JSON object, whatever happens."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import DAY, Authority
from node_process import NodeProcess
from ports import free_port
from redis_servers import RedisServer

import kvstore

LAYOUT = kvstore.Layout(model="tiny", dtype="bfloat16", block_size=16, page_bytes=5000)
FAILING = """
import gc, sys, threading, warnings
from kvstore.cli import serve
from kvstore.cli.main import main
from kvstore.node.node import Node

class Bad:
    def __del__(self):
        raise ValueError("in a finalizer")

def fail():
    raise ValueError("in a thread")

def keep_giving_back():
    warnings.warn("a warning", stacklevel=2)
    Bad()
    gc.collect()
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    serve._log.info("two %s", "words", "too many")
    raise ZeroDivisionError("in the main thread")

serve.keep_giving_back = keep_giving_back
sys.exit(main(sys.argv[1:]))
"""


def lines_of(node: NodeProcess) -> list[dict[str, Any]]:
    """Each of them, or the test fails."""
    lines = [json.loads(line) for line in node.errors.read_text().splitlines()]
    assert all({"time", "level", "logger", "thread", "message"} <= line.keys() for line in lines)
    return lines


def said(node: NodeProcess, words: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(node) if words in line["message"]]


@pytest.fixture
def server(short_folder: Path) -> Iterator[RedisServer]:
    running = RedisServer(short_folder / "redis")
    yield running
    running.close()


def test_from_the_start_to_the_end(
    node_process: Callable[..., NodeProcess], server: RedisServer, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    cert, key = Authority(tmp_path).sign("node", "127.0.0.1", ends=-DAY, began=3 * DAY)
    file = tmp_path / "kvstore.toml"
    file.write_text('log_format = "json"\n')
    node = node_process(
        config=str(file), tls_cert=str(cert), tls_key=str(key), metrics=str(free_port()), redis=server.url
    )
    [ready] = said(node, "ready on ")
    assert node.ready_line == f"kvstore: {ready['message']}\n", "for scripts, stdout has the line as ever"
    assert ready["level"] == "info"
    assert said(node, "ended 1 day ago")[0]["level"] == "error"

    for greeting in (b"\x16\x03\x01\x00\x05hello", b"GET / HTTP/1.0\r\n\r\n", bytes(100)):
        for port in (node.port, node.bulk_port, int(node.options["metrics"] or 0)):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=60) as stranger,
                contextlib.suppress(ConnectionError),
            ):
                stranger.sendall(greeting)
                while stranger.recv(1 << 10):
                    pass
    with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", node.port), timeout=60) as stranger:
        ssl.create_default_context().wrap_socket(stranger, server_hostname="127.0.0.1")

    file.write_text('log_format = "json"\narena = "1GiB"\nlog_level = "debug"\n')
    node.options.pop("arena")
    node.signal(signal.SIGHUP)
    eventually(lambda: said(node, "were reloaded; changed: log_level"))
    file.write_text("nonsense")
    node.signal(signal.SIGHUP)
    eventually(lambda: said(node, "nothing was reloaded"))

    server.kill()
    with kvstore.connect(node.url) as client:
        client.namespace(LAYOUT).store(kvstore.hash_blocks(list(range(16)), 16), [np.zeros(5000, np.uint8)])
        eventually(lambda: client.status().tier("redis").health.reason)
    eventually(lambda: said(node, "can't be reached"))
    assert node.terminate() == 0
    assert said(node, "stopping")
    assert said(node, "stopped; the arena's pages stay in ")
    assert all(line["message"] for line in lines_of(node))


def test_what_python_would_print_beside_the_log(node_process: Callable[..., NodeProcess]) -> None:
    node = node_process(ready=False, log_format="json")
    node.command = [sys.executable, "-c", FAILING]
    node.launch()
    assert node.wait() == 1
    errors = {line["exception"].splitlines()[-1] for line in lines_of(node) if "exception" in line}
    assert errors == {
        "ValueError: in a finalizer",
        "ValueError: in a thread",
        "ZeroDivisionError: in the main thread",
    }
    assert said(node, "UserWarning: a warning")[0]["level"] == "warning"
    assert said(node, "two %s ('words', 'too many')")
    assert said(node, "the process ends by an error: in the main thread")[0]["level"] == "critical"


@pytest.mark.parametrize(
    ("settings", "words", "code"),
    [
        ({"arena": "1MiB", "disk-limit": "100"}, "disk_limit is 100 bytes, the least is 1MiB", 2),
        ({"tls-cert": "/none", "tls-key": "/none"}, "can't be read: No such file", 2),
        ({"listen": "192.0.2.1:1", "insecure": "true"}, "can't listen on 192.0.2.1:1", 1),
    ],
)
def test_an_error_that_ends_the_start(
    node_process: Callable[..., NodeProcess], settings: dict[str, str], words: str, code: int
) -> None:
    node = node_process(ready=False)
    node.options = {"log-format": "json"} | node.options | settings
    if node.options.pop("insecure", None):
        node.options["config"] = str(node.socket.with_name("c.toml"))
        node.socket.with_name("c.toml").write_text("insecure = true\n")
    node.launch()
    assert node.wait() == code
    [line] = said(node, words)
    assert line["level"] == "error"


def test_the_format_counts_also_where_the_file_names_it_and_the_settings_are_wrong(
    node_process: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('log_format = "json"\ndrain = 3\n')
    node = node_process(ready=False, config=str(file))
    node.launch()
    assert node.wait() == 2
    assert said(node, "unknown key 'drain'")


def test_text_stays_as_it_was(node_process: Callable[..., NodeProcess]) -> None:
    node = node_process()
    assert node.terminate() == 0
    first, *_, last = node.errors.read_text().splitlines()
    assert first == "kvstore: stopping"
    assert last.startswith("kvstore: stopped; the arena's pages stay in ")
