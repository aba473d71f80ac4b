"""Pages of eight-bit KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node_process import NodeProcess

from tests.vllm.engine import PATIENT, transfer_config


def test_fp8_pages_and_others_do_not_mix(
    node_process: Callable[..., NodeProcess],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    node = node_process(arena="64MiB")
    prompts = [prompt(200, seed) for seed in range(3)]
    options = {"kv_cache_dtype": "fp8"}
    expected = plain(prompts, options=options)
    with start_engine(transfer=transfer_config(node.url, **PATIENT), **options) as engine:
        assert engine.run(prompts).tokens == expected.tokens
        engine.forget()
        again = engine.run(prompts)
        assert again.tokens == expected.tokens
        assert again.external_hits == 3 * 192
    with start_engine(transfer=transfer_config(node.url, **PATIENT)) as other:
        exact = other.run(prompts)
        assert exact.external_hits == 0
        assert exact.tokens == plain(prompts).tokens
        assert exact.tokens != expected.tokens
