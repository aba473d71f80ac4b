"""What the scenarios rely on: without a connector vLLM answers the same twice, and by the whole prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_answers_are_repeated_and_depend_on_the_head_of_the_prompt(
    start_engine: Callable[..., Any], prompt: Callable[..., list[int]], model: str
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((90, 200, 333))]
    other_heads = [[5] * 32 + tokens[32:] for tokens in prompts]
    engine = start_engine(model)
    alone = engine.run(prompts, concurrency=1)
    engine.forget()
    together = engine.run(prompts)
    from_cache = engine.run(prompts)
    assert alone.tokens == together.tokens == from_cache.tokens
    assert from_cache.local_hits == 64 + 192 + 320
    changed = engine.run(other_heads)
    assert all(ours != theirs for ours, theirs in zip(alone.tokens, changed.tokens, strict=True))
    engine.drain()
    assert engine.state()["blocks_in_use"] == 0
    engine.close()


def test_a_server_answers_as_the_engine_does(
    start_engine: Callable[..., Any], start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    server = start_server(ready=False)
    tokens = prompt(200)
    plain = start_engine().run([tokens]).tokens[0]
    server.wait_ready()
    assert server.answer(tokens) == plain
    assert "vllm:prompt_tokens_total" in server.metrics()
    server.stop()
    assert not server.healthy()
