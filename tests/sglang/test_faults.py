"""Whatever happens to the node: requests are answered, with the same tokens, the server lives, and a flush works."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_files import FaultyFiles
from node_process import NodeProcess

import kvstore
from tests.sglang.server import PAGE_SIZE, backend

pytestmark = pytest.mark.timeout(900)

TOKENS = 400
WHOLE = TOKENS - PAGE_SIZE
JOIN = 10.0
"""Seconds after which a flush of SGLang's fails for threads that have not ended, and the server with it."""

# The steps of each method: what it asks of the node, and its copy.
MOMENTS = [
    *(("exists", step, when) for step in (1, 2) for when in ("before", "behind")),  # lookup, prepare_load
    *(("get", 1, when) for when in ("before", "middle", "behind")),  # the copy
    *(("get", 2, when) for when in ("before", "behind")),  # complete
    *(("set", step, when) for step in (1, 2) for when in ("before", "behind")),  # lookup, prepare_store
    *(("set", 3, when) for when in ("before", "middle", "behind")),  # the copy
    *(("set", 4, when) for when in ("before", "behind")),  # complete
]
"""In which the node is killed: eighteen."""
FROM_DISK = [("get", 1, "before"), ("get", 1, "behind")]
"""Two more, of pages that come from the disk: the call that leases them."""


def test_killed_at_twenty_moments(
    node_process: Callable[..., NodeProcess],
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    node = node_process(arena="64MiB", disk_limit="256MiB")
    order = tmp_path / "kill"
    extra = backend(node.url) | {"module_path": "stepping_backend", "class_name": "SteppingBackend"}
    server = start_server(extra, environment={"KVSTORE_TEST_KILL": str(order)})
    stored = prompt(TOKENS)
    expected = server.answer(stored).tokens
    assert server.wait_stored(stored, WHOLE).tokens == expected
    for place, (method, step, when) in enumerate([*MOMENTS, *FROM_DISK]):
        if place >= len(MOMENTS):  # nothing is left in the arena
            with kvstore.connect(node.url, timeout=60.0) as client:
                client.flush()
            node.kill()
            shutil.rmtree(node.arena_folder)
            node.start()
        server.flush()
        order.write_text(f"{method} {step} {when} {node.pid}")
        tokens = prompt(TOKENS, 100 + place) if method == "set" else stored
        answer = server.answer(tokens)
        end = time.monotonic() + 60.0
        while order.exists():
            assert time.monotonic() < end, f"{method} never came to step {step}, {when}"
            time.sleep(0.01)
        assert answer.tokens == expected or method == "set"
        assert server.flush() < JOIN
        node.wait()
        node.start()
        assert server.wait_stored(stored, WHOLE).tokens == expected
        if method == "set":
            assert server.answer(tokens).tokens == answer.tokens
    assert len(MOMENTS) + len(FROM_DISK) == 20
    assert "Traceback" not in server.printed()


def test_stopped_for_twenty_seconds(
    node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    server = start_server(backend(node.url))
    stored, other = prompt(TOKENS), prompt(TOKENS, 8)
    expected = server.answer(stored).tokens
    assert server.wait_stored(stored, WHOLE).tokens == expected
    node.pause()
    stopped = time.monotonic()
    first = None
    try:
        while time.monotonic() - stopped < 20:
            assert server.answer(stored).tokens == expected
            answer = server.answer(other).tokens
            first = first or answer
            assert answer == first
            assert server.flush() < JOIN
    finally:
        node.resume()
    assert server.wait_stored(stored, WHOLE).tokens == expected
    assert "Traceback" not in server.printed()


def test_a_full_arena_and_no_disk(
    node_process: Callable[..., NodeProcess], start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node = node_process(arena="1MiB", disk=None, disk_limit="0")
    server = start_server(backend(node.url))
    prompts = [prompt(TOKENS, seed) for seed in range(3)]
    expected = [server.answer(tokens).tokens for tokens in prompts]
    for _ in range(2):
        for tokens, answer in zip(prompts, expected, strict=True):
            server.flush()
            assert server.answer(tokens).tokens == answer
    assert "Traceback" not in server.printed()


def test_a_disk_that_hangs(
    start_node: Callable[..., Any],
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = FaultyFiles(monkeypatch)
    node = start_node(arena=2 << 20, disk_limit=256 << 20)  # one prompt of 1.6 MiB
    server = start_server(backend(f"unix://{node.config.socket}"))
    prompts = [prompt(TOKENS, seed) for seed in range(3)]
    expected = []
    for tokens in prompts:
        expected.append(server.answer(tokens).tokens)
        server.flush()
        with kvstore.connect(f"unix://{node.config.socket}", timeout=60.0) as client:
            client.flush()
    faulty.fail("hang", "read")
    try:
        for tokens, answer in zip(prompts, expected, strict=True):
            assert server.answer(tokens).tokens == answer
            assert server.flush() < JOIN
    finally:
        faulty.let_go()
    assert "Traceback" not in server.printed()


def test_sglangs_own_faults(
    node: NodeProcess, start_server: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    injected = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.2"}
    server = start_server(backend(node.url), environment=injected)
    prompts = [prompt(TOKENS, seed) for seed in range(3)]
    expected = [server.answer(tokens).tokens for tokens in prompts]
    stored = 0
    for _ in range(4):
        for tokens, answer in zip(prompts, expected, strict=True):
            server.flush()
            again = server.answer(tokens)
            assert again.tokens == answer
            stored += again.stored
    assert stored > 0
    assert "Traceback" not in server.printed()
