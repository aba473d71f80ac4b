"""Have prompts answered by vLLM's real scheduler and both halves of the connector on a real node (``loop.py``).

For tests that say what happens in between. Each ends with nothing held: every block free, nothing in a dictionary of
scheduler or connector (:meth:`~tests.vllm.loop.Loop.left_over`). The fixture ``start_loop`` starts the engines.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import kvstore
from kvstore.layout import Layout
from tests.vllm.loop import Loop, right_answer, run_all

PATIENT = 20_000
"""Milliseconds that never pass in a test."""

KINDS = pytest.mark.parametrize("kind", ["full", "hybrid", "states"])
ALL_KINDS = pytest.mark.parametrize(
    "kind", ["full", "mla", "unlike", "hybrid", "mixed", "window", "states", "recurrent"]
)
WAYS = pytest.mark.parametrize("async_load", [True, False], ids=["async", "sync"])
ORDERS = pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
"""Of kvstore and another connector in ``MultiConnector``."""


def answer(loop: Loop, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> int:
    """Have a request answered, rightly. Returns how many tokens were computed for it."""
    loop.add(request_id, prompt, max_tokens=max_tokens, **fields)
    run_all(loop)
    assert loop.finished[request_id] == "length"
    assert loop.tokens[request_id] == right_answer(prompt, max_tokens)
    return loop.computed[request_id]


def answer_again(loop: Loop, prompt: Sequence[int]) -> int:
    """Have a prompt answered that the engine itself has forgotten."""
    loop.reset_prefix_cache()
    return answer(loop, f"again-{len(loop.requests)}", prompt)


def fill(start_loop: Callable[..., Loop], node: Any, *prompts: Sequence[int], **options: Any) -> None:
    """Have an engine of its own compute and store prompts, and end."""
    loop = start_loop(node, **options)
    for index, prompt in enumerate(prompts):
        answer(loop, f"first-{index}", prompt)
    assert loop.left_over() == []
    loop.close()


def begin_load(loop: Loop, request_id: str) -> Any:
    """Step until a step loads pages for a request. Returns that step, not executed yet."""
    for _ in range(10_000):
        planned = loop.schedule()
        if loop.status(request_id) != "WAITING":
            return planned
        loop.update(planned, loop.execute(planned))
    raise AssertionError(f"{request_id} still waits")


def drop(node: Any, hashes: Sequence[bytes] | None = None) -> None:
    """Drop pages from the node: those of these hashes in every namespace, or all."""
    with kvstore.connect(node.url, timeout=30.0) as client:
        for each in client.status().namespaces:
            namespace = client.namespace(Layout.from_json(each.layout))
            if hashes is None:
                namespace.clear()
            else:
                assert namespace.evict(hashes) == len(hashes)


def only_on_disk(node: Any) -> None:
    """Leave the node's pages on disk alone: what asks for them must ask the node, and wait for I/O."""
    with kvstore.connect(node.url, timeout=30.0) as client:
        client.flush()
    assert node.terminate() == 0
    shutil.rmtree(node.arena_folder)
    node.start()
