"""`kvstore completion`, by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.cli import main as cli

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
