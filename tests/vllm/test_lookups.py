"""Requests that wait for kvstore's answer, get it too late, or may not use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import KINDS, answer, fill, only_on_disk
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until


@KINDS
def test_a_request_waits_for_its_answer_while_others_run(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node, tokens = node_process(), prompt(200)
    fill(start_loop, node, tokens, kind=kind)
    only_on_disk(node)
    loop = start_loop(node, kind=kind)
    other = loop.add("running", prompt(40, 1), max_tokens=200)
    run_until(loop, lambda: loop.tokens["running"])
    node.pause()
    loop.add("waiting", tokens)
    for _ in range(20):
        loop.step()
    assert loop.status("waiting") == "WAITING"
    assert not loop.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks.get("waiting")
    assert len(other.output_token_ids) >= 20
    node.resume()
    run_all(loop)
    assert loop.tokens["waiting"] == right_answer(tokens, 4)
    assert loop.tokens["running"] == right_answer(prompt(40, 1), 200)
    assert loop.computed["waiting"] == 200 % BLOCK_SIZE + 3
    assert loop.left_over() == []


def test_an_answer_that_does_not_come_in_time_is_a_miss(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node, tokens = node_process(), prompt(200)
    fill(start_loop, node, tokens)
    only_on_disk(node)
    loop = start_loop(node, extra={"lookup_budget_ms": 20, "store_deadline_ms": 200})
    node.pause()
    assert answer(loop, "missed", tokens) == 203
    assert loop.left_in_scheduler() == []
    node.resume()
    run_until(loop, lambda: not loop.left_over())


@KINDS
def test_answers_that_vllm_throws_away_leave_nothing_behind(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node, tokens = node_process(), prompt(200)
    fill(start_loop, node, tokens, kind=kind)
    loop = start_loop(node, kind=kind)
    # Log-probabilities of the prompt have to be computed, so nothing may be loaded.
    assert answer(loop, "scored", tokens, prompt_logprobs=1) == 203
    loop.reset_prefix_cache()
    assert answer(loop, "plain", tokens) == 200 % BLOCK_SIZE + 3
    assert loop.left_over() == []
