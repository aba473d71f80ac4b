"""docs/operations.md: its sizes add up, its commands exist, and it says of every alert what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.cli import main as cli

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


def test_it_says_of_every_alert_what_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus-alerts.yml").read_text())
    assert re.findall(r"^\| `(Kvstore\w+)` \|", DOCUMENT.read_text(), re.M) == alerts
