"""Data parallelism: the engines of one server have one model, and share its pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore

vllm = pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")


def test_what_one_engine_of_a_server_computed_the_other_one_loads(
    node: NodeProcess,
    transfer: dict[str, Any],
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
    eventually: Callable[..., None],
) -> None:
    server = start_server(transfer=transfer, flags=("--data-parallel-size", "2"))
    with kvstore.connect(node.url, timeout=60.0) as client:
        for first in (0, 1):
            tokens = prompt(300, first)
            expected = server.answer(tokens, replica=first)
            # Behind the prompt's full blocks come no generated ones that are full.
            eventually(
                lambda first=first: sum(each.arena_pages for each in client.status().namespaces) == 9 * (first + 1)
            )
            assert server.answer(tokens, replica=1 - first) == expected
            hits = [
                float(line.rpartition(" ")[2])
                for engine in ("0", "1")
                for line in server.metrics().splitlines()
                if line.startswith(f'vllm:external_prefix_cache_hits_total{{engine="{engine}"')
            ]
            assert hits == ([0, 288] if first == 0 else [288, 288])
        assert len(client.status().namespaces) == 1
        halves = {f"vLLM {vllm.__version__} {half}" for half in ("scheduler", "worker rank 0")}
        assert {each.name for each in client.status().connected} == halves | {f"{half} of replica 1" for half in halves}
    server.stop()
