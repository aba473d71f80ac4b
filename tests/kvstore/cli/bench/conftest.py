"""What tests of benchmarks share."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folders_made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The temporary folders that this process makes during the test; other processes' benchmarks have theirs beside."""
    made: list[Path] = []
    make = tempfile.mkdtemp

    def record(*arguments: Any, **options: Any) -> str:
        made.append(Path(make(*arguments, **options)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", record)
    return made
