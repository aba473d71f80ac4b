"""Loads of several requests beside each other in a KV cache that is nearly too small for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.loop import Loop, right_answer, run_all
from tests.vllm.test_scheduler import ALL_KINDS, fill, start_loop

__all__ = ["start_loop"]  # a fixture

NUM_TOKENS = 300
"""Of each prompt: nine full blocks, which are loaded, and one for the rest."""


@ALL_KINDS
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "one by one"])
@pytest.mark.parametrize("num_blocks", [26, 36])
def test_requests_that_load_at_once_all_end(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    overlap: bool,
    num_blocks: int,
) -> None:
    """In a hybrid model each holds 12 blocks for its load, of 25, and needs two more; vLLM believes that it is one."""
    node = node_process()
    prompts = [prompt(NUM_TOKENS, seed) for seed in range(4)]
    fill(start_loop, node, *prompts, kind=kind)
    loop = start_loop(node, kind=kind, overlap=overlap, num_blocks=num_blocks, max_num_batched_tokens=96)
    for index, tokens in enumerate(prompts):
        loop.add(f"again-{index}", tokens)
    run_all(loop)
    for index, tokens in enumerate(prompts):
        assert loop.tokens[f"again-{index}"] == right_answer(tokens, 4)
        assert loop.computed[f"again-{index}"] == NUM_TOKENS % 32 + 3, "its load was given up"
    assert loop.left_over() == []
