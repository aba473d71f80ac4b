"""A model with latent attention, whose pages are the same on all ranks: what one rank has stored, servers of any number
of ranks find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

PROMPT = 800
WHOLE = PROMPT - PAGE_SIZE


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "layer_first"])
def test_what_two_ranks_stored_one_finds(
    layout: str,
    node: NodeProcess,
    start_server: Callable[..., Any],
    models: Callable[..., Path],
    prompt: Callable[..., list[int]],
) -> None:
    tokens = prompt(PROMPT)
    options = {"model": models("deepseek"), "layout": layout}
    two = {"flags": ("--tp", "2"), "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    server = start_server(backend(node.url), **options, **two)
    cold = server.answer(tokens)
    assert cold.stored == 0
    found = server.wait_stored(tokens, WHOLE)
    assert found.tokens == cold.tokens
    with kvstore.connect(node.url) as client:
        (namespace,) = client.status().namespaces
    assert "tp " not in namespace.name
    server.stop()
    alone = start_server(backend(node.url), **options)
    whole = alone.answer(tokens)
    assert (whole.tokens, whole.stored) == (cold.tokens, WHOLE)
