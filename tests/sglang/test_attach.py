"""The backend attached to a server that runs, detached, and attached again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE
PATH = "/hicache/storage-backend"


def test_attached_detached_and_attached_again(
    node: NodeProcess,
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
    eventually: Callable[..., None],
) -> None:
    server = start_server(None, admin_key="secret")
    tokens = prompt(TOKENS)
    expected = server.answer(tokens).tokens
    order = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(backend(node.url)),
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_write_policy": "write_through",
    }
    with kvstore.connect(node.url, timeout=60.0) as client:

        def is_connected() -> bool:
            return "SGLang 0.5.23 rank 0" in {each.name for each in client.status().connected}

        for _ in range(2):
            assert not is_connected()
            server.ask_idle("PUT", PATH, order)
            assert server.wait_stored(tokens, WHOLE).tokens == expected
            assert is_connected()
            server.ask_idle("DELETE", PATH, None)
            eventually(lambda: not is_connected())
            server.flush()
            answer = server.answer(tokens)
            assert (answer.tokens, answer.stored) == (expected, 0)
    assert "Traceback" not in server.printed()


def test_what_cannot_be_attached_is_refused_in_words(
    node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    server = start_server(None, admin_key="secret")
    wrong = backend(node.url) | {"tennant": "a"}
    order = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config_json": json.dumps(wrong)}
    status, text = server.request("PUT", PATH, order, 60.0)
    assert status == 400
    assert "unknown key 'tennant'; did you mean 'tenant'?" in text
    tokens = prompt(TOKENS)
    assert server.answer(tokens).tokens == server.answer(tokens).tokens
