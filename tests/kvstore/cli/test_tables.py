"""What commands print, to people and to pipes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_process import NodeProcess
from rich.table import Table

import kvstore
from kvstore.cli import main as cli
from kvstore.cli.bench.eviction import Figure, _print
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


ROOT = Path(__file__).parents[3]
HASH = bytes([1]) * 32
TIMEOUT = 60.0


def on_a_terminal(width: int, *arguments: str) -> str:
    """What a command prints on a terminal of so many columns, without its colours."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environment | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    os.close(inside)
    said = b""
    while select.select([terminal], [], [], TIMEOUT)[0]:
        try:
            said += os.read(terminal, 65536)
        except OSError:  # nobody writes there any more
            break
    os.close(terminal)
    process.wait(TIMEOUT)
    return plain(said.decode())


def plain(said: str) -> str:
    """What is seen of it: without colours, and what is drawn anew on lines of its own."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.replace("\x1b[2K", "\n")).replace("\r", "")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node with twelve namespaces, the last of them the largest."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/kvXXXXXX"], text=True).strip())
    node = NodeProcess(folder, Path(f"/dev/shm/{folder.name}"))
    node.start()
    with kvstore.connect(node.url) as client:
        for number in range(12):
            layout = kvstore.Layout(model=f"acme/model-{number}", block_size=16, page_bytes=4096 * (number + 1))
            client.namespace(layout).store([HASH], bytes(layout.page_bytes))
    yield node.url
    node.terminate()
    subprocess.run(["rm", "-rf", folder, f"/dev/shm/{folder.name}"], check=True)


@pytest.mark.parametrize("width", [40, 60])
@pytest.mark.parametrize("command", ["status", "top", "namespaces", "lookup", "doctor", "check"])
def test_nothing_is_wider_than_its_terminal_and_nothing_is_lost(
    url: str, node_process: Callable[..., NodeProcess], width: int, command: str
) -> None:
    words = {"lookup": ["acme/model-1", HASH.hex()], "top": ["--count", "1", "--interval", "0.2"]}.get(command, [])
    place = ["--url", url]
    if command == "check":
        node = node_process()
        with kvstore.connect(node.url) as client:
            client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=64)).store([HASH], bytes(64))
        node.terminate()
        place = [str(node.disk)]
    narrow = on_a_terminal(width, command, *place, *words)
    assert narrow and max(map(len, narrow.splitlines())) <= width, narrow
    expected = {
        "status": ["overrun 0", "refused 0", "limit 64 MiB", "acme/model-11", "… 2 more: kvstore namespaces"],
        "top": ["stored/s 0", "refused/s 0", "arena", "disk"],
        "namespaces": ["acme/model-0", "acme/model-11", "pinned 0"],
        "lookup": [f"{HASH.hex()[:12]}…  arena"],
        "doctor": ["ok", "shared memory", "checks:"],
        "check": ["segments with 1 pages are sound"],
    }[command]
    for each in expected:
        assert each in " ".join(narrow.split()) or each in narrow, narrow


def test_a_pipe_gets_all_columns_whatever_the_terminal_has(url: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "40"}
    for words, rows in ((["status"], r"tier +used +limit .* refused"), (["top", "--count", "1"], r"tier .* refused/s")):
        command = [sys.executable, "-m", "kvstore.cli", *words, "--url", url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        assert re.search(rf"^{rows}$", done.stdout, re.M), done.stdout
    command = [sys.executable, "-m", "kvstore.cli", "lookup", "--url", url, "acme/model-1", HASH.hex()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert f"{HASH.hex()}  arena\n" in done.stdout


def test_status_has_the_ten_largest_namespaces(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "acme/model" in line or line.startswith("…")]
    assert [re.search(r"model-(\d+)", line)[1] for line in lines[:-1]] == [str(each) for each in range(11, 1, -1)]
    assert lines[-1] == "… 2 more: kvstore namespaces"
    assert cli.main(["status", "--url", url, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["namespaces"]) == 12, "programs get them all"


def test_columns_of_a_benchmark_are_folded_under_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout", Screen())
    _print([Figure("lru", size, size / 100, size == 1) for size in (1, 2, 5, 10, 20, 50)])
    assert plain(sys.stdout.getvalue()).splitlines() == [
        "lru (default)",
        "  1 % 0.0100  2 % 0.0200  5 % 0.0500",
        "  10 % 0.1000  20 % 0.2000  50 % 0.5000",
    ]


class Screen(io.StringIO):
    """A terminal without colours."""

    def isatty(self) -> bool:
        return True
