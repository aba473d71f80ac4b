"""What a benchmark says that it was measured on."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import kvstore
from kvstore.cli.bench.machine import this_machine
from kvstore.cli.main import main
from kvstore.core import choice


def test_a_table_begins_with_machine_versions_and_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["bench", "eviction", str(trace)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f"{len(os.sched_getaffinity(0))} cores, load " in first
    assert f"Python {platform.python_version()}" in first
    for library in ("numpy", "grpcio", "redis"):
        assert f"{library} {version(library)}" in first
    assert main(["bench", "eviction", str(trace), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["machine"]
    assert told["cpu"] in first and told["libraries"].keys() == {"numpy", "grpcio", "redis"}
    assert f"kvstore {told['kvstore']}" in first
    assert told["core"] == choice.CHOSEN.name
    assert f"; {told['core']} core; " in first


@pytest.mark.skipif(shutil.which("git") is None, reason="git is missing")
def test_a_checkout_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kvstore"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(kvstore, "__file__", str(package / "__init__.py"))
    assert this_machine().commit is None
    assert this_machine().line().endswith(f"kvstore {this_machine().kvstore}")

    def git(*arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", *names, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert this_machine().commit is None, "nothing is committed yet"
    git("add", ".")
    git("commit", "-qm", "first")
    assert this_machine().line().endswith(f" at {git('rev-parse', '--short', 'HEAD')}")
    (package / "__init__.py").write_text("changed")
    assert this_machine().commit == git("rev-parse", "--short", "HEAD") + "-dirty"
