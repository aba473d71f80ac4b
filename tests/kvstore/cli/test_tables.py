"""What commands print, to people and to pipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table

from kvstore.cli import main as cli
from kvstore.cli.tables import print_table, shown


def test_in_a_pipe_a_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("short", "long"):
        table.add_column(column, overflow="fold")
    table.add_row("a", "word " * 100)
    table.add_row("b", "word")
    print_table(table)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["short", "long"], ["a", *["word"] * 100], ["b", "word"]]
    assert all(line == line.rstrip() for line in lines)


def test_a_name_says_nothing_to_a_terminal() -> None:
    assert shown("m\x1b[2J\x07 · block 16\n") == "m�[2J� · block 16�"


def test_a_refused_token_says_what_to_do(start_node, tmp_path: Path, monkeypatch, capsys) -> None:
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    for path, text in ((tokens, "a-token-of-some-length\n"), (mine, "a-token-that-nobody-knows")):
        path.write_text(text)
        path.chmod(0o600)
    node = start_node(token_file=tokens)
    monkeypatch.setenv("KVSTORE_CONNECT_TOKEN_FILE", str(mine))
    url = f"kv://127.0.0.1:{node.port}"
    assert cli.main(["status", "--url", url]) == 1
    assert "and name it in KVSTORE_CONNECT_TOKEN_FILE" in capsys.readouterr().err
    cli.main(["doctor", "--url", url])
    said = capsys.readouterr().out
    assert "→ set KVSTORE_CONNECT_TOKEN_FILE to a file with a token" in said
    assert "start it" not in said
