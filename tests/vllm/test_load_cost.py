"""Load or compute: what vLLM's scheduler does where loading would take longer, and what its metrics say was saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

from kvstore.connector.engine.load_cost import ENOUGH

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import answer, answer_again, begin_load, fill, only_on_disk
from tests.vllm.loop import BLOCK_SIZE, Loop, run_all
from tests.vllm.test_loop_metrics import metrics

LENGTH = 200
IN_FULL_BLOCKS = LENGTH // BLOCK_SIZE * BLOCK_SIZE
REST = LENGTH - IN_FULL_BLOCKS + 3
"""What is computed behind a hit, with the tokens of the answer but the last one."""
SLOW = 0.5
"""Seconds: the time that a load, or a prompt, takes where it is the slower one of the two."""


def test_pages_of_a_tier_that_is_slower_than_the_model_are_computed(
    start_loop: Callable[..., Loop], node_process: Callable[..., NodeProcess], prompt: Callable[..., list[int]]
) -> None:
    node = node_process()
    fill(start_loop, node, *(prompt(LENGTH, seed) for seed in range(ENOUGH + 1)))
    only_on_disk(node)
    loop = start_loop(node)
    for seed in range(ENOUGH):
        nothing = {"kvstore_load": False, "kvstore_store": False}
        assert answer(loop, f"computed-{seed}", prompt(LENGTH, 100 + seed), params=nothing) == LENGTH + 3
    for seed in range(ENOUGH):
        name = f"loaded-{seed}"
        loop.add(name, prompt(LENGTH, seed))
        planned = begin_load(loop, name)
        node.pause()
        loop.update(planned, loop.execute(planned))
        time.sleep(SLOW)
        node.resume()
        run_all(loop)
        assert loop.computed[name] == REST
    assert answer(loop, "declined", prompt(LENGTH, ENOUGH)) == LENGTH + 3
    told = metrics(loop)
    assert told["vllm:kvstore_loads_declined_total"] == 1
    assert told["vllm:kvstore_pages_loaded_total|disk"] == ENOUGH * IN_FULL_BLOCKS // BLOCK_SIZE
    assert told.get("vllm:kvstore_seconds_saved_total", 0.0) == 0.0


def test_what_loads_save_is_told_in_seconds(
    start_loop: Callable[..., Loop], node_process: Callable[..., NodeProcess], prompt: Callable[..., list[int]]
) -> None:
    loop = start_loop(node_process())
    forward = loop._forward

    def slowly(step: Any) -> list[list[int]]:
        time.sleep(SLOW * step.total_num_scheduled_tokens / LENGTH)
        return forward(step)

    loop._forward = slowly  # type: ignore[method-assign]
    prompts = [prompt(LENGTH, seed) for seed in range(ENOUGH)]
    for seed, each in enumerate(prompts):
        answer(loop, f"computed-{seed}", each)
    loop.reset_prefix_cache()
    for seed, each in enumerate(prompts):
        assert answer(loop, f"loaded-{seed}", each) == REST
    assert metrics(loop).get("vllm:kvstore_seconds_saved_total", 0.0) == 0.0  # how long a load takes was not known yet
    assert answer_again(loop, prompts[0]) == REST
    assert metrics(loop)["vllm:kvstore_seconds_saved_total"] > 0.0
