"""What is run on a new device: its steps are short enough, end alone, and give no figures of a detour."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]
FIGURES = "import json; print(json.dumps({'device': 'cpu', 'pin': [{'skipped': 'no device'}]}))"


@pytest.fixture
def module(script: Script) -> ModuleType:
    return script("device_run")


@pytest.fixture
def run(module: ModuleType, tmp_path: Path) -> Iterator[Any]:
    with (tmp_path / "A.log").open("w") as log:
        yield module.Run(tmp_path, "A", log, dry=False)


@pytest.mark.parametrize("part", ["A", "B", "C"])
def test_a_part_ends_within_ten_minutes_and_asks_first_whether_memory_can_be_registered(
    module: ModuleType, part: str
) -> None:
    steps = module.PARTS[part]

    assert sum(step.seconds for step in steps) <= 590
    assert [step.name for step in steps if step.name != "machine"][:2] == ["registering", "tests"]
    files = {argument for argument in module.EVERY_TEST.command if argument.endswith(".py")}
    assert {Path(file).name for file in files} >= {"test_cuda.py", "test_cudart.py", "test_mixed.py"}


def test_a_step_that_fails_or_hangs_ends_alone(
    module: ModuleType, run: Any, tmp_path: Path, eventually: Callable[[Callable[[], object]], None]
) -> None:
    mark = str(tmp_path / "child")  # its child, which holds this file open, must not outlive it
    child = [sys.executable, "-c", "import sys, time; file = open(sys.argv[1], 'w'); time.sleep(900)", mark]
    hang = f"import subprocess; print('before', flush=True); subprocess.run({child})"

    run.step(module.Step("failing", 30, (sys.executable, "-c", "print('why'); raise SystemExit(3)")))
    run.step(module.Step("hanging", 3, (sys.executable, "-c", hang)))
    run.step(module.Step("good", 30, (sys.executable, "-c", "print('all right')")))

    assert run.outcomes == {
        "failing": "failed: it ended with 3",
        "hanging": "failed: it lasted longer than 3 s",
        "good": "done",
    }
    assert {"why", "before", "all right"} <= {*(tmp_path / "A.log").read_text().splitlines()}
    eventually(lambda: not _open_in_a_process(mark))


def _open_in_a_process(path: str) -> bool:
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(descriptor.readlink()) == path:
                return True
    return False


@pytest.mark.parametrize(("code", "outcome"), [(0, "done"), (1, "skipped: memory can't be registered")])
def test_figures_are_kept_where_memory_can_be_registered(
    module: ModuleType, run: Any, tmp_path: Path, code: int, outcome: str
) -> None:
    run.step(module.Step("registering", 30, (sys.executable, "-c", f"raise SystemExit({code})")))
    run.step(module.Step("pin", 30, (sys.executable, "-c", FIGURES), figures=True))

    assert run.outcomes["pin"].startswith(outcome)
    kept = tmp_path / "A.json"
    assert (json.loads(kept.read_text()) if kept.exists() else None) == (
        {"device": "cpu", "pin": [{"skipped": "no device"}]} if code == 0 else None
    )


def test_without_the_sanitizer_its_step_says_so(
    module: ModuleType, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (step,) = (each for each in module.PARTS["A"] if each.name == "sanitizer")

    run.step(step)

    assert run.outcomes == {"sanitizer": "skipped: compute-sanitizer is not installed"}


def test_a_part_writes_its_log_and_its_figures_where_it_is_told(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patient = replace(module.REGISTERING, seconds=300), module.figures("arena", 300)  # however busy the machine is
    monkeypatch.setitem(module.PARTS, "B", patient)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["device_run.py", "B", "--dry-run"])

    assert module.main() == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["B.json", "B.log"]
    assert "arena" in json.loads((tmp_path / "B.json").read_text())
    assert "registering: done\narena: done\n" in capsys.readouterr().out
