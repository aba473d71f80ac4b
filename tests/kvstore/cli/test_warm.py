"""`kvstore warm`: pages come up from below before somebody asks for them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.cli import main as cli
from kvstore.node.node import Node

LAYOUT = kvstore.Layout(model="tiny", block_size=16, page_bytes=4096)
TOKENS = list(range(16 * 40))
HASHES = kvstore.hash_blocks(TOKENS, 16)
Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def node(start_node: Callable[..., Node]) -> Iterator[Node]:
    """One whose disk has the pages of a prompt, and whose arena has none."""
    first = start_node(arena=1 << 20)
    with kvstore.connect(f"unix://{first.config.socket}", timeout=20.0) as client:
        assert client.namespace(LAYOUT).store(HASHES, np.ones((40, 4096), np.uint8)).stored == 40
        client.flush()
    assert first.stop()
    for name in ("pages", "headers", "readers"):
        (first.config.arena_directory / name).unlink()
    yield start_node(arena=1 << 20)


@pytest.fixture
def run(node: Node, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, Any]:
        code = cli.main(["warm", "--url", f"unix://{node.config.socket}", *arguments])
        said = capsys.readouterr()
        return code, json.loads(said.out) if "--json" in arguments and said.out else said.out + said.err

    return run


def tiers(node: Node) -> list[str | None]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=20.0) as client:
        return list(client.namespace(LAYOUT).lookup(HASHES).tiers)


def test_a_list_of_hashes(node: Node, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(tiers(node)) == {"disk"}
    words = [each.hex() for each in [*HASHES[:10], bytes(32), *HASHES[20:30]]]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(words)))
    code, said = run(LAYOUT.name, "-", "--json")
    assert code == 0
    assert (said["asked"], said["disk"], said["absent"], said["already"], said["failed"]) == (21, 20, 1, 0, 0)
    assert said["bytes"] == 20 * 4096
    assert tiers(node)[:10] == tiers(node)[20:30] == ["arena"] * 10
    code, said = run(LAYOUT.name, *words[:10], "--json")
    assert (code, said["already"], said["disk"]) == (0, 10, 0)


def test_prompts(node: Node, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    gap = [*TOKENS[:32], 9_999, *TOKENS[33:]]
    file.write_text("\n".join(json.dumps(each) for each in (TOKENS[:64], {"tokens": gap}, [])) + "\n\n")
    code, said = run("tiny", "--tokens", str(file), "--json")
    assert (code, said["asked"], said["disk"], said["already"], said["absent"]) == (0, 44, 4, 2, 38)
    code, said = run(LAYOUT.name, "--tokens", str(file))
    assert said == "0 of 44 pages brought up (0 B)\n6 already there, 38 in no tier\n"


def test_an_arena_that_is_too_small_is_said(start_node: Callable[..., Node], node: Node, capsys) -> None:
    node.stop()
    small = start_node(arena=32 * 4096)
    words = [each.hex() for each in HASHES]
    assert cli.main(["warm", "--url", f"unix://{small.config.socket}", LAYOUT.name, *words]) == 1
    said = capsys.readouterr()
    assert "the arena is too small for all of them" in said.err
    assert "brought up" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([LAYOUT.name], "give either block hashes or --tokens FILE"),
        ([LAYOUT.name, "xyz"], "a block hash is 64 hexadecimal digits, got 'xyz'"),
        ([LAYOUT.name, "--tokens", "/none"], "/none can't be read: No such file"),
        (["gpt", "00" * 32], "knows no namespace 'gpt'"),
    ],
)
def test_what_cannot_be_used(run: Run, arguments: list[str], words: str) -> None:
    code, said = run(*arguments)
    assert code == 2
    assert words in said


def test_a_line_that_is_no_prompt(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("[1, 2]\n[1, true]\n")
    assert "line 2: tokens must be an array of whole numbers" in run(LAYOUT.name, "--tokens", str(file))[1]
    file.write_text("[1, 2]\nwords\n")
    assert "line 2 is not JSON" in run(LAYOUT.name, "--tokens", str(file))[1]
