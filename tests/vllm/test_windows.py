"""Blocks that a window has passed: vLLM takes them back while their request goes on, stored or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.layout import Layout

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.engine import PATIENT, transfer_config
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all

LENGTH = 480


@pytest.fixture
def start_loop(models: Callable[[str], Path], runner: str) -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def start(node: Any, **options: Any) -> Loop:
        options = {"max_num_batched_tokens": 160, "runner": runner} | options
        loops.append(Loop(models("llama"), transfer_config(node.url, **PATIENT), **options))
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


def answer(loop: Loop, name: str, tokens: list[int], max_tokens: int = 4) -> int:
    """Have a prompt answered, rightly. Returns how many tokens were computed."""
    loop.add(name, tokens, max_tokens=max_tokens)
    run_all(loop)
    assert loop.tokens[name] == right_answer(tokens, max_tokens)
    assert loop.left_over() == []
    return int(loop.computed[name])


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_those_that_vllm_remembers_are_stored_while_nobody_needs_them(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]], kind: str
) -> None:
    node, tokens = node_process(), prompt(LENGTH)
    # A step computes more than a window. Each has blocks of its own, and what is freed is at the end of the queue.
    loop = start_loop(node, kind=kind, num_blocks=100, prefix_cache_retention_interval=BLOCK_SIZE)
    answer(loop, "first", tokens)
    for shared in (160, 256, 384):  # prompts that leave it in the middle
        loop.reset_prefix_cache()
        assert answer(loop, f"shares {shared}", [*tokens[:shared], *prompt(40, shared)]) == 40 + 3
    assert loop.worker._worker.statistics().pages_dropped == 0


@pytest.mark.parametrize(("kind", "groups", "num_blocks"), [("hybrid", 2, 30), ("window", 1, 12)])
def test_one_that_is_needed_before_is_given_up_and_counted(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    groups: int,
    num_blocks: int,
) -> None:
    node = node_process()
    loop = start_loop(node, kind=kind, num_blocks=num_blocks)
    prompts = [prompt(LENGTH, seed) for seed in range(3)]
    for seed, tokens in enumerate(prompts):
        answer(loop, f"first {seed}", tokens)
    counts = loop.worker._worker.statistics()
    kept = counts.pages_stored + counts.pages_present
    assert kept + counts.pages_dropped == groups * len(prompts) * LENGTH // BLOCK_SIZE
    with kvstore.connect(node.url, timeout=60.0) as client:
        known = [client.namespace(Layout.from_json(each.layout)) for each in client.status().namespaces]
        hashes = [kvstore.hash_blocks(tokens, BLOCK_SIZE) for tokens in prompts]
        there = sum(sum(namespace.lookup(each).present) for namespace in known for each in hashes)
    assert there >= kept
    other = start_loop(node, kind=kind, num_blocks=100)
    for seed, tokens in enumerate(prompts):
        answer(other, f"again {seed}", tokens)
