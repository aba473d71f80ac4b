"""Models that answer with what they make of a whole prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(("pooling", "kept"), [("LAST", True), ("MEAN", False)])
def test_an_embedding_is_the_same_behind_pages_that_are_kept_and_others_keep_none(
    start_engine: Callable[..., Any],
    transfer: dict[str, Any],
    prompt: Callable[..., list[int]],
    pooling: str,
    kept: bool,
) -> None:
    tokens = prompt(200)
    engine = start_engine(
        transfer=transfer, runner="pooling", convert="embed", pooler_config={"seq_pooling_type": pooling}
    )
    first = engine.do("embed", tokens=tokens)
    engine.drain()
    engine.forget()
    assert engine.do("embed", tokens=tokens) == pytest.approx(first, rel=1e-3, abs=1e-5)
    assert engine.counters().get("vllm:external_prefix_cache_hits", 0) == (192 if kept else 0)
    assert ("vLLM runs without kvstore" in engine.printed()) is not kept
    engine.close()
