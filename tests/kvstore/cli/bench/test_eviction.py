"""``kvstore bench eviction`` as people run it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvstore.catalog.policies import DEFAULT_POLICY, POLICIES, LeastRecentlyUsed
from kvstore.cli.bench import eviction_workloads
from kvstore.cli.bench.replay import hit_blocks
from kvstore.cli.bench.workloads import WORKLOADS
from kvstore.cli.main import EXIT_FAILED, EXIT_USAGE, main


def line(blocks: Any, **fields: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": blocks} | fields)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two prompts with a common head again and again, and pages that nobody wants twice between them."""
    lines = []
    for number in range(100):
        lines += [line([1, 2, 3]), line([1, 2, 4]), line([1000 + number])]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_json_has_every_policy_at_every_size_and_marks_the_default(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "eviction", str(trace), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["eviction"]
    assert {row["policy"] for row in rows} >= {"lru", "offline"}
    for policy in {row["policy"] for row in rows}:
        assert [row["size_percent"] for row in rows if row["policy"] == policy] == [1, 2, 5, 10, 20, 50]
    assert len({row["policy"] for row in rows if row["default"]}) == 1
    assert all(set(row) == {"policy", "size_percent", "hit_ratio", "default"} for row in rows)
    best = {row["size_percent"]: row["hit_ratio"] for row in rows if row["policy"] == "offline"}
    assert best[50] == pytest.approx((100 * 6 - 4) / 700), "all but the first use of four pages"
    assert all(row["hit_ratio"] <= best[row["size_percent"]] + 1e-9 for row in rows)


def test_the_table_names_policies_and_the_plot_is_svg(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    assert main(["bench", "eviction", str(trace), "--plot", str(plot)]) == 0
    answer = capsys.readouterr()
    assert "300 requests, 700 blocks, 104 of them different" in answer.out
    assert "(default)" in answer.out
    assert "offline" in answer.out
    assert not answer.err
    assert plot.read_text().startswith("<svg")
    assert plot.read_text().count("<polyline") == len(re.findall(r" 0\.\d{4}", answer.out)) // 6


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a request is a JSON object, got [1]"),
        (line("no"), 'line 2: hash_ids must be a list of numbers, got "no"'),
        (line([1, -2]), "line 2: hash_ids must hold numbers from 0 to 2^63 - 1, got -2"),
        (line([True]), "line 2: hash_ids must hold numbers from 0 to 2^63 - 1, got true"),
        (line([1, 1]), "line 2: hash_ids names a block twice"),
        (line([1], input_length=1.5), "line 2: input_length must be a number of tokens, got 1.5"),
        (line([1], timestamp=None), "line 2: timestamp must be a number of milliseconds, got null"),
        ('{"timestamp": 0, "input_length": 1, "hash_ids": []}', "line 2: output_length is missing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line([1]) + "\n" + bad + "\n")
    assert main(["bench", "eviction", str(path)]) == EXIT_USAGE
    answer = capsys.readouterr()
    assert f"{path}, {words}" in answer.err
    assert answer.err.count("\n") == 1
    assert not answer.out


def test_a_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("none", "No such file"), ("empty", "no request"), ("binary", "not UTF-8"), (".", "director")):
        assert main(["bench", "eviction", str(tmp_path / name)]) == EXIT_USAGE
        assert words in capsys.readouterr().err


def test_a_plot_that_cannot_be_written(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "eviction", str(trace), "--plot", str(tmp_path / "none" / "plot.svg")]) == EXIT_FAILED
    assert "the plot can't be written" in capsys.readouterr().err


def of_lru(workload: str, seed: int, percent: int) -> float:
    """A node's hits over LRU's, counted anew."""
    prompts = WORKLOADS[workload](60, seed)
    pages = max(1, len({block for prompt in prompts for block in prompt}) * percent // 100)
    plain, own = (hit_blocks(prompts, pages, policy) for policy in (LeastRecentlyUsed(), POLICIES[DEFAULT_POLICY]()))
    return own / plain if plain else 1.0 + own


def test_generated_workloads_show_the_worst_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_workloads, "REQUESTS", 60)
    monkeypatch.setattr(eviction_workloads, "SEEDS", range(3))
    assert main(["bench", "eviction", "--workloads", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["workloads"]
    assert [(row["workload"], row["size_percent"]) for row in rows] == [
        (workload, size) for workload in WORKLOADS for size in (1, 2, 5, 10, 20, 50)
    ]
    for row in rows:
        if row["size_percent"] in (10, 50):
            ratios = [of_lru(row["workload"], seed, row["size_percent"]) for seed in range(3)]
            assert row["of_lru"] == min(ratios) == ratios[row["seed"]]
    assert main(["bench", "eviction", "--workloads"]) == 0
    table = capsys.readouterr().out
    for row in rows:
        assert f"{row['of_lru']:.3f}" in table
    assert "60 requests a workload; hits of expected-reuse over LRU's, the worst of seeds 0 to 2" in table


@pytest.mark.parametrize("flags", [[], ["--workloads", "trace"], ["--workloads", "--plot", "plot.svg"]])
def test_a_trace_or_workloads(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["bench", "eviction", *flags]) == EXIT_USAGE
    assert "--workloads" in capsys.readouterr().err
