"""docs/operations.md: its sizes add up, its commands exist; and the unit of systemd is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import cli

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/operations.md"


def test_bytes_a_token_are_what_the_shapes_say() -> None:
    rows = re.findall(r"^\| (.+?) \| (\d+) \| ([\d × +]+) \| ([\d.]+) KiB \| ([\d,]+) \|", DOCUMENT.read_text(), re.M)
    assert len(rows) >= 15
    for name, layers, shape, kib, tokens in rows:
        if "+" in shape:  # MLA: one latent vector and one key for positions, in each layer
            elements = sum(int(part) for part in shape.split("+"))
        else:
            heads, size = (int(part) for part in shape.split("×"))
            elements = 2 * heads * size
        size = int(layers) * elements * 2
        assert float(kib) == pytest.approx(size / 1024, rel=0.005), name
        assert int(tokens.replace(",", "")) == (1 << 30) // size, name


def test_commands_and_flags_are_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    for command, rest in re.findall(r"kvstore (\w+)((?: +[^\s`|;)]+)*)", DOCUMENT.read_text()):
        if command in ("node", "nodes") or command not in _commands(capsys):
            continue
        if command not in helps:
            with pytest.raises(SystemExit):
                cli.main([command, *(["show"] if command == "config" else []), "--help"])
            helps[command] = capsys.readouterr().out
        for flag in re.findall(r"(?<= )--[a-z-]+", rest):
            assert flag in helps[command], f"kvstore {command} has no {flag}"
    assert {"doctor", "status", "top", "namespaces", "warm", "check", "config", "clear", "pin"} <= set(helps)


def _commands(capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    return set(re.findall(r"^    (\w+)", capsys.readouterr().out, re.M))


def test_the_unit_is_one(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    unit = tmp_path / "kvstore.service"
    text = (ROOT / "deploy/kvstore.service").read_text()
    assert "/opt/kvstore/bin/kvstore" in text
    unit.write_text(text.replace("/opt/kvstore/bin/kvstore", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    if "Failed to" in done.stderr and "kvstore.service:" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
