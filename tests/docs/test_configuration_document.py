"""docs/configuration.md: every setting is in its table, with the flag, name and default that the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvstore.cli import main as cli
from kvstore.config.node import ENVIRONMENT_PREFIX, NodeConfig
from kvstore.units import parse_size

DOCUMENT = Path(__file__).parents[2] / "docs/configuration.md"
FIELDS = {field.name: field for field in dataclasses.fields(NodeConfig)}
FILE_ONLY = {"namespace", "tenant"}


def rows() -> dict[str, list[str]]:
    """Key → flag, environment, default, meaning."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return {cell[0].strip("`"): [each.replace("`", "") for each in cell[1:]] for cell in cells}


def test_every_setting_is_there_in_the_order_of_the_code() -> None:
    assert list(rows()) == list(FIELDS)
    assert all(len(row) == 4 and row[3] for row in rows().values())


def test_flags_are_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    said = capsys.readouterr().out
    assert "docs/configuration.md" in said
    flags = set(re.findall(r"^  (--[a-z-]+)", said, re.MULTILINE)) - {"--config"}
    assert {row[0] for row in rows().values()} - {""} == flags
    for key, row in rows().items():
        assert row[0] in ("", "--" + key.replace("_", "-"))


def test_names_in_the_environment_are_those_of_the_code() -> None:
    for key, row in rows().items():
        assert row[1] == ("" if key in FILE_ONLY else ENVIRONMENT_PREFIX + key.upper())


def test_defaults_are_those_of_the_code() -> None:
    for key, row in rows().items():
        default, said = FIELDS[key].default, row[2].partition(":")[0]
        if default in (None, "", ()):
            assert said == "none" or key == "arena_dir"
        elif isinstance(default, bool):
            assert said == str(default).lower()
        elif isinstance(default, int):
            assert parse_size(said) == default
        elif isinstance(default, float):
            assert float(said) == default
        elif isinstance(default, str):
            assert said == default
        else:
            assert default is dataclasses.MISSING and FIELDS[key].default_factory is not dataclasses.MISSING
