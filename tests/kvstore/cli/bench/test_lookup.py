"""``kvstore bench lookup`` as people run it, with a real node of its own, on few pages."""

import json
import shutil
from pathlib import Path

import pytest

from kvstore.cli.bench import prompts
from kvstore.cli.bench.redis_baseline import own_server
from kvstore.cli.main import EXIT_FAILED, EXIT_USAGE, main


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.bench.timing.SWEPT_BYTES", 1 << 20)


def test_lookup(small: None, folders_made: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lookup", "--indexed", "1024", "--on-disk", "2048", "--rounds", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = printed["lookup"]
    assert [(row["here"], row["cold"]) for row in rows] == [
        (here, cold) for here in ("all", "half", "none") for cold in (False, True)
    ]
    assert all(row["indexed"] == 1024 and row["pages"] == 512 for row in rows)
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)
    below = printed["beside_a_disk"]
    assert [(row["here"], row["cold"]) for row in below] == [
        (kind, cold) for kind in ("new", "half in the arena", "half on disk", "on disk") for cold in (False, True)
    ]
    assert [row["calls"] for row in below] == [0] * 4 + [1] * 4, "what is nowhere costs no call"
    assert all(row["on_disk"] == 2048 and not row["shared"] for row in below)
    assert folders_made
    assert not any(folder.exists() for folder in folders_made)


def test_the_table_and_the_plot(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "lookup.svg"
    flags = ["--indexed", "600,700", "--on-disk", "0", "--rounds", "1", "--plot", str(plot)]
    assert main(["bench", "lookup", *flags]) == 0
    assert "none here, cold" in plot.read_text()
    out = capsys.readouterr().out
    assert "pages indexed" in out
    assert "600  all   warm" in out


@pytest.mark.parametrize(
    "flags",
    [
        ["lookup", "--indexed", "many"],
        ["lookup", "--indexed", "511"],
        ["lookup", "--on-disk", "511"],
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
    monkeypatch.setattr(prompts, "PAGE_BYTES", 1 << 50)
    assert main(["bench", "lookup", "--indexed", "600", "--rounds", "1"]) == EXIT_FAILED
    assert "the node does not start: kvstore serve: " in capsys.readouterr().err


@pytest.mark.skipif(
    not (shutil.which("redis-server") or shutil.which("valkey-server")), reason="redis-server is missing"
)
def test_lookups_beside_redis_stand_beside_a_bare_client(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "lookup", "--indexed", "600", "--on-disk", "1024", "--rounds", "2"]
    with own_server() as urls:
        assert main([*flags, "--json", "--redis", urls[0]]) == 0
        rows = json.loads(capsys.readouterr().out)["beside_a_disk"]
        assert main([*flags, "--redis", urls[1]]) == 0
    assert [row["shared"] for row in rows] == [False] * 8 + [True] * 8
    assert all((row["redis_us"] or 0) > 0 if row["shared"] else row["redis_us"] is None for row in rows)
    assert "Redis' own µs" in capsys.readouterr().out
