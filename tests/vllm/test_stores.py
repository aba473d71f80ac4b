"""What is stored, by whom, how long blocks are held for it, and what must not be stored."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import KINDS, answer
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until


@KINDS
def test_blocks_are_held_while_their_pages_are_copied_and_no_longer(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node = node_process()
    loop = start_loop(node, kind=kind, extra={"lookup_budget_ms": 20})  # nobody answers: all are misses
    answer(loop, "before", prompt(40, 1))
    node.pause()
    loop.add("held", prompt(200), max_tokens=2)
    run_until(loop, lambda: "held" in loop.finished)
    for _ in range(20):
        loop.step()
    held = "held" in loop.scheduler.requests
    loop.add("meanwhile", prompt(100, 2), max_tokens=2)
    run_until(loop, lambda: "meanwhile" in loop.finished)
    assert loop.tokens["meanwhile"] == right_answer(prompt(100, 2), 2)
    node.resume()
    run_all(loop)
    assert loop.left_over() == []
    if held:  # else the store was given up, or its bytes were copied before
        assert answer(start_loop(node, kind=kind), "again", prompt(200)) == 200 % BLOCK_SIZE + 3


def test_a_prefix_is_stored_when_it_was_seen_often_enough(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node, tokens = node_process(), prompt(200)
    loop = start_loop(node, extra={"store_threshold": 2})
    computed = []
    for turn in range(3):
        loop.reset_prefix_cache()
        computed.append(answer(loop, f"turn-{turn}", tokens))
    assert computed == [203, 203, 200 % BLOCK_SIZE + 3]
    assert loop.left_over() == []


def test_requests_that_turn_storing_or_loading_off(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node, tokens = node_process(), prompt(200)
    loop = start_loop(node)
    answer(loop, "private", tokens, params={"kvstore_store": False})
    loop.reset_prefix_cache()
    assert answer(loop, "public", tokens) == 203
    loop.reset_prefix_cache()
    assert answer(loop, "computes", tokens, params={"kvstore_load": False}) == 203
    loop.reset_prefix_cache()
    assert answer(loop, "loads", tokens) == 200 % BLOCK_SIZE + 3
    assert loop.left_over() == []


def test_a_pipeline_rank_that_is_never_asked_to_save_stores_all_the_same(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node, tokens = node_process(), prompt(200)
    loop = start_loop(node)
    loop.ends_saves = False
    loop.config.parallel_config.pipeline_parallel_size = 2
    answer(loop, "first", tokens, max_tokens=60)  # ends when its blocks are given back
    assert loop.left_over() == []
    longer = [*tokens, *loop.tokens["first"]]
    assert answer(start_loop(node), "again", longer) == 260 - 8 * BLOCK_SIZE + 3


def test_of_ranks_that_hold_the_same_one_stores(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    node, tokens = node_process(), prompt(200)
    loop = start_loop(node, kind="mla")
    monkeypatch.setattr(loop.config.parallel_config, "tensor_parallel_size", 2)
    replicated = copy.copy(loop.kv_cache_config)
    replicated.kv_tp_replicas = 2
    described = []
    for rank, stored in ((1, False), (0, True)):
        monkeypatch.setattr("kvstore.connector.vllm._tp_rank", lambda rank=rank: rank)
        loop.worker.shutdown()
        loop.worker = KVConnectorFactory.create_connector(loop.config, KVConnectorRole.WORKER, replicated)
        loop.worker.register_kv_caches(loop.caches)
        described.append(loop.worker.get_handshake_metadata())
        loop.reset_prefix_cache()
        answer(loop, f"by rank {rank}", tokens)
        other = start_loop(node, kind="mla")
        found = answer(other, "again", tokens, params={"kvstore_store": False}) < 203
        assert found is stored
        assert loop.left_over() == other.left_over() == []
    assert described[0] == described[1] is not None


def test_what_a_step_that_failed_was_to_compute_is_not_stored(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(step: Any) -> None:
        raise RuntimeError("out of memory")

    node, tokens = node_process(), prompt(200)
    loop = start_loop(node)
    loop.add("first", tokens)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run_until(loop, lambda: False)
    loop.close()  # waits for stores
    assert answer(start_loop(node), "again", tokens) == 203


@pytest.mark.parametrize(("fails", "ranks"), [("bind_connector_metadata", 2), ("_forward", 2), ("_check_doubtful", 1)])
def test_nor_where_vllm_leaves_that_step_without_an_end(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    ranks: int,
) -> None:
    """Before the forward pass, in it, and behind it on the last rank, which may draft there."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    node, tokens = node_process(), prompt(200)
    loop = start_loop(node)
    loop.config.parallel_config.pipeline_parallel_size = ranks
    loop.ends_saves = False
    loop.add("first", tokens)
    while "first" not in (step := loop.schedule()).num_scheduled_tokens:  # kvstore is asked
        loop.update(step, loop.execute(step))
    with monkeypatch.context() as patch:
        patch.setattr(loop if hasattr(loop, fails) else loop.worker, fails, fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.execute(step)
        loop.abort("first")
        with suppress(RuntimeError):
            loop.step()  # has nothing to compute, and gives the request's blocks back
    run_all(loop)
    assert loop.left_over() == []
    loop.close()  # waits for stores
    assert answer(start_loop(node), "again", tokens) == 203
