"""Benchmarks are scripts: they are run as such, or imported from their folder."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A benchmark's module, by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def printed_json() -> Callable[..., Any]:
    """Run a benchmark as a user does, with --json; what it prints. It must not fail."""

    def run(name: str, *arguments: str) -> Any:
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
