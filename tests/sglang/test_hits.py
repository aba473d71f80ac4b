"""What one server has computed comes back from the storage, with the same tokens: after a flush, after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

PROMPT = 800
WHOLE = PROMPT - PAGE_SIZE
"""Tokens in full pages before the last one, which SGLang computes again for its logits."""


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "layer_first"])
def test_cold_warm_flushed_and_restarted(
    layout: str, node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(PROMPT)
    server = start_server(backend(node.url), layout=layout)
    cold = server.answer(tokens)
    assert cold.stored == 0
    warm = server.answer(tokens)
    assert (warm.tokens, warm.stored) == (cold.tokens, 0)
    server.flush()
    flushed = server.answer(tokens)
    assert (flushed.tokens, flushed.stored) == (cold.tokens, WHOLE)
    half = server.answer(tokens[:400] + tokens[:100])
    server.stop()
    server.start()
    again = server.answer(tokens)
    assert (again.tokens, again.stored) == (cold.tokens, WHOLE)
    server.flush()
    parted = server.answer(tokens[:400] + tokens[:100])
    assert parted.tokens == half.tokens
    assert parted.stored >= 400 - PAGE_SIZE
