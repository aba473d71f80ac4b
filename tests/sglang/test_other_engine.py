"""Another engine on the same node: arena and disk are one, and each finds its own pages alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from kvstore.connector.reference.engine import Engine
from kvstore.connector.reference.model import Llama, LlamaConfig
from kvstore.connector.reference.request import Answer
from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE
SHAPE = LlamaConfig(vocab_size=1024, hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2)


def test_two_engines_on_one_node(
    node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(TOKENS)
    model = Llama(SHAPE)
    server = start_server(backend(node.url))
    with kvstore.connect(node.url, timeout=60.0) as client:

        def compute() -> Answer:
            patience = {"lookup_budget": 60.0, "load_deadline": 60.0, "store_deadline": 60.0}
            engine = Engine(model, num_blocks=60, client=client, **patience)
            engine.add_request("a", tokens, 4)
            (answer,) = engine.run()
            engine.close()
            return answer

        expected = server.answer(tokens).tokens
        server.wait_stored(tokens, WHOLE)
        first = compute()
        assert first.tokens_loaded == 0, "a page of SGLang's was taken"
        assert server.wait_stored(tokens, WHOLE).tokens == expected
        second = compute()
        assert second.token_ids == first.token_ids
        assert second.tokens_loaded >= WHOLE
        assert server.wait_stored(tokens, WHOLE).tokens == expected
        assert len(client.status().namespaces) == 2
