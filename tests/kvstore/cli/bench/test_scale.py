"""``kvstore bench scale`` as people run it, with a real node and real clients, small."""

import json
from pathlib import Path

import pytest

from kvstore.cli.bench import scale
from kvstore.cli.bench.node_process import serving
from kvstore.cli.main import EXIT_USAGE, main
from kvstore.errors import ResourceError

SMALL = ["bench", "scale", "--indexed", "1024", "--clients", "2,1,2", "--seconds", "0.2"]


def test_every_work_is_done_by_each_number_of_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "scale.svg"
    assert main([*SMALL, "--json", "--plot", str(plot)]) == 0
    rows = json.loads(capsys.readouterr().out)["scale"]
    assert [(row["work"], row["clients"]) for row in rows] == [(work, n) for work in scale.WORKS for n in (1, 2)]
    for row in rows:
        assert row["pages_a_second"] > 0, row  # whatever was asked for was there
        assert 0 < row["p50_us"] <= row["p99_us"]
    assert [row["speedup"] for row in rows if row["clients"] == 1] == [1.0] * 3
    assert "1,024 pages" in plot.read_text()


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL[:-1], "0.05"]) == 0
    table = capsys.readouterr().out
    assert "pages indexed" in table
    assert "speedup" in table


@pytest.mark.parametrize(
    "flags", [["--indexed", "many"], ["--indexed", "5"], ["--clients", "0"], ["--clients", "65"], ["--seconds", "0"]]
)
def test_flags_that_make_no_sense(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", *flags]) == EXIT_USAGE
    assert flags[0] in capsys.readouterr().err


def test_a_client_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(1 << 20) as url:
        monkeypatch.setattr(scale.sys, "executable", "/bin/true")
        with pytest.raises(ResourceError, match="ended early"), scale.started(url, 1, 1, 0.1):
            pytest.fail("it did not start")
