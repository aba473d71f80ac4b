"""``kvstore plan``, and the pass over a trace behind it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.catalog.policies import LeastRecentlyUsed
from kvstore.cli.bench.replay import hit_blocks
from kvstore.cli.bench.stack_distance import NEVER, needed_pages
from kvstore.cli.bench.workloads import WORKLOADS
from kvstore.cli.main import EXIT_FAILED, EXIT_USAGE, main

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_one_pass_says_what_replays_of_all_sizes_say(workload: str) -> None:
    prompts = WORKLOADS[workload](150, 7)
    needed = [pages for row in needed_pages(prompts, lambda done: None) for pages in row if pages != NEVER]
    longest = max(map(len, prompts))  # below, a replay can't keep what it has just stored
    for capacity in (longest, longest + 13, 2 * longest, 4 * longest, 10**6):
        hits = hit_blocks(prompts, capacity, LeastRecentlyUsed())
        assert sum(pages <= capacity for pages in needed) == hits


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Six prompts of four blocks in turn, ten times, a minute each: 24 blocks serve all but the first round."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as lines:
        for number in range(60):
            blocks = [number % 6 * 4 + place for place in range(4)]
            fields = {"timestamp": number * 60_000, "input_length": 350, "output_length": 1, "hash_ids": blocks}
            lines.write(json.dumps(fields) + "\n")
    return path


def plan(trace: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    blocks = ("--block-tokens", "100", "--page-bytes", "256MiB", "--prefill-rate", "1000")
    assert main(["plan", str(trace), "--json", *blocks, *flags]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_figures_are_right(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four blocks are one GiB; of a prompt's 350 tokens the last block has 50."""
    answer = plan(trace, capsys, "--arena", "5GiB")
    assert answer["block_bytes"] == 256 * MIB
    assert answer["blocks"] == 240
    arena, disk, redis = answer["tiers"]
    assert (arena["tier"], disk["tier"], redis["tier"]) == ("arena", "disk", "redis")
    assert arena["hit_ratio"] == 0, "a loop over more than there is"
    assert arena["more_hit_blocks"] == arena["more_from_this_tier"] == 54 * 4
    assert arena["more_prefill_seconds"] == pytest.approx(54 * 350 / 1000)
    for tier in (disk, redis):
        assert tier["more_hit_blocks"] == tier["more_from_this_tier"] == 0, "it would hold what the arena holds"
        assert tier["more_prefill_seconds"] == 0
    last = answer["curve"][-1]
    assert [point["bytes"] // GIB for point in answer["curve"]] == [1, 2, 4, 8]
    assert (last["hit_blocks"], last["hit_ratio"]) == (216, 0.9)


def test_more_arena_takes_hits_from_the_disk(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arena, disk, redis = plan(trace, capsys, "--arena", "5GiB", "--disk", "6GiB")["tiers"]
    assert (arena["hit_ratio"], disk["hit_ratio"], redis["hit_ratio"]) == (0, 0.9, 0)
    assert arena["more_hit_blocks"] == 0
    assert arena["more_from_this_tier"] == 216
    assert disk["more_from_this_tier"] == 0


def test_sizes_of_tiers_do_not_add_up(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page in the arena is on the disk too: what is on the disk, or what a GiB makes of it, must pass the arena."""
    arena, disk, redis = plan(trace, capsys, "--arena", "5GiB", "--disk", "4GiB", "--redis", "5GiB")["tiers"]
    assert [tier["hit_ratio"] for tier in (arena, disk, redis)] == [0, 0, 0]
    assert [tier["more_hit_blocks"] for tier in (arena, disk, redis)] == [216, 0, 216]
    assert [tier["more_from_this_tier"] for tier in (arena, disk, redis)] == [216, 0, 216]


def test_the_table_is_for_people(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plan.svg"
    assert main(["plan", str(trace), "--token-bytes", "1MiB", "--plot", str(plot)]) == 0
    answer = capsys.readouterr()
    assert "60 requests in 1.0 h, 240 blocks, 24 of them different; a block is 512 MiB" in answer.out
    assert "90.00%" in answer.out
    assert not answer.err
    assert plot.read_text().startswith("<svg")
    assert main(["plan", str(trace), "--plot", str(tmp_path / "none" / "x.svg")]) == EXIT_FAILED


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--block-tokens", "0"], "--block-tokens must be at least 1, got 0"),
        (["--prefill-rate", "0"], "--prefill-rate must be more than 0, got 0.0"),
        (["--prefill-rate", "nan"], "--prefill-rate must be more than 0, got nan"),
        (["--token-bytes", "0"], "a block of 0 bytes"),
        (["--arena", "much"], "not a size: 'much'"),
    ],
)
def test_what_cannot_be_is_said(trace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["plan", str(trace), *flags]) == EXIT_USAGE
    assert words in capsys.readouterr().err


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    assert main(["plan", str(path)]) == EXIT_USAGE
    assert f"{path}, line 1: input_length is missing" in capsys.readouterr().err
