"""Requests in a KV cache that is too small for all of them, or nearly: some load, and some are preempted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import ALL_KINDS, KINDS, WAYS, answer, fill
from tests.vllm.loop import Loop, right_answer, run_all

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


@KINDS
@WAYS
def test_hits_for_which_there_is_no_room_yet(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, extra = node_process(), {"async_load": async_load}
    prompts = [prompt(250, seed) for seed in range(3)]
    fill(start_loop, node, *prompts, kind=kind, extra=extra)
    # 17 blocks, or of two groups 35: one prompt has room at a time, or two.
    loop = start_loop(node, num_blocks=18 if kind == "full" else 36, kind=kind, extra=extra)
    for index, tokens in enumerate(prompts):
        loop.add(f"r{index}", tokens, max_tokens=10)
    run_all(loop)
    assert [loop.tokens[f"r{index}"] for index in range(3)] == [right_answer(tokens, 10) for tokens in prompts]
    assert all(loop.computed[f"r{index}"] < 100 for index in range(3))
    assert loop.left_over() == []


@KINDS
@WAYS
def test_preempted_requests(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, extra = node_process(), {"async_load": async_load}
    prompts = [prompt(60 + 20 * seed, seed) for seed in range(6)]
    fill(start_loop, node, *prompts[::2], kind=kind, extra=extra)
    loop = start_loop(node, num_blocks={"full": 24, "hybrid": 40, "states": 28}[kind], kind=kind, extra=extra)
    for index, tokens in enumerate(prompts):
        loop.add(f"r{index}", tokens, max_tokens=100)
    run_all(loop)
    assert [loop.tokens[f"r{index}"] for index in range(6)] == [right_answer(tokens, 100) for tokens in prompts]
    assert sum(request.num_preemptions for request in loop.requests.values()) > 0
    assert loop.left_over() == []
    again = start_loop(node, kind=kind, extra=extra)
    for index, tokens in enumerate(prompts):
        longer = [*tokens, *loop.tokens[f"r{index}"]]
        assert answer(again, f"again{index}", longer) < 100
    assert again.left_over() == []
