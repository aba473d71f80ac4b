"""Every order of the KV memory that vLLM has: the same pages, stored from one and loaded into another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

from tests.vllm.engine import PATIENT, transfer_config


def test_pages_of_one_layout_are_found_by_engines_of_the_others(
    node: NodeProcess,
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    pytest.importorskip("vllm.v1.kv_cache_layout", reason="vLLM 0.31 has no other order for CPUs")
    first, second = prompt(200, 1), prompt(333, 2)
    expected = plain([first, second]).tokens
    transfer = transfer_config(node.url, **PATIENT) | {
        "kv_connector": "ConnectorOfEveryLayout",
        "kv_connector_module_path": "tests.vllm.every_layout",
    }
    hits = []
    for layout, blocks in (("LHBNC", 64), ("BHLNC", 80), ("LBHNC", 64), ("BLHNC", 64), ("LHBNC", 96)):
        environment = {"VLLM_KV_CACHE_LAYOUT": layout}
        with start_engine(transfer=transfer, environment=environment, num_gpu_blocks_override=blocks) as engine:
            assert f"Using {layout} KV cache layout" in engine.printed()
            answers = engine.run([first, second] if hits else [first])
            assert answers.tokens == expected[: len(answers.tokens)]
            hits.append(answers.external_hits)
            engine.drain()

    assert hits == [0, 192, 192 + 320, 192 + 320, 192 + 320]
