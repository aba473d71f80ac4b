"""``kvstore bench arena`` as people run it, with few pages."""

import json
from pathlib import Path

import pytest

from kvstore.cli.main import EXIT_USAGE, main


def test_arena(folders_made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "arena", "--pages", "4096", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["arena"]
    assert costs.pop("pages") == 4096
    assert costs.pop("full_bytes") <= costs.pop("replaced_bytes")  # so few pages may fit into what was there before
    assert all(0 < microseconds < 1e6 for microseconds in costs.values())
    assert folders_made
    assert not any(folder.exists() for folder in folders_made)


def test_the_table_and_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    assert main(["bench", "arena", "--pages", "2048", "--plot", str(plot)]) == 0
    assert "not here" in plot.read_text()
    assert "memory of one of 2,048 pages" in capsys.readouterr().out


@pytest.mark.parametrize("pages", ["100", str(1 << 27)])
def test_flags_that_make_no_sense(pages: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "arena", "--pages", pages]) == EXIT_USAGE
    assert "--pages" in capsys.readouterr().err
