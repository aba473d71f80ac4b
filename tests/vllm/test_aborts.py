"""Requests that are aborted: before their load, in it and behind it, while they run, and beside others that go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import ALL_KINDS, KINDS, WAYS, answer, begin_load, drop, fill, only_on_disk
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until

NUM_TOKENS = 300
"""Of each prompt: nine full blocks, which are loaded, and one for the rest."""
OWN = NUM_TOKENS % BLOCK_SIZE + 3
"""Tokens that are computed behind a load."""


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


@ALL_KINDS
@pytest.mark.parametrize("fails", [False, True], ids=["loaded", "not loaded"])
def test_between_the_end_of_its_load_and_its_first_step(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    fails: bool,
) -> None:
    node, tokens = node_process(), prompt(NUM_TOKENS)
    fill(start_loop, node, tokens, kind=kind)
    loop = start_loop(node, kind=kind)
    loop.add("aborted", tokens)
    step = begin_load(loop, "aborted")
    if fails:
        drop(node)
    loop.update(step, loop.execute(step))
    while "aborted" not in loop.scheduler.finished_recving_kv_req_ids:
        step = loop.schedule()
        loop.update(step, loop.execute(step))
    assert (loop.load_failures > 0) is fails
    loop.abort("aborted")
    run_all(loop)
    assert loop.left_over() == []
    assert answer(loop, "next", tokens) == (NUM_TOKENS + 3 if fails else OWN)
    assert loop.left_over() == []


@pytest.mark.parametrize("aborted", ["loads", "goes next", "waits", "all"])
def test_one_of_those_that_there_is_no_room_for(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    aborted: str,
) -> None:
    node = node_process()
    prompts = {f"r{seed}": prompt(NUM_TOKENS, seed) for seed in range(5)}
    fill(start_loop, node, *prompts.values(), kind="hybrid")
    loop = start_loop(node, kind="hybrid", num_blocks=26, max_num_batched_tokens=96)
    for name, tokens in prompts.items():
        loop.add(name, tokens)
    room, steps = loop.connector._requests._load_admission, []
    while room.holders | room._refused != prompts.keys():  # a lookup may be answered later than others
        steps.append(loop.schedule())
        assert len(steps) < 10_000
    chosen = {
        "loads": [next(name for name in prompts if loop.status(name) == "WAITING_FOR_REMOTE_KVS")],
        "goes next": [room._next],
        "waits": [next(name for name in prompts if room.waits(name))],
        "all": list(prompts),
    }
    for name in chosen[aborted]:
        loop.abort(name)
    for step in steps:
        loop.update(step, loop.execute(step))
    run_all(loop)
    for name, tokens in prompts.items():
        if loop.finished[name] != "abort":
            assert loop.tokens[name] == right_answer(tokens, 4)
            assert loop.computed[name] == OWN, "its load was given up"
    assert loop.left_over() == []
    assert room.holders == set()
