"""Two tensor-parallel ranks of which one is slow, is cut off, or has fewer pages: both take what the one has, requests
are answered, with the same tokens, and no rank waits past its deadlines.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

import kvstore
from tests.sglang.server import PAGE_SIZE, Answer, ServerProcess, backend

pytestmark = pytest.mark.timeout(600)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE
HALF = 208
"""Tokens in full pages."""
JOIN = 10.0
"""Seconds after which a flush of SGLang's fails for threads that have not ended, and the server with it."""


@pytest.fixture
def second(short_folder: Path, shm_folder: Path) -> Iterator[NodeProcess]:
    """A node for the second rank."""
    (short_folder / "b").mkdir()
    (shm_folder / "b").mkdir()
    node = NodeProcess(short_folder / "b", shm_folder / "b", arena="64MiB")
    node.start()
    yield node
    node.kill()


@pytest.fixture
def start_ranks(start_server: Callable[..., Any]) -> Callable[..., ServerProcess]:
    """Start a server of two ranks on a node; variables say in what the second one differs (:mod:`rank_backend`)."""

    def start(url: str, *, policy: str = "wait_complete", **variables: str) -> ServerProcess:
        extra = backend(url) | {"module_path": "rank_backend", "class_name": "RankBackend"}
        environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", **variables}
        server: ServerProcess = start_server(extra, policy=policy, flags=("--tp", "2"), environment=environment)
        return server

    return start


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_a_rank_that_takes_seconds_for_each_call(
    policy: str, node: NodeProcess, start_ranks: Callable[..., ServerProcess], prompt: Callable[..., list[int]]
) -> None:
    server = start_ranks(node.url, policy=policy, KVSTORE_TEST_SECOND_DELAY="2.0")
    prompts = [prompt(TOKENS, seed) for seed in range(2)]
    expected = [server.answer(tokens).tokens for tokens in prompts]
    for _ in range(2):
        for tokens, answer in zip(prompts, expected, strict=True):
            assert server.flush() < JOIN
            again = server.answer(tokens)
            assert again.tokens == answer
            assert again.stored == WHOLE or policy == "timeout"
    assert "random_delay_limit=2.0s" in server.printed(), "no rank was slow"
    assert "Traceback" not in server.printed()


def pages_of(url: str) -> int:
    with kvstore.connect(url, timeout=60.0) as client:
        (space,) = client.status().namespaces
        return space.arena_pages


def test_a_rank_whose_node_is_stopped_and_then_has_fewer_pages(
    node: NodeProcess,
    second: NodeProcess,
    start_ranks: Callable[..., ServerProcess],
    prompt: Callable[..., list[int]],
) -> None:
    server = start_ranks(node.url, KVSTORE_TEST_SECOND_URL=second.url)
    tokens = prompt(TOKENS)
    half = server.answer(tokens[:HALF])
    assert server.wait_stored(tokens[:HALF], HALF - PAGE_SIZE).tokens == half.tokens
    second.pause()
    try:
        expected = server.answer(tokens).tokens  # the first rank alone can store it
        for _ in range(2):
            assert server.flush() < JOIN
            cut_off = server.answer(tokens)
            assert (cut_off.tokens, cut_off.stored) == (expected, 0)
        assert server.flush() < JOIN
    finally:
        second.resume()
    assert pages_of(node.url) > pages_of(second.url) == HALF // PAGE_SIZE
    assert server.wait_stored(tokens[:HALF], HALF - PAGE_SIZE).tokens == half.tokens
    assert server.flush() < JOIN
    least = server.answer(tokens)
    assert (least.tokens, least.stored) == (expected, HALF)
    assert server.wait_stored(tokens, WHOLE).tokens == expected
    assert "Traceback" not in server.printed()


def test_a_rank_that_is_stopped_until_nothing_is_held_for_it(
    start_node: Callable[..., Any],
    start_ranks: Callable[..., ServerProcess],
    prompt: Callable[..., list[int]],
    eventually: Callable[..., None],
    tmp_path: Path,
) -> None:
    node = start_node(arena=64 << 20)
    order = tmp_path / "stop"
    server = start_ranks(f"unix://{node.config.socket}", KVSTORE_TEST_SECOND_STOP=str(order))
    tokens = prompt(TOKENS)
    expected = server.answer(tokens).tokens
    assert server.wait_stored(tokens, WHOLE).tokens == expected
    server.flush()
    answers: list[Answer] = []
    order.touch()
    asking = threading.Thread(target=lambda: answers.append(server.answer(tokens)))
    asking.start()
    eventually(lambda: order.stat().st_size, "the second rank came to a load")
    try:
        eventually(lambda: not node.store._state.leases.loads, "what was held for both ranks is let go")
        assert not answers
    finally:
        os.kill(int(order.read_text()), signal.SIGCONT)
    asking.join(60.0)
    assert [(answer.tokens, answer.stored) for answer in answers] == [(expected, WHOLE)]
    assert server.flush() < JOIN
    assert server.answer(tokens).tokens == expected
    assert "Traceback" not in server.printed()
