"""``kvstore bench lookup`` and ``kvstore bench path`` as people run them, with a real node of their own."""

import json
from pathlib import Path

import pytest

from kvstore.bench import path
from kvstore.cli import EXIT_FAILED, EXIT_USAGE, main


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "SHAPES", ((64 << 10, 1), (4 << 10, 8)))
    monkeypatch.setattr(path, "ARENA_BYTES", 16 << 20)
    monkeypatch.setattr("kvstore.bench.serving.SWEPT_BYTES", 1 << 20)


def left_behind() -> list[Path]:
    return list(Path("/dev/shm").glob("kvstore-bench-*"))


def test_lookup(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = left_behind()
    assert main(["bench", "lookup", "--indexed", "1024", "--rounds", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["lookup"]
    assert [(row["here"], row["cold"]) for row in rows] == [
        (here, cold) for here in ("all", "half", "none") for cold in (False, True)
    ]
    assert all(row["indexed"] == 1024 and row["pages"] == 512 for row in rows)
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)
    assert left_behind() == before


def test_path(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    before = left_behind()
    assert main(["bench", "path", "--rounds", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["path"]
    assert [(row["work"], row["page_bytes"], row["pages"]) for row in rows] == [
        (work, *shape) for shape in path.SHAPES for work in ("load", "store")
    ]
    for row in rows:
        assert row["of_limit"] == pytest.approx(row["gbps"] / row["limit_gbps"])
        assert row["p50_ms"] > 0
    assert left_behind() == before


def test_tables(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lookup", "--indexed", "600", "--rounds", "1"]) == 0
    assert main(["bench", "path", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "pages indexed" in out
    assert "600  all   warm" in out
    assert "of memcpy" in out


@pytest.mark.parametrize(
    "flags",
    [
        ["lookup", "--indexed", "many"],
        ["lookup", "--indexed", "511"],
        ["lookup", "--rounds", "0"],
        ["path", "--rounds", "0"],
    ],
)
def test_flags_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags]) == EXIT_USAGE
    assert flags[1] in capsys.readouterr().err


def test_a_node_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(path, "ARENA_BYTES", 1 << 60)
    assert main(["bench", "path", "--rounds", "1"]) == EXIT_FAILED
    assert "the node does not start: kvstore serve: " in capsys.readouterr().err
