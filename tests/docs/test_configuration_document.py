"""docs/configuration.md: its table of settings is made from their declarations, and ``serve`` has their flags."""

from __future__ import annotations

import re

import pytest
from settings_table import DOCUMENT, with_table

from kvstore.cli import main as cli
from kvstore.config.node import SETTINGS


def test_the_table_is_that_of_the_code() -> None:
    document = DOCUMENT.read_text()
    assert document == with_table(document), "run `make docs`"


def test_flags_are_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    said = capsys.readouterr().out
    assert "`kvstore docs configuration`" in said
    flags = set(re.findall(r"^  (--[a-z-]+)", said, re.MULTILINE)) - {"--config"}
    assert flags == {each.flag_name for each in SETTINGS.values()} - {""}


def test_a_flag_behind_another_stands_there_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    flags = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(flags) == len(set(flags))
    for each in SETTINGS.values():
        if each.flag is not None and each.flag.behind:
            assert flags.index(each.flag_name) == flags.index(SETTINGS[each.flag.behind].flag_name) + 1
