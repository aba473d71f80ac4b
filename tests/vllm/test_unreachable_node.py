"""Nodes that hang, die or were never there: every request ends, rightly, and its blocks come back."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import KINDS, WAYS, answer, answer_again, begin_load, fill, only_on_disk
from tests.vllm.loop import Loop, right_answer, run_all, run_until


def test_a_node_that_hangs_gives_blocks_back_at_the_deadline(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node = node_process()
    loop = start_loop(node, extra={"lookup_budget_ms": 20, "load_deadline_ms": 200, "store_deadline_ms": 200})
    answer(loop, "before", prompt(40, 1))
    node.pause()
    for seed in range(3):
        answer(loop, f"hung-{seed}", prompt(200, 10 + seed))
        assert loop.left_in_scheduler() == []
    node.resume()
    run_until(loop, lambda: not loop.left_over())


def test_when_no_block_is_free_nobody_waits_for_a_node_that_hangs(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node = node_process()
    loop = start_loop(node, num_blocks=18, extra={"lookup_budget_ms": 20, "store_deadline_ms": 3_600_000})
    loop.add("running", prompt(60, 1), max_tokens=300)  # 12 blocks in the end
    run_until(loop, lambda: loop.tokens["running"])
    node.pause()
    loop.add("held", prompt(200, 2), max_tokens=2)  # seven of 17
    run_until(loop, lambda: "held" in loop.finished)
    run_until(loop, lambda: "running" in loop.finished)
    assert loop.tokens["running"] == right_answer(prompt(60, 1), 300)
    assert "held" not in loop.scheduler.requests
    node.resume()
    run_all(loop)
    assert loop.left_over() == []


@KINDS
@WAYS
def test_a_node_that_is_killed_while_pages_are_loaded(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, options = node_process(), {"kind": kind, "extra": {"async_load": async_load, "load_deadline_ms": 2000}}
    tokens = prompt(200)
    fill(start_loop, node, tokens, **options)
    only_on_disk(node)
    loop = start_loop(node, **options)
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    node.signal(signal.SIGKILL)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.tokens["unlucky"] == right_answer(tokens, 4)
    assert loop.left_over() == []
    node.kill()
    node.start()
    run_until(loop, lambda: answer_again(loop, tokens) < 100)
    assert loop.left_over() == []


@KINDS
@WAYS
def test_a_node_that_was_never_there(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node = node_process(ready=False)
    loop = start_loop(node, kind=kind, extra={"async_load": async_load, "lookup_budget_ms": 20})
    assert answer(loop, "alone", prompt(200)) == 203
    assert loop.left_over() == []
    node.start()
    # It is found by itself, without a restart of the engine.
    run_until(loop, lambda: answer_again(loop, prompt(200)) < 100)
    assert loop.left_over() == []
