"""What README.md shows of Python does what it says."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvstore

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_example_does_what_it_says(start_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "connect", partial(kvstore.connect, timeout=60.0))
    node = start_node(arena=64 << 20)
    example = README.read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(example.replace("/run/kvstore.sock", str(node.config.socket)), names)
    with names["client"]:
        moved = names["pages"].statistics()
        assert (moved.stored, moved.loaded) == (6, {"arena": 4})
        assert names["n"] == 4
    said = re.findall(r"# (?:StoreResult\(stored=)?(\d+)[:,]", example)
    assert said == ["6", "4", "4"]
