"""Latent attention (MLA): one latent a token instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPTIONS = {
    "attention_backend": "CPU_MLA",  # the one that computes in float32
    "block_size": 16,  # the only one that it has
    # vLLM's own rotation for CPUs reads queries and keys that are slices, as they are here, from wrong places: what
    # becomes of a token depends on how many are computed beside it.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}


def test_a_second_process_loads_what_the_first_one_computed(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    lengths = (64, 65, 100, 333)
    prompts = [prompt(length, length) for length in lengths]
    run = {"max_tokens": 20, "concurrency": 1}
    expected = plain(prompts, model="deepseek", options=OPTIONS, **run).tokens
    with start_engine("deepseek", transfer=transfer, **OPTIONS) as first:
        assert first.run(prompts, **run).tokens == expected
    with start_engine("deepseek", transfer=transfer, **OPTIONS) as second:
        again = second.run(prompts, **run)
        assert again.tokens == expected
        assert again.external_hits == sum(length // 16 * 16 for length in lengths)
