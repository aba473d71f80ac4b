from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstore.connector.reference import demo
from kvstore.connector.reference.demo import DemoSize, run_demo
from kvstore.connector.reference.demo_processes import NodeProcess, run_job
from kvstore.connector.reference.jobs import Job, JobResult, Prompt
from kvstore.errors import FormatError, UnavailableError

SMALL = DemoSize(
    arena="1MiB",
    block_tokens=32,
    model={"hidden_size": 128, "intermediate_size": 192, "num_layers": 3, "num_heads": 8, "num_kv_heads": 2},
)


def test_the_whole_way_holds_with_a_small_model(tmp_path: Path) -> None:
    progress = io.StringIO()

    report = run_demo(Console(file=progress), SMALL)

    assert report.failures() == []
    assert report.identical
    first, second, third = report.engines
    assert first.total("tokens_loaded") == 0
    for each in (second, third):
        assert each.total("tokens_loaded") > 5 * each.total("tokens_computed")
    as_json = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert as_json["identical"] is True
    lines = progress.getvalue().splitlines()
    assert sum(line.startswith("engine") for line in lines) == 5
    assert "\x1b" not in progress.getvalue()


def test_an_engine_process_without_its_node_answers_all_the_same(tmp_path: Path) -> None:
    prompt = Prompt("only", tuple(range(100)))
    job = Job(runs=((prompt,),), url=f"unix://{tmp_path}/no.sock", max_tokens=3, model=SMALL.model)
    said: list[str] = []

    result = run_job(job, tmp_path / "log", said.append)

    (answer,) = result.runs[0].answers
    assert (len(answer.token_ids), answer.tokens_computed, answer.tokens_loaded) == (3, 102, 0)
    assert said[0] == "answered"


def test_an_engine_process_that_fails_says_why(tmp_path: Path) -> None:
    job = Job(runs=((Prompt("bad", (1, 99_999)),),), model=SMALL.model)

    with pytest.raises(UnavailableError, match=r"exit code 1:\n.*request bad: token ids must lie between 0 and 2047"):
        run_job(job, tmp_path / "log", lambda line: None)


def test_a_node_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"did not start:\n.*arena is 1 bytes"):
        NodeProcess(
            socket=tmp_path / "sock", arena_dir=tmp_path / "arena", arena="1", disk=tmp_path / "disk", disk_limit="1MiB"
        )


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert demo.main([]) == 1

    assert "pip install 'kvstore-offload[engine]'" in capsys.readouterr().err


@pytest.mark.parametrize("error", [UnavailableError("the node is gone"), FormatError("not the result")])
def test_a_process_that_does_not_do_its_part_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)

    assert demo.main(["--json"]) == 1

    printed = capsys.readouterr()
    assert str(error) in printed.err
    assert printed.out == ""


def test_jobs_and_results_survive_json() -> None:
    job = Job(runs=((Prompt("a", (1, 2)), Prompt("b", (3,))), ()), url="unix:///x", model={"seed": 3})

    assert Job.from_json(job.to_json()) == job
    with pytest.raises(FormatError, match="not a job"):
        Job.from_json('{"runs": [[{"name": "a"}]]}')
    with pytest.raises(FormatError, match="not the result"):
        JobResult.from_json("answered")
