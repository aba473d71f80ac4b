"""Pages of eight-bit KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_fp8_pages_and_others_do_not_mix(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(200, seed) for seed in range(3)]
    options = {"kv_cache_dtype": "fp8"}
    expected = plain(prompts, options=options)
    with start_engine(transfer=transfer, **options) as engine:
        assert engine.run(prompts).tokens == expected.tokens
        engine.forget()
        again = engine.run(prompts)
        assert again.tokens == expected.tokens
        assert again.external_hits == 3 * 192
    with start_engine(transfer=transfer) as other:
        exact = other.run(prompts)
        assert exact.external_hits == 0
        assert exact.tokens == plain(prompts).tokens
        assert exact.tokens != expected.tokens
