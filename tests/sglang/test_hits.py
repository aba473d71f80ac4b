"""What one server has computed comes back from the storage, with the same tokens: after a flush, after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
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


def test_two_ranks_and_a_host_pool_in_shared_memory(
    node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    tokens = prompt(PROMPT)
    two = {"flags": ("--tp", "2"), "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    server = start_server(backend(node.url, allocator="shm"), **two)
    cold = server.answer(tokens)
    assert cold.stored == 0
    server.flush()
    flushed = server.answer(tokens)
    assert (flushed.tokens, flushed.stored) == (cold.tokens, WHOLE)
    with kvstore.connect(node.url) as client:
        names = [space.name for space in client.status().namespaces]
    assert sorted(name.partition("tp ")[2] for name in names) == ["0/2", "1/2"]
    server.stop()
    assert "Failed" not in server.tail()
    alone = start_server(backend(node.url))
    whole = alone.answer(tokens)
    assert whole.stored == 0, "a rank's half of the heads was taken for all of them"


def test_metrics_say_what_came_from_the_storage(
    node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    server = start_server(backend(node.url), flags=("--enable-metrics",))
    server.answer(prompt(PROMPT))
    server.flush()
    assert server.answer(prompt(PROMPT)).stored == WHOLE
    told = {
        line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in server.metrics().splitlines() if "{" in line
    }
    assert told["sglang:prefetched_tokens_total"] == WHOLE
    assert told["sglang:prefetch_pgs_sum"] == WHOLE // PAGE_SIZE
    assert told["sglang:backup_pgs_sum"] >= WHOLE // PAGE_SIZE
    assert told["sglang:prefetch_bandwidth_count"] == 1
    status, _ = server.request("POST", "/hicache/storage-backend/clear", {}, 60.0)
    assert status == 200
    server.flush()
    assert server.answer(prompt(PROMPT)).stored == 0
    with kvstore.connect(node.url) as client:
        assert "SGLang 0.5.23 rank 0" in {each.name for each in client.status().connected}
        server.stop()
        assert not client.status().connected, "the backend was not closed"
