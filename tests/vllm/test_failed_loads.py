"""Pages that were there when the scheduler asked, and are gone when they are loaded: they are computed instead."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

import kvstore

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import ALL_KINDS, KINDS, WAYS, answer, begin_load, drop, fill, only_on_disk
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until


@ALL_KINDS
@WAYS
def test_pages_that_are_gone_when_they_are_loaded_are_computed(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, extra, tokens = node_process(), {"async_load": async_load}, prompt(200)
    fill(start_loop, node, tokens, kind=kind, extra=extra)
    loop = start_loop(node, kind=kind, extra=extra)
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    drop(node)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.load_failures > 0
    assert loop.finished["unlucky"] == "length"
    assert loop.tokens["unlucky"] == right_answer(tokens, 4)
    assert answer(loop, "next", tokens) == 200 % BLOCK_SIZE + 3
    assert loop.left_over() == []
    # What was computed instead is in kvstore again.
    assert answer(start_loop(node, kind=kind, extra=extra), "again", tokens) == 200 % BLOCK_SIZE + 3


@KINDS
def test_several_failed_loads_that_do_not_all_have_room_to_be_computed(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node, prompts = node_process(), [prompt(350, seed) for seed in range(2)]
    fill(start_loop, node, *prompts, kind=kind)
    only_on_disk(node)
    # A window takes fewer blocks to load than to compute: 29 are enough for both loads, and not for one request to be
    # computed while the other one holds what it loaded.
    loop = start_loop(node, kind=kind, num_blocks=30, max_num_batched_tokens=96)
    for index, tokens in enumerate(prompts):
        loop.add(f"r{index}", tokens)
    planned = begin_load(loop, "r0")
    node.pause()
    loop.update(planned, loop.execute(planned))
    run_until(loop, lambda: loop.status("r1") == "WAITING_FOR_REMOTE_KVS")
    node.signal(signal.SIGKILL)
    run_all(loop)
    assert loop.load_failures > 1
    assert [loop.tokens[f"r{index}"] for index in range(2)] == [right_answer(tokens, 4) for tokens in prompts]
    assert loop.left_over() == []


@WAYS
def test_the_head_of_a_load_whose_tail_is_gone_is_kept(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    async_load: bool,
) -> None:
    node, extra, tokens = node_process(), {"async_load": async_load}, prompt(200)
    fill(start_loop, node, tokens, extra=extra)
    loop = start_loop(node, extra=extra)
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    drop(node, kvstore.hash_blocks(tokens, BLOCK_SIZE)[3:6])
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.load_failures == 3
    assert loop.tokens["unlucky"] == right_answer(tokens, 4)
    # The step of a synchronous load computes on what is not there, and counts for nothing.
    wasted = 0 if async_load else 200 % BLOCK_SIZE
    assert loop.computed["unlucky"] == 200 - 3 * BLOCK_SIZE + 3 + wasted
    assert loop.left_over() == []


@WAYS
def test_with_vllms_own_policy_a_failed_load_fails_the_request(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    async_load: bool,
) -> None:
    node, extra, tokens = node_process(), {"async_load": async_load, "load_failure_policy": "keep"}, prompt(200)
    fill(start_loop, node, tokens, extra=extra)
    loop = start_loop(node, extra=extra)
    assert not loop.scheduler.recompute_kv_load_failures
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    drop(node)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.finished["unlucky"] == "error"
    assert loop.left_over() == []


def test_by_default_vllm_computes_what_could_not_be_loaded(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any]
) -> None:
    assert start_loop(node_process()).scheduler.recompute_kv_load_failures


@pytest.mark.parametrize("params", [None, {"kvstore_load": False}], ids=["loads", "does not load"])
def test_what_a_failed_load_left_in_shared_blocks_is_stored_by_nobody(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    params: dict[str, Any] | None,
) -> None:
    node, extra, tokens = node_process(), {"async_load": False}, prompt(200)
    fill(start_loop, node, tokens, extra=extra)
    loop = start_loop(node, extra=extra)
    loop.add("loads", tokens)
    loop.add(
        "shares", tokens, params=params
    )  # in the same step: vLLM lets it have the blocks that are just being loaded
    step = begin_load(loop, "loads")
    drop(node)
    loop.update(step, loop.execute(step))
    run_all(loop)
    assert loop.load_failures > 0
    assert loop.tokens["loads"] == loop.tokens["shares"] == right_answer(tokens, 4)
    assert answer(start_loop(node, extra=extra), "again", tokens) < 203  # what it loads is right
