"""``kvstore clear``, against a node: what it says, what it asks, and when it refuses."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.cli import main as cli
from kvstore.node.node import Node

ROOT = Path(__file__).parents[3]
LAYOUT = kvstore.Layout(model="acme/chat", block_size=16, page_bytes=4096)
HASHES = [bytes([number]) * 32 for number in range(1, 5)]
PATIENCE = 60.0


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Node:
    node = start_node()
    with kvstore.connect(f"unix://{node.config.socket}") as client:
        pages = client.namespace(LAYOUT)
        assert pages.store(HASHES, bytes(4 * 4096)).stored == 4
        client.flush()
        assert pages.pin(HASHES[:1], 3600) == 1
    return node


@pytest.fixture
def url(node: Node) -> str:
    return f"unix://{node.config.socket}"


def there(node: Node) -> bool:
    return bool(node.store.statistics().namespaces)


def test_without_a_terminal_it_refuses_and_says_what_would_go(
    url: str, node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["clear", "--url", url, LAYOUT.model]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "there is no terminal to ask on: --yes drops" in said.err
    assert f"{LAYOUT.name}: 4 pages in the arena (arena 16 KiB, disk 1" in said.err
    assert "), 1 of them pinned" in said.err
    assert there(node)


def test_a_dry_run_drops_nothing(url: str, node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--yes"]):
        assert cli.main(["clear", "--url", url, LAYOUT.model, "--dry-run", *more]) == 0
        assert capsys.readouterr().out.startswith(f"would drop {LAYOUT.fingerprint.hex()[:12]} {LAYOUT.name}: 4 pages")
    assert cli.main(["clear", "--url", url, LAYOUT.model, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["arena_pages"], told["pinned_pages"], told["dropped"]) == (4, 1, 0)
    assert told["used_bytes"]["arena"] == 4 * 4096
    assert there(node)


def test_with_yes_it_is_done_and_bytes_are_said(url: str, node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["clear", "--url", url, "--yes", LAYOUT.model]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("4 dropped (arena 16 KiB, disk 1")
    assert said.err == ""
    assert not there(node)


@pytest.mark.parametrize(
    ("answer", "code", "stays"), [("y\n", 0, False), ("\n", 1, True), ("n\n", 1, True), ("\x04", 1, True)]
)
def test_on_a_terminal_it_asks(url: str, node: Node, answer: str, code: int, stays: bool) -> None:
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", "clear", "--url", url, LAYOUT.model],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=dict(os.environ, PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="200"),
    )
    os.close(inside)
    said = _read_until(terminal, "[y/N] ")
    assert "4 pages in the arena (arena 16 KiB, disk 1" in said and "1 of them pinned" in said
    assert there(node), "it waits for the answer"
    os.write(terminal, answer.encode())
    said = _read_until(terminal, "dropped")
    assert process.wait(PATIENCE) == code
    assert ("nothing was dropped" in said) == stays == there(node)
    os.close(terminal)


def _read_until(terminal: int, words: str) -> str:
    said = ""
    while words not in said:
        assert select.select([terminal], [], [], PATIENCE)[0], said
        said += os.read(terminal, 4096).decode()
    return said


def test_a_wrong_name_is_told_the_nearest_and_how_many_there_are(
    url: str, node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvstore.connect(url) as client:
        for number in range(11):
            client.namespace(kvstore.Layout(model=f"model-{number}", block_size=16, page_bytes=4096))
    assert cli.main(["clear", "--url", url, "--yes", "acme/chta"]) == 2
    assert capsys.readouterr().err == (
        "kvstore clear: the node knows no namespace 'acme/chta' among its 12 (`kvstore namespaces`);"
        " did you mean 'acme/chat'?\n"
    )
