"""The main job with real vLLM: what one process computed, the next one loads, and every token stays the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

from tests.vllm.engine import PATIENT, TWO_RANKS, Prompt, transfer_config


@pytest.fixture
def prompts(prompt: Callable[..., list[int]]) -> list[list[int]]:
    """One prefix of three blocks, and behind it nothing, part of a block, whole blocks, and many."""
    head = prompt(96)
    return [head + prompt(tokens, seed) for seed, tokens in enumerate((64, 100, 300, 0, 700, 32), 1)]


def whole_blocks(prompts: list[list[int]]) -> int:
    """Tokens of all prompts that lie in full blocks."""
    return sum(len(each) // 32 * 32 for each in prompts)


@pytest.mark.parametrize("async_load", [True, False], ids=["async", "sync"])
def test_a_second_process_loads_what_the_first_one_computed(
    node: NodeProcess, start_engine: Callable[..., Any], prompts: list[list[int]], async_load: bool
) -> None:
    transfer = transfer_config(node.url, async_load=async_load, **PATIENT)
    with start_engine() as plain:
        expected = plain.run(prompts, max_tokens=40)
    with start_engine(transfer=transfer) as first:
        assert first.run(prompts, max_tokens=40).tokens == expected.tokens
    with start_engine(transfer=transfer) as second:
        again = second.run(prompts, max_tokens=40, concurrency=1)
    assert again.tokens == expected.tokens
    # Each step must compute something: where it loads what it computes, that is the last block of whole ones.
    left = 0 if async_load else sum(32 for each in prompts if len(each) % 32 == 0)
    assert again.external_hits + again.local_hits == whole_blocks(prompts) - left


def test_generated_tokens_are_stored_too(
    transfer: dict[str, Any], start_engine: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    question = prompt(40)
    with start_engine(transfer=transfer) as first:
        answer = list(first.run([question], max_tokens=100).tokens[0])
    with start_engine(transfer=transfer) as second:
        followed = second.run([[*question, *answer, 5, 6, 7]], max_tokens=4)
    assert followed.external_hits == (40 + 99) // 32 * 32  # the last token's KV was never computed


def test_a_model_with_windows_beside_full_attention(
    transfer: dict[str, Any], start_engine: Callable[..., Any], prompts: list[list[int]]
) -> None:
    with start_engine("hybrid") as plain:
        expected = plain.run(prompts, max_tokens=40).tokens
    with start_engine("hybrid", transfer=transfer) as engine:
        engine.run(prompts, max_tokens=1)  # no more: a window that moves on may take a block away before it is stored
        engine.drain()
        engine.forget()
        again = engine.run(prompts, max_tokens=40, concurrency=1)
        assert again.tokens == expected
        # A window's blocks are not all kept: nothing is loaded that reaches to the last token.
        assert [answer.cached for answer in again.answers] == [(len(each) - 1) // 32 * 32 for each in prompts]


def test_two_ranks_store_and_load_their_parts(
    transfer: dict[str, Any], start_engine: Callable[..., Any], prompts: list[list[int]]
) -> None:
    with start_engine(**TWO_RANKS) as plain:
        expected = plain.run(prompts, max_tokens=20).tokens
    with start_engine(**TWO_RANKS, transfer=transfer) as first:
        assert first.run(prompts, max_tokens=20).tokens == expected
        first.forget()  # refused until everything is stored
    with start_engine(**TWO_RANKS, transfer=transfer) as second:
        again = second.run(prompts, max_tokens=20, concurrency=1)
    assert again.tokens == expected
    assert again.external_hits + again.local_hits == whole_blocks(prompts)


def test_adapters_and_salts_have_pages_of_their_own(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    models: Callable[[str], Path],
    prompt: Callable[..., list[int]],
) -> None:
    tokens = prompt(128)
    kinds = [Prompt(tokens), Prompt(tokens, lora=models("lora")), Prompt(tokens, salt="s")]
    with start_engine(transfer=transfer, enable_lora=True) as engine:
        first = [engine.run([kind]) for kind in kinds]
        assert [answers.external_hits + answers.local_hits for answers in first] == [0, 0, 0]
        assert first[1].tokens != first[0].tokens == first[2].tokens
        engine.drain()
        engine.forget()
        again = [engine.run([kind]) for kind in kinds]
        assert [answers.external_hits for answers in again] == [128, 128, 128]
        assert [answers.tokens for answers in again] == [answers.tokens for answers in first]


def test_a_reset_finds_nothing_older_and_leaves_the_pages_of_others(
    transfer: dict[str, Any], start_engine: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(128)
    with start_engine(transfer=transfer) as engine:
        engine.run([tokens])
        engine.drain()
        engine.forget(connector=True)
        assert engine.run([tokens]).external_hits == 0
        engine.drain()
        engine.forget()
        assert engine.run([tokens]).external_hits == 128  # what it stored since
    with start_engine(transfer=transfer) as other:
        assert other.run([tokens]).external_hits == 128
