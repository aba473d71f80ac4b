"""`kvstore completion`, by the shells themselves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_process import NodeProcess

import kvstore
from kvstore.cli import main as cli
from kvstore.cli.offered import offer
from kvstore.node.node import Node

ROOT = Path(__file__).parents[3]
TIMEOUT = 60


MakeScript = Callable[[str], str]


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> MakeScript:
    def make(shell: str) -> str:
        assert cli.main(["completion", shell]) == 0
        return capsys.readouterr().out

    return make


class Bash:
    """A bash that has read the script; asked for what it would offer."""

    def __init__(self, script: str, folder: Path) -> None:
        self.script, self.folder = script, folder

    def offers(self, *words: str) -> list[str]:
        """What the last word may become."""
        quoted = " ".join(f"'{word}'" for word in ("kvstore", *words))
        ask = (
            f"{self.script}\ncompopt() {{ :; }}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words)}\n_kvstore\n"
            'printf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        done = subprocess.run(
            ["bash", "--norc", "-u", "-c", ask], cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()


@pytest.fixture
def bash(script: MakeScript, tmp_path: Path) -> Bash:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    (tmp_path / "kvstore.toml").write_text("")
    return Bash(script("bash"), tmp_path)


def test_commands(bash: Bash) -> None:
    offered = bash.offers("")
    for command in ("serve", "status", "top", "lookup", "pin", "evict", "clear", "warm", "check", "bench", "doctor"):
        assert command in offered
    assert bash.offers("st") == ["status"]
    assert bash.offers("config", "") == ["show", "--help", "-h"]
    assert bash.offers("bench", "di") == ["disk"]


def test_flags_of_the_command_that_is_written(bash: Bash) -> None:
    assert bash.offers("serve", "--arena", "1GiB", "--arena-") == ["--arena-dir"]
    assert "--idle" in bash.offers("namespaces", "--")
    assert "--idle" not in bash.offers("status", "--")


def test_values(bash: Bash) -> None:
    assert bash.offers("serve", "--config", "kv") == ["kvstore.toml"]
    assert bash.offers("check", "kv") == ["kvstore.toml"]
    assert bash.offers("serve", "--arena", "") == [], "a size is nothing to be guessed"
    assert bash.offers("completion", "z") == ["zsh"]


NAMES = ["acme/chat", "org:7b=x", "my model", "it's", "two"]
"""Models: two have what bash divides words at, two what has to be quoted, and of the last there are two namespaces."""


@pytest.fixture
def node_url(start_node: Callable[..., Node]) -> str:
    node = start_node()
    url = f"unix://{node.config.socket}"
    with kvstore.connect(url) as client:
        for name in NAMES:
            client.namespace(kvstore.Layout(model=name, block_size=16, page_bytes=64))
        client.namespace(kvstore.Layout(model="two", block_size=32, page_bytes=64))
        client.namespace(kvstore.Layout(model="\x1b]0;title\x07", block_size=32, page_bytes=64))
    return url


class Terminal:
    """An interactive bash in a terminal, with the command and its completion."""

    def __init__(self, script: str, folder: Path, home: Path) -> None:
        (folder / "kvstore").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvstore.cli "$@"\n')
        (folder / "kvstore").chmod(0o755)
        (folder / "rc").write_text(
            f"{script}\nbind 'set bell-style none'\nbind 'set enable-bracketed-paste off'\nPS1='> '\n"
        )
        environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(home)}
        environment |= {"TERM": "dumb", "LC_ALL": "C.UTF-8", "COLUMNS": "400"}
        self._terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 400, 0, 0))
        command = ["bash", "--noprofile", "--rcfile", str(folder / "rc"), "-i"]
        self._process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True
        )
        os.close(inside)
        self._read_until("> ")

    def completed(self, line: str) -> str:
        """What a line has become by a tab, as the command would get its words."""
        os.write(self._terminal, f"{line}\t".encode())
        os.write(self._terminal, b"\x01printf '<%s>' \n")  # the line as arguments of another command
        said = self._read_until("> ", behind="<")
        return re.search(r"<kvstore>.*>(?=[^<>]*> $)", said, re.S)[0]

    def _read_until(self, words: str, behind: str = "") -> str:
        said = ""
        while not (said.endswith(words) and behind in said):
            assert select.select([self._terminal], [], [], TIMEOUT)[0], said
            said += os.read(self._terminal, 4096).decode()
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(script: MakeScript, tmp_path: Path, short_folder: Path) -> Iterator[Terminal]:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    terminal = Terminal(script("bash"), tmp_path, short_folder)
    yield terminal
    terminal.close()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("ac", "acme/chat"),
        ("or", "org:7b=x"),
        ("org:", "org:7b=x"),
        ("org:7b=", "org:7b=x"),
        ("my", "my model"),
        ("my\\ m", "my model"),
        ("'my m", "my model"),
        ('"my m', "my model"),
        ("it", "it's"),
        ("'two · block 3", "two · block 32 · group 0"),
    ],
)
def test_a_namespace_of_the_node_is_completed_as_the_command_takes_it(
    terminal: Terminal, node_url: str, written: str, name: str
) -> None:
    assert terminal.completed(f"kvstore lookup --url {node_url} {written}") == (
        f"<kvstore><lookup><--url><{node_url}><{name}>"
    )


def offered(line: str) -> list[str]:
    return offer(line, " ", lambda words: cli._parser(words[0]).awaits(words))


@pytest.mark.parametrize(
    ("line", "is_offered"),
    [
        *((f"kvstore {name} --url URL ", True) for name in ("lookup", "evict", "pin", "unpin", "clear", "warm")),
        ("kvstore pin --for 12h --url=URL ", True),
        ("kvstore doctor --url URL --why FILE --namespace ", True),
        ("kvstore lookup --url URL acme/chat ", False),
        ("kvstore lookup --url URL --tokens ", False),
        ("kvstore status --url URL ", False),
        ("kvstore lookup --url unix:///nowhere/s ", False),
        ("kvstore lookup --url nonsense ", False),
    ],
)
def test_namespaces_are_offered_where_one_is_expected(node_url: str, line: str, is_offered: bool) -> None:
    expected = ["acme/chat", "it's", "my model", "org:7b=x", "two · block 16 · group 0", "two · block 32 · group 0"]
    assert offered(line.replace("URL", node_url)) == (expected if is_offered else [])


def test_a_node_that_hangs_offers_nothing_and_is_not_waited_for(node_process: Callable[..., NodeProcess]) -> None:
    node = node_process()
    node.pause()
    assert offered(f"kvstore clear --url {node.url} ") == []
    node.resume()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_it(shell: str, script: MakeScript, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    file = tmp_path / f"kvstore.{shell}"
    before = "autoload -U compinit && compinit -u\n" if shell == "zsh" else ""
    file.write_text(before + script(shell))
    done = subprocess.run([shell, str(file)], capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")
    if shell == "fish":
        ask = f"source {file}; complete -C 'kvstore stat'"
        done = subprocess.run([shell, "-c", ask], capture_output=True, text=True, timeout=TIMEOUT)
        assert done.stdout.startswith("status\t")


def test_a_shell_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
