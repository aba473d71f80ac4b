"""A model with recurrent layers: states are stored where vLLM keeps them, and a hit goes on from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from kvstore.layout import Layout

pytestmark = pytest.mark.usefixtures("recurrent_kernels")

# One block a step, and one request at a time: vLLM's kernel for CPUs can't put down a state in the middle of a step.
OPTIONS = {"max_num_batched_tokens": 32}
ALONE = {"concurrency": 1}
LENGTHS = (200, 100, 333, 64, 33)


def last_boundaries() -> list[int]:
    """Where each prompt's last reusable state is: in front of its last token at the latest."""
    return [(length - 1) // 32 * 32 for length in LENGTHS]


def test_a_second_process_goes_on_from_the_states_of_the_first(
    node: NodeProcess,
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(length, length) for length in LENGTHS]
    expected = plain(prompts, model="recurrent", options=OPTIONS, max_tokens=40, **ALONE)
    with start_engine("recurrent", transfer=transfer, **OPTIONS) as first:
        assert first.run(prompts, max_tokens=40, **ALONE).tokens == expected.tokens
    with start_engine("recurrent", transfer=transfer, **OPTIONS) as second:
        again = second.run(prompts, max_tokens=40, **ALONE)
        assert again.tokens == expected.tokens
        assert [answer.cached for answer in again.answers] == last_boundaries()
        assert again.external_hits == sum(last_boundaries())
        # Where the states are gone, blocks of attention alone are of no use.
        with kvstore.connect(node.url, timeout=30.0) as client:
            layouts = [Layout.from_json(each.layout) for each in client.status().namespaces]
            (states,) = [layout for layout in layouts if layout.kv_heads == 0]
            client.namespace(states).clear()
        second.drain()
        second.forget()
        without = second.run(prompts, max_tokens=40, **ALONE)
        assert without.tokens == expected.tokens
        assert without.external_hits == 0
        second.drain()
        assert second.state()["blocks_in_use"] == 0


def test_states_of_generated_tokens_where_vllm_keeps_them(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    options = OPTIONS | {"prefix_cache_retention_interval": 32}
    question = prompt(50)
    with start_engine("recurrent", transfer=transfer, **options) as engine:
        answer = list(engine.run([question], max_tokens=60).tokens[0])
        engine.drain()
        engine.forget()
        longer = [*question, *answer, 5, 6, 7]
        followed = engine.run([longer])
        assert followed.external_hits == 96
        assert followed.tokens == plain([longer], model="recurrent", options=OPTIONS).tokens
