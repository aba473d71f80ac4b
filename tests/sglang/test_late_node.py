"""A server that starts before its node is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE


def test_prompts_are_kept_from_when_the_node_comes(
    node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node.kill()
    server = start_server(backend(node.url))
    before = server.answer(prompt(TOKENS))
    server.flush()
    assert server.answer(prompt(TOKENS)).stored == 0
    node.start()
    kept = server.answer(prompt(TOKENS, 8))
    assert server.wait_stored(prompt(TOKENS, 8), WHOLE).tokens == kept.tokens
    assert server.wait_stored(prompt(TOKENS), WHOLE).tokens == before.tokens, "it is stored when it is asked for again"
