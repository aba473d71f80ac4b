"""What vLLM asks of the connector when it falls asleep and wakes up, from 0.33 on: memory goes, layouts come again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import answer, answer_again
from tests.vllm.loop import BLOCK_SIZE, Loop, run_all, run_until


@pytest.mark.parametrize("ends_saves", [True, False])
def test_memory_that_is_taken_away_is_stored_before_and_loaded_into_afterwards(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    ends_saves: bool,
) -> None:
    """As vLLM's workers do it when they fall asleep and wake up, from 0.33 on. Also where a step's stores begin with
    the next one."""
    node, tokens = node_process(), prompt(200)
    loop = start_loop(node)
    if not ends_saves:
        loop.ends_saves = False
        loop.config.parallel_config.pipeline_parallel_size = 2
    loop.add("first", tokens, max_tokens=50)
    run_until(loop, lambda: loop.tokens["first"] != [])
    loop.worker.unregister_kv_caches()
    for cache in loop.caches.values():
        cache.fill_(-1.0)
    assert answer(start_loop(node), "elsewhere", tokens) == 203 - 6 * BLOCK_SIZE
    loop.worker.restore_kv_caches()
    loop.abort("first")
    run_all(loop)
    assert answer_again(loop, tokens) == 203 - 6 * BLOCK_SIZE
    answer(loop, "other", prompt(200, 1))
    assert answer_again(loop, prompt(200, 1)) == 203 - 6 * BLOCK_SIZE
    assert loop.left_over() == []


def test_an_engine_that_is_told_its_layouts_again_finds_nothing_older(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    """vLLM does so when it wakes up, from 0.33 on, after a reset: the weights may be others."""
    loop, tokens = start_loop(node_process()), prompt(200)
    answer(loop, "first", tokens)
    assert loop.scheduler.reset_prefix_cache(reset_connector=True)
    loop.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): loop.worker.get_handshake_metadata()})
    assert answer(loop, "again", tokens) == 203
    assert answer_again(loop, tokens) == 203 - 6 * BLOCK_SIZE
