"""``kvstore bench path`` with real nodes, small."""

from __future__ import annotations

import json

import pytest

from kvstore.cli import main as cli
from kvstore.cli.bench.path_baselines import PATHS, ends
from kvstore.errors import ResourceError


def test_every_path_is_measured_beside_its_limit(capsys):
    flags = ["--page", "64KiB", "--pages", "8", "--rounds", "1", "--json"]
    assert cli.main(["bench", "path", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["path"], row["work"]) for row in rows} == {
        (path, work) for path in PATHS for work in ("store", "load")
    }
    for row in rows:
        assert (row["page_bytes"], row["pages"]) == (64 << 10, 8)
        assert row["limit"] == PATHS[row["path"]][0]
        for figure in ("gbps", "limit_gbps", "of_limit", "p50_ms", "cpu_s_per_gb", "limit_cpu_s_per_gb"):
            assert row[figure] > 0, (row, figure)
        assert row["p99_ms"] >= row["p50_ms"]


def test_a_table_and_a_plot_for_people(capsys, tmp_path):
    plot = tmp_path / "path.svg"
    flags = ["--path", "bulk", "--page", "64KiB", "--pages", "1", "--rounds", "1", "--plot", str(plot)]
    assert cli.main(["bench", "path", *flags]) == 0
    assert "1 x 64 KiB" in capsys.readouterr().out
    assert "bulk, store" in plot.read_text()
    assert cli.main(["bench", "path", *flags[:-1], str(tmp_path / "no" / "such.svg")]) == 1
    assert "the plot can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--path", "pigeon"], ["--rounds", "0"], ["--page", "much"], ["--pages", "0"]])
def test_flags_that_cannot_be_right(flags, capsys):
    assert cli.main(["bench", "path", *flags]) == 2
    assert "kvstore bench" in capsys.readouterr().err


def test_a_node_or_a_peer_that_does_not_start_says_why():
    with pytest.raises(ResourceError, match=r"the benchmark's node does not start: .*arena"), ends(1, 1 << 20):
        pytest.fail("it started")
    with pytest.raises(ResourceError, match="measured beside does not start: "), ends(1 << 20, 0):
        pytest.fail("it started")
