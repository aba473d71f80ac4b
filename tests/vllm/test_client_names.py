"""A node's status says which part of which engine is connected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node_process import NodeProcess

import kvstore


def test_the_engines_halves_by_name(
    node: NodeProcess, transfer: dict[str, Any], start_engine: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    import vllm

    with start_engine(transfer=transfer) as engine, kvstore.connect(node.url) as client:
        engine.run([prompt(100)], max_tokens=4)
        named = {each.name for each in client.status().connected}
    assert named == {f"vLLM {vllm.__version__} scheduler", f"vLLM {vllm.__version__} worker rank 0"}
