"""A request whose load failed lets those pass that hold blocks for a load, and is aborted meanwhile, or they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import kvstore
from kvstore.layout import Layout

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import answer, begin_load, fill, only_on_disk
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until

NUM_TOKENS = 300
"""Of each prompt: nine full blocks, which are loaded, and one for the rest."""
OWN = NUM_TOKENS % BLOCK_SIZE + 3
"""Tokens that are computed behind a load."""


def lose(node: Any, tokens: Sequence[int]) -> None:
    """The node has the pages of one prompt no longer, those that it had: of windows and states they are some."""
    with kvstore.connect(node.url, timeout=30.0) as client:
        for each in client.status().namespaces:
            assert client.namespace(Layout.from_json(each.layout)).evict(kvstore.hash_blocks(tokens, BLOCK_SIZE)) > 0


@pytest.mark.parametrize("kind", ["hybrid", "window", "states", "recurrent"])
@pytest.mark.parametrize("aborted", [("failed",), ("loads",), ("failed", "loads")], ids=" and ".join)
def test_who_lets_others_pass_or_is_let_pass_is_aborted(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    aborted: tuple[str, ...],
) -> None:
    """Of models that keep all tokens vLLM takes no blocks back: it computes in those that were not filled."""
    node, prompts = node_process(), {"failed": prompt(NUM_TOKENS), "loads": prompt(NUM_TOKENS, 1)}
    fill(start_loop, node, *prompts.values(), kind=kind)
    only_on_disk(node)
    loop = start_loop(node, kind=kind)
    loop.add("failed", prompts["failed"])
    first = begin_load(loop, "failed")
    lose(node, prompts["failed"])
    output = loop.execute(first)
    loop.worker._worker.wait_for_load()
    loop.add("loads", prompts["loads"])
    steps = [loop.schedule()]
    while loop.status("loads") == "WAITING":  # vLLM is not told yet that the other one has failed
        steps.append(loop.schedule())
        assert len(steps) < 10_000
    node.pause()
    loop.update(first, output)
    for step in steps:
        loop.update(step, loop.execute(step))
    assert loop.load_failures > 0
    loop.step()
    waiting = loop.connector._requests._requests["failed"]
    assert waiting.lets_pass == {"loads"}
    assert loop.status("failed") in ("WAITING", "PREEMPTED")
    assert loop.status("loads") == "WAITING_FOR_REMOTE_KVS"

    for name in aborted:
        loop.abort(name)
    if "failed" not in aborted:  # it goes on, while the load of the one that was aborted still hangs
        run_until(loop, lambda: "failed" in loop.finished)
    node.resume()
    run_all(loop)
    assert loop.left_over() == []
    for name in prompts.keys() - set(aborted):
        assert loop.tokens[name] == right_answer(prompts[name], 4)
        assert loop.computed[name] == (OWN if name == "loads" else NUM_TOKENS + 3)
    assert answer(loop, "next", prompt(NUM_TOKENS, 2)) == NUM_TOKENS + 3
    assert loop.left_over() == []
