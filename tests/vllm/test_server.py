"""The OpenAI server with nothing but ``--kv-transfer-config``, as a user starts it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess
from redis_servers import wait_until

import kvstore


def metric(text: str, name: str) -> float:
    """The sum of a metric's samples in what ``/metrics`` says."""
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_server_that_is_killed_finds_its_pages_again(
    node: NodeProcess,
    transfer: dict[str, Any],
    start_server: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(100, seed % 3) + prompt(100, 10 + seed) for seed in range(12)]
    expected = plain(prompts).tokens
    server = start_server(transfer=transfer)

    def answer_all() -> list[tuple[int, ...]]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(server.answer, prompts))

    assert answer_all() == expected
    server.kill()
    server.start()
    assert answer_all() == expected
    # Nothing but a page that was being stored at the kill may be missing.
    told = server.metrics()
    assert metric(told, "vllm:external_prefix_cache_hits_total") > 1000
    assert "vllm:kvstore_" in told
    server.complete(prompts[0], kv_transfer_params={"kvstore_keep_minutes": 5})
    with kvstore.connect(node.url) as client:
        wait_until(lambda: sum(each.pinned_pages for each in client.status().namespaces) == 200 // 32)
    server.stop()


def test_a_name_and_a_role_are_enough_where_a_node_serves_on_its_default_socket(
    node_process: Callable[..., NodeProcess],
    start_server: Callable[..., Any],
    prompt: Callable[..., list[int]],
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    node_process(socket=None)
    tokens = prompt(500)
    server = start_server(
        transfer={"kv_connector": "KVStoreConnector", "kv_role": "kv_both"}, environment={"VLLM_SERVER_DEV_MODE": "1"}
    )
    expected = server.answer(tokens)

    def ask_until(what: Callable[[], bool]) -> None:
        """With the limits that a user has by default, a busy machine may store or look up too late."""
        for _ in range(100):
            if what():
                return
            server.reset_prefix_cache()
            assert server.answer(tokens) == expected
        pytest.fail(server.metrics())

    with kvstore.connect(f"unix://{short_folder}/kvstore.sock") as client:
        ask_until(lambda: sum(each.arena_pages for each in client.status().namespaces) == 15)
    server.stop()
    server.start()
    assert server.answer(tokens) == expected
    ask_until(lambda: metric(server.metrics(), "vllm:external_prefix_cache_hits_total") == 480)
    assert f"kvstore at unix://{short_folder}/kvstore.sock: " in server.printed()
    server.stop()
