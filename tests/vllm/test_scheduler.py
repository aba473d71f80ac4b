"""vLLM's real scheduler and both halves of the connector on a real node; only the model is made up (``loop.py``).

Each test ends with nothing held: every block free, nothing in a dictionary of scheduler or connector.
"""

from __future__ import annotations

import copy
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.layout import Layout

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.engine import transfer_config
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until

PATIENT = 20_000
"""Milliseconds that never pass in a test."""

KINDS = pytest.mark.parametrize("kind", ["full", "hybrid", "states"])
ALL_KINDS = pytest.mark.parametrize("kind", ["full", "mla", "unlike", "hybrid", "window", "states", "recurrent"])
WAYS = pytest.mark.parametrize("async_load", [True, False], ids=["async", "sync"])


@pytest.fixture
def start_loop(models: Callable[[str], Path]) -> Iterator[Callable[..., Loop]]:
    """Start an engine on a node; ``extra`` goes into ``kv_connector_extra_config``."""
    loops: list[Loop] = []

    def start(node: Any, *, extra: dict[str, Any] | None = None, **options: Any) -> Loop:
        deadlines = {"lookup_budget_ms": PATIENT, "load_deadline_ms": PATIENT, "store_deadline_ms": PATIENT}
        loop = Loop(models("llama"), transfer_config(node.url, **(deadlines | (extra or {}))), **options)
        loops.append(loop)
        return loop

    yield start
    for loop in loops:
        loop.close()


def answer(loop: Loop, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> int:
    """Have a request answered, rightly. Returns how many tokens were computed for it."""
    loop.add(request_id, prompt, max_tokens=max_tokens, **fields)
    run_all(loop)
    assert loop.finished[request_id] == "length"
    assert loop.tokens[request_id] == right_answer(prompt, max_tokens)
    return loop.computed[request_id]


def fill(start_loop: Callable[..., Loop], node: Any, *prompts: Sequence[int], **options: Any) -> None:
    """Have an engine of its own compute and store prompts, and end."""
    loop = start_loop(node, **options)
    for index, prompt in enumerate(prompts):
        answer(loop, f"first-{index}", prompt)
    assert loop.left_over() == []
    loop.close()


def drop(node: Any, hashes: Sequence[bytes] | None = None) -> None:
    """Drop pages from the node: those of these hashes in every namespace, or all."""
    with kvstore.connect(node.url, timeout=30.0) as client:
        for each in client.status().namespaces:
            namespace = client.namespace(Layout.from_json(each.layout))
            if hashes is None:
                namespace.clear()
            else:
                assert namespace.evict(hashes) == len(hashes)


def answer_again(loop: Loop, prompt: Sequence[int]) -> int:
    """Have a prompt answered that the engine itself has forgotten."""
    loop.reset_prefix_cache()
    return answer(loop, f"again-{len(loop.requests)}", prompt)


def begin_load(loop: Loop, request_id: str) -> Any:
    """Step until a step loads pages for a request. Returns that step, not executed yet."""
    for _ in range(10_000):
        planned = loop.schedule()
        if loop.status(request_id) != "WAITING":
            return planned
        loop.update(planned, loop.execute(planned))
    raise AssertionError(f"{request_id} still waits")


def only_on_disk(node: Any) -> None:
    """Leave the node's pages on disk alone: what asks for them must ask the node, and wait for I/O."""
    with kvstore.connect(node.url, timeout=30.0) as client:
        client.flush()
    assert node.terminate() == 0
    shutil.rmtree(node.arena_folder)
    node.start()


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


@KINDS
def test_aborted_while_it_waits_for_its_lookup(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node, tokens = node_process(), prompt(200)
    fill(start_loop, node, tokens, kind=kind)
    only_on_disk(node)
    loop = start_loop(node, kind=kind)
    node.pause()
    loop.add("aborted", tokens)
    loop.step()
    assert loop.status("aborted") == "WAITING"
    loop.abort("aborted")
    loop.step()
    node.resume()
    run_all(loop)
    assert answer(loop, "next", tokens) == 200 % BLOCK_SIZE + 3
    assert loop.left_over() == []


@KINDS
def test_aborted_while_its_pages_are_loaded(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node, tokens = node_process(), prompt(200)
    fill(start_loop, node, tokens, kind=kind)
    only_on_disk(node)
    loop = start_loop(node, kind=kind)
    loop.add("aborted", tokens)
    planned = begin_load(loop, "aborted")
    node.pause()
    loop.update(planned, loop.execute(planned))
    loop.step()
    loop.abort("aborted")
    for _ in range(20):
        loop.step()
    assert loop.blocks_of("aborted")[0], "blocks were given back while a load may write to them"
    node.resume()
    run_all(loop)
    assert loop.left_over() == []
    assert answer(loop, "next", tokens) == 200 % BLOCK_SIZE + 3


@KINDS
@WAYS
def test_aborted_while_it_runs(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    async_load: bool,
) -> None:
    node, options = node_process(), {"kind": kind, "extra": {"async_load": async_load}}
    loop = start_loop(node, max_num_batched_tokens=64, **options)
    for steps in (1, 2, 5, 8):
        name = f"aborted-{steps}"
        loop.add(name, prompt(200, steps), max_tokens=50)
        run_until(loop, lambda name=name: loop.status(name) == "RUNNING")
        for _ in range(steps):
            loop.step()
        assert loop.status(name) == "RUNNING"
        loop.abort(name)
    run_all(loop)
    assert loop.left_over() == []
    for steps in (1, 2, 5, 8):
        answer(loop, f"whole-{steps}", prompt(200, steps))
    assert loop.left_over() == []


@KINDS
def test_blocks_are_held_while_their_pages_are_copied_and_no_longer(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    node = node_process()
    loop = start_loop(node, kind=kind)
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
        monkeypatch.setattr("connector.vllm._tp_rank", lambda rank=rank: rank)
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
