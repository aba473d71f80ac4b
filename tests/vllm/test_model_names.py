"""One model's weights under two folders' names: what an engine stored by one of them, an engine by the other loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_process import NodeProcess

import kvstore
from tests.vllm.engine import EngineProcess


def test_a_second_name_of_the_model_loads_what_the_first_one_stored(
    node: NodeProcess,
    transfer: dict[str, Any],
    models: Callable[[str], Path],
    prompt: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    first, second = models("llama"), tmp_path / "another-name"
    second.symlink_to(first)
    tokens = prompt(200)
    with EngineProcess(first, tmp_path / "first.log", transfer=transfer) as engine:
        expected = engine.run([tokens])
    with EngineProcess(second, tmp_path / "second.log", transfer=transfer) as engine:
        again = engine.run([tokens])
    assert again.tokens == expected.tokens
    assert again.external_hits == 192
    with kvstore.connect(node.url) as client:
        [namespace] = client.status().namespaces
    assert namespace.labels == (first.name, "another-name")
    assert namespace.name.startswith(f"{first.name}@")
