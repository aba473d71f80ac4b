"""What is loaded instead of computed, in each kind of model: all that is there, and the answer stays right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import ALL_KINDS, KINDS, WAYS, answer, fill
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until


@ALL_KINDS
@WAYS
def test_an_engine_loads_what_another_one_computed(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, extra = node_process(), {"async_load": async_load}
    prompts = [prompt(length, length) for length in (200, 100, 333)]
    fill(start_loop, node, *prompts, kind=kind, extra=extra)
    loop = start_loop(node, kind=kind, extra=extra)
    for index, tokens in enumerate(prompts):
        assert answer(loop, f"again-{index}", tokens) == len(tokens) % BLOCK_SIZE + 3
    assert loop.load_failures == 0
    assert loop.left_over() == []


@pytest.fixture
def keeps_a_state_before_the_last_block(models: Callable[[str], Path], prompt: Callable[..., list[int]]) -> bool:
    """Whether vLLM by itself, computing a prompt of whole blocks, stops where the same prompt can go on from.

    Some releases compute it in one go: then there is no such state, and nothing to store.
    """
    loop, tokens = Loop(models("llama"), None, kind="states"), prompt(6 * BLOCK_SIZE)
    answer(loop, "first", tokens)
    computed = answer(loop, "again", tokens)
    loop.close()
    return computed < len(tokens)


@KINDS
@WAYS
def test_a_prompt_that_is_there_to_its_last_token(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
    keeps_a_state_before_the_last_block: bool,
) -> None:
    node, extra, tokens = node_process(), {"async_load": async_load}, prompt(6 * BLOCK_SIZE)
    fill(start_loop, node, tokens, kind=kind, extra=extra)
    loop = start_loop(node, kind=kind, extra=extra)
    computed = answer(loop, "again", tokens)
    if kind != "states" or keeps_a_state_before_the_last_block:
        # The last token has to be computed, for the one that follows it: alone at best, with its block at worst.
        assert computed <= BLOCK_SIZE + 3
    else:  # there is a state behind the last token alone, and only what is longer goes on from it
        assert computed == len(tokens) + 3
        loop.reset_prefix_cache()
        assert answer(loop, "longer", [*tokens, 7, 7, 7]) == 3 + 3
    assert loop.left_over() == []


@ALL_KINDS
def test_what_decoding_filled_is_loaded_by_the_next_turn(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node, tokens = node_process(), prompt(50)
    first = start_loop(node, kind=kind)
    answer(first, "turn-1", tokens, max_tokens=60)
    longer = [*tokens, *first.tokens["turn-1"], 7, 7, 7]
    second = start_loop(node, kind=kind)
    # KV of 109 tokens was computed: the last one that is answered has none.
    assert answer(second, "turn-2", longer) == len(longer) - 3 * BLOCK_SIZE + 3
    assert first.left_over() == second.left_over() == []


@KINDS
@WAYS
def test_local_blocks_first_and_the_rest_from_kvstore(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, extra, tokens = node_process(), {"async_load": async_load}, prompt(300)
    fill(start_loop, node, tokens, kind=kind, extra=extra)
    loop = start_loop(node, kind=kind, extra=extra)
    answer(loop, "head", tokens[: 4 * BLOCK_SIZE + 5])
    assert answer(loop, "whole", tokens) == 300 % BLOCK_SIZE + 3
    assert loop.left_over() == []


@KINDS
@WAYS
def test_prompts_longer_than_a_step(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, options = (
        node_process(),
        {"kind": kind, "max_num_batched_tokens": 64, "extra": {"async_load": async_load}},
    )
    tokens = prompt(300)
    fill(start_loop, node, tokens[:200], **options)
    loop = start_loop(node, **options)
    assert answer(loop, "longer", tokens) == 300 - 6 * BLOCK_SIZE + 3
    assert answer(start_loop(node, **options), "again", tokens) == 300 % BLOCK_SIZE + 3
    assert loop.left_over() == []


def test_steps_that_overlap_load_asynchronously_whatever_is_set(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    """vLLM believes the tokens of a step that was planned before it was told that a load had failed."""
    node, tokens = node_process(), prompt(200)
    fill(start_loop, node, tokens)
    loop = start_loop(node, extra={"async_load": False}, overlap=True)
    loop.add("again", tokens)
    run_until(loop, lambda: loop.status("again") == "WAITING_FOR_REMOTE_KVS")
    run_all(loop)
    assert loop.tokens["again"] == right_answer(tokens, 4)
