from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvstore.cli.progress import Progress


def test_a_burst_fills_the_arena_and_reaches_the_disk(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    users = script("users")
    monkeypatch.setattr(users, "ARENA", 8 << 20)
    monkeypatch.setattr(users, "BURST", 24 << 20)
    monkeypatch.setattr(users, "PACED_SECONDS", 0.01)
    source = np.ones(4 << 20, np.uint8)

    burst, paced = users.measure_shape(tmp_path, 8, 64 << 10, 1, source, Progress("users", 1))

    assert burst.gbps > 0
    assert burst.disk_gbps > 0
    assert 0 <= burst.overrun < 1
    assert (paced.pages, paced.page_bytes) == (8, 64 << 10)
    assert paced.p50_ms > 0
