"""Requests of every kind, on one engine where that is honest: the engine forgets what it has itself in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

from tests.vllm.engine import BLOCK_SIZE, PATIENT, Prompt, transfer_config


def whole_blocks(*lengths: int) -> int:
    """Tokens in full blocks of prompts of these lengths."""
    return sum(length // BLOCK_SIZE * BLOCK_SIZE for length in lengths)


@pytest.mark.parametrize("async_load", [True, False], ids=["async", "sync"])
def test_prompts_longer_than_a_step(
    node: NodeProcess,
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    async_load: bool,
) -> None:
    prompts = [prompt(length, length) for length in (100, 333, 700)]
    expected = plain(prompts)
    # 64 tokens a step: the longest prompt takes eleven steps, and is stored as it is computed.
    engine = start_engine(
        transfer=transfer_config(node.url, async_load=async_load, **PATIENT), max_num_batched_tokens=64
    )
    assert engine.run(prompts).tokens == expected.tokens
    engine.drain()
    engine.forget()
    again = engine.run(prompts, concurrency=1)
    assert again.tokens == expected.tokens
    assert again.external_hits == whole_blocks(100, 333, 700)
    longer = [[*tokens, *prompt(100, 9)] for tokens in prompts]
    engine.forget()
    assert engine.run(longer).tokens == plain(longer).tokens
    engine.drain()
    assert engine.state()["blocks_in_use"] == 0


def test_requests_that_are_preempted(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(60 + 10 * seed, seed) for seed in range(8)]
    expected = plain(prompts, max_tokens=80)
    # 31 blocks for eight requests that grow to seven blocks each.
    engine = start_engine(transfer=transfer, num_gpu_blocks_override=32, max_model_len=512)
    first = engine.run(prompts, max_tokens=80)
    assert first.tokens == expected.tokens
    engine.drain()
    engine.forget()
    second = engine.run(prompts, max_tokens=80)
    assert second.tokens == expected.tokens
    assert first.preemptions + second.preemptions > 0
    assert second.external_hits > 0
    engine.drain()
    assert engine.state()["blocks_in_use"] == 0


@pytest.fixture
def run(transfer: dict[str, Any], start_engine: Callable[..., Any]) -> Callable[[Any], Any]:
    """Have one engine answer a request, of which it has nothing itself."""
    engine = start_engine(transfer=transfer)

    def answer(each: Any) -> Any:
        engine.drain()
        engine.forget()
        answers = engine.run([each])
        engine.drain()
        assert engine.state()["blocks_in_use"] == 0
        return answers

    return answer


def test_log_probabilities_of_the_prompt_are_computed(
    run: Callable[[Any], Any], plain: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(200)
    assert run(tokens).external_hits == 0
    assert run(tokens).external_hits == 192
    scored = run(Prompt(tokens, prompt_logprobs=1))
    assert scored.external_hits == 0
    assert scored.answers[0].prompt_logprobs == plain([Prompt(tokens, prompt_logprobs=1)]).answers[0].prompt_logprobs


def test_requests_that_turn_storing_or_loading_off(run: Callable[[Any], Any], prompt: Callable[..., list[int]]) -> None:
    tokens, other = prompt(200), prompt(200, 1)
    assert run(tokens).external_hits == 0
    assert run(Prompt(tokens, params={"kvstore_load": False})).external_hits == 0
    assert run(Prompt(other, params={"kvstore_store": False})).external_hits == 0
    assert run(other).external_hits == 0
    assert run(other).external_hits == 192


def test_requests_that_are_aborted(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(300, seed) for seed in range(6)]
    engine = start_engine(transfer=transfer, max_num_batched_tokens=256)
    for steps in range(1, 9):
        engine.run(prompts, max_tokens=20, abort_after=steps)
    engine.drain()
    assert engine.state()["blocks_in_use"] == engine.state()["requests"] == 0
    engine.forget()
    assert engine.run(prompts).tokens == plain(prompts).tokens


def test_processes_with_other_seeds_and_hash_algorithms_agree(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(200), prompt(100, 1)]
    expected = plain(prompts).tokens
    algorithms = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
    for number, algorithm in enumerate(algorithms):
        engine = start_engine(
            transfer=transfer,
            environment={"PYTHONHASHSEED": str(number)},
            prefix_caching_hash_algo=algorithm,
        )
        answers = engine.run(prompts)
        assert answers.tokens == expected
        assert answers.external_hits == (whole_blocks(200, 100) if number else 0), algorithm
        engine.drain()
        engine.close()


def test_tokens_that_were_guessed_from_the_prompt(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(40, seed) * 4 for seed in range(3)]
    expected = plain(prompts, max_tokens=60).tokens
    followed = [[*tokens, *answer, 5] for tokens, answer in zip(prompts, expected, strict=True)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options = {"transfer": transfer, "speculative_config": drafts}
    with start_engine(**options) as first:
        answers = first.run(prompts, max_tokens=60)
        assert answers.tokens == expected
        assert answers.counters["vllm:spec_decode_num_draft_tokens"] > 0
        first.drain()
    with start_engine(**options) as second:
        again = second.run(followed, max_tokens=60, concurrency=1)
        assert again.tokens == plain(followed, max_tokens=60).tokens
        # What was guessed wrongly was never stored: the last token's KV, and all behind it, was not computed.
        assert again.external_hits == 3 * ((160 + 59) // 32 * 32)
