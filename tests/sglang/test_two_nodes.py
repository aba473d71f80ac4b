"""A second server on a second node finds in Redis what the first one stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess
from redis_servers import RedisServer

import kvstore
from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 800


def test_through_redis_and_without_it(
    short_folder: Path,
    shm_folder: Path,
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    redis = RedisServer(short_folder / "redis")
    shared = {"disk": None, "disk-limit": "0", "redis": redis.url, "redis-limit": "64MiB", "arena": "64MiB"}
    nodes = []
    try:
        for name in "ab":
            (short_folder / name).mkdir()
            (shm_folder / name).mkdir()
            nodes.append(NodeProcess(short_folder / name, shm_folder / name, **shared))
            nodes[-1].start()
        tokens = prompt(TOKENS)
        first = start_server(backend(nodes[0].url))
        cold = first.answer(tokens)
        first.flush()
        with kvstore.connect(nodes[0].url, timeout=60.0) as client:
            client.flush()
        first.stop()
        second = start_server(backend(nodes[1].url))
        found = second.answer(tokens)
        assert (found.tokens, found.stored) == (cold.tokens, TOKENS - PAGE_SIZE)
        second.flush()
        redis.kill()
        other = prompt(TOKENS, 8)
        alone = second.answer(other)
        second.flush()
        assert second.answer(other).tokens == alone.tokens
        assert second.answer(tokens).tokens == cold.tokens
        assert second.alive()
    finally:
        for node in nodes:
            node.kill()
        redis.close()
