"""Every command where standard output is full, closed, or has lost its reader: one line at most, and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.cli import main as cli
from kvstore.cli.bench.command import BENCHES
from kvstore.node.node import Node

ROOT = Path(__file__).parents[3]
LAYOUT = kvstore.Layout(model="acme/chat", block_size=16, page_bytes=4096)
HASH = bytes(32)
TIMEOUT = 60.0
COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("--json",),
    "namespaces": (),
    "top": ("--interval", "0.2", "--count", "1"),
    "lookup": (LAYOUT.model, HASH.hex()),
    "pin": (LAYOUT.model, HASH.hex(), "--for", "1h"),
    "unpin": (LAYOUT.model, HASH.hex()),
    "warm": (LAYOUT.model, HASH.hex()),
    "evict": (LAYOUT.model, HASH.hex()),
    "clear": (LAYOUT.model, "--dry-run"),
    "doctor": (),
}
ALONE: list[tuple[str, ...]] = [
    ("--help",),
    ("--version",),
    ("serve", "--help"),
    ("config", "show"),
    ("bench", "eviction", "--help"),
    ("completion", "bash"),
    ("docs",),
    ("docs", "operations"),
    ("completion", "fish"),
    ("check", "{disk}"),
    ("plan", "{trace}"),
    ("bench", "eviction", "{trace}"),
    ("objects", "policy", "s3://bucket/prefix"),
    ("responses", "--help"),
]
SERVERS = ("serve", "proxy", "demo")
"""Those with tests of their own below, or that say nothing until they have worked for a minute."""


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Node:
    node = start_node()
    with kvstore.connect(f"unix://{node.config.socket}") as client:
        client.namespace(LAYOUT).store([HASH], bytes(4096))
        client.flush()
    return node


def outcome(arguments: list[str], stdout: str, **environment: str) -> tuple[int, str]:
    """Exit code and what is said on stderr, with such a stdout."""
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    shell = {"full": '"$@" >/dev/full', "closed": '"$@" >&-'}
    given = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    given |= {"PYTHONPATH": str(ROOT)} | environment
    if stdout == "pipe":
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, env=given, timeout=TIMEOUT)
    else:
        words = ["bash", "-c", shell[stdout], "bash", *command]
        done = subprocess.run(words, stderr=subprocess.PIPE, env=given, timeout=TIMEOUT)
    return done.returncode, done.stderr.decode()


def expected(command: str, stdout: str) -> tuple[int, str]:
    if stdout == "pipe":
        return 141, ""
    why = "stdout can't be written: No space left on device" if stdout == "full" else "stdout is closed"
    return 1, f"{command}: {why}\n"


@pytest.mark.parametrize("stdout", ["full", "closed", "pipe"])
def test_commands_that_ask_a_node(node: Node, stdout: str) -> None:
    for command, words in COMMANDS.items():
        given = [command, "--url", f"unix://{node.config.socket}", *words]
        assert outcome(given, stdout) == expected(f"kvstore {command}", stdout), given


@pytest.mark.parametrize(("stdout", "unbuffered"), [("full", ""), ("full", "1"), ("closed", ""), ("pipe", "")])
def test_commands_without_one(start_node: Callable[..., Node], tmp_path: Path, stdout: str, unbuffered: str) -> None:
    node = start_node()
    with kvstore.connect(f"unix://{node.config.socket}") as client:
        client.namespace(LAYOUT).store([HASH], bytes(4096))
    assert node.stop()
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    places = {"{disk}": str(node.config.disk), "{trace}": str(trace)}
    for words in ALONE:
        given = [places.get(each, each) for each in words]
        called = "kvstore" if words[0].startswith("-") else f"kvstore {words[0]}"
        if words[0] == "bench":
            called += " eviction" if stdout == "full" and "--help" not in words else ""
        assert outcome(given, stdout, PYTHONUNBUFFERED=unbuffered) == expected(called, stdout), given


def test_every_command_is_among_these() -> None:
    known = {name for names in cli._COMMANDS.values() for name in names} | {"completion", "demo"}
    assert known == {*COMMANDS, *(words[0] for words in ALONE if words[0][0] != "-"), "proxy", "demo"}
    assert {each.__name__.rpartition(".")[2] for each in BENCHES} >= {"eviction"}


def _listens(path: Path) -> bool:
    """Whether somebody takes connections: a socket has its name before that."""
    with socket.socket(socket.AF_UNIX) as connection:
        return not connection.connect_ex(str(path))


@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
def test_a_node_serves_though_nobody_can_read_that_it_is_ready(
    short_folder: Path, shm_folder: Path, eventually: Callable[..., None], stdout: str
) -> None:
    flags = f"--socket {short_folder}/s --arena 1MiB --arena-dir {shm_folder}/arena --disk-limit 0"
    command = f"exec {sys.executable} -m kvstore.cli serve {flags} {stdout}"
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    log = short_folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(["bash", "-c", command], stderr=stderr, env=environment)
    try:
        eventually(lambda: _listens(short_folder / "s"), "a node")
        with kvstore.connect(f"unix://{short_folder}/s") as client:
            assert client.namespace(LAYOUT).store([HASH], bytes(4096)).stored == 1
        if stdout == ">/dev/full":  # it serves before it says so
            eventually(lambda: "ready on" in log.read_text(), "a word")
    finally:
        process.terminate()
        process.wait(TIMEOUT)
    said = log.read_text()
    assert process.returncode == 0
    assert "Traceback" not in said and "Exception ignored" not in said
    if stdout == ">/dev/full":
        assert "kvstore: ready on unix://" in said and "No space left on device" in said


def test_standard_input_that_is_closed_or_no_text(node: Node) -> None:
    command = f"{sys.executable} -m kvstore.cli lookup --url unix://{node.config.socket} {LAYOUT.model}"
    for given, words in (
        ("- <&-", "- stands for standard input, which is closed"),
        ("--tokens - <&-", "- stands for standard input, which is closed"),
        ("- <<<$'\\xff\\xfe'", "64 hexadecimal digits, got"),
    ):
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        words_of_bash = ["bash", "-c", f"{command} {given}"]
        done = subprocess.run(words_of_bash, capture_output=True, env=environment, text=True, timeout=TIMEOUT)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert words in done.stderr and len(done.stderr.splitlines()) == 1
