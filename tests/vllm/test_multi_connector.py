"""Inside vLLM's ``MultiConnector``, before another connector and behind it: what kvstore promises alone holds there."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

import kvstore
from kvstore.layout import Layout
from tests.vllm.driving import ORDERS, PATIENT, WAYS, answer, answer_again, begin_load, drop, fill, only_on_disk
from tests.vllm.engine import BLOCK_SIZE, beside
from tests.vllm.loop import Loop, right_answer, run_all, run_until
from tests.vllm.sibling import (
    HOLDS,
    LOADS,
    LOADS_LATER,
    LOST,
    NIXL_LIKE,
    SIBLING,
    STEPS,
    NixlLikeConnector,
    SiblingConnector,
)

NEVER = 1_000_000_000
"""Steps."""


@pytest.fixture
def start_both(models: Callable[[str], Path], runner: str) -> Iterator[Callable[..., Loop]]:
    """Start an engine with a made-up model, with kvstore and the other connector."""
    loops: list[Loop] = []

    def start(
        node: NodeProcess,
        first: bool,
        *,
        extra: dict[str, Any] | None = None,
        other: dict[str, Any] = SIBLING,
        **options: Any,
    ) -> Loop:
        deadlines = {"lookup_budget_ms": PATIENT, "load_deadline_ms": PATIENT, "store_deadline_ms": PATIENT}
        transfer = beside(other, node.url, first, **(deadlines | (extra or {})))
        loops.append(Loop(models("llama"), transfer, runner=runner, **options))
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


@ORDERS
def test_the_first_request_finds_pages_though_the_handshake_is_anothers(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    fill(start_loop, node, tokens)
    loop = start_both(node, first)
    assert answer(loop, "hits", tokens) == 200 % BLOCK_SIZE + 3
    [sibling] = [each for each in loop.connector.sub_connectors if isinstance(each, SiblingConnector)]
    assert len(sibling.heard) == 1
    assert loop.left_over() == []


@ORDERS
def test_what_is_stored_there_an_engine_without_it_finds(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    loop = start_both(node, first)
    answer(loop, "stores", tokens)
    assert loop.left_over() == []
    assert answer(start_loop(node), "hits", tokens) == 200 % BLOCK_SIZE + 3


@ORDERS
def test_beside_a_connector_that_hands_prompts_over_it_does_and_kvstore_keeps_pages(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    tmp_path: Path,
    first: bool,
) -> None:
    """vLLM's engine ends where two connectors answer with one key."""
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    loop = start_both(node, first, extra={"ticket_key_file": str(key)}, other=NIXL_LIKE)
    tokens = prompt(200)
    loop.add("asks", tokens, max_tokens=1, params={"do_remote_decode": True})
    run_all(loop)
    assert loop.params["asks"]["remote_host"] == "here"
    assert "ticket" not in loop.params["asks"]
    assert loop.left_over() == []
    assert answer(start_loop(node), "hits", tokens) == 200 % BLOCK_SIZE + 3


@ORDERS
def test_a_reset_before_the_first_request_counts(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    fill(start_loop, node, prompt(200))
    loop = start_both(node, first)
    loop.connector.reset_cache()
    assert answer(loop, "misses", prompt(200)) == 203


@ORDERS
@WAYS
def test_a_node_that_is_killed_while_pages_are_loaded_fails_no_request(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node_process: Callable[..., NodeProcess],
    prompt: Callable[..., list[int]],
    first: bool,
    async_load: bool,
) -> None:
    node, tokens, extra = node_process(), prompt(200), {"async_load": async_load}
    fill(start_loop, node, tokens, extra=extra)
    only_on_disk(node)
    loop = start_both(node, first, extra=extra | {"load_deadline_ms": 2000})
    assert loop.scheduler.recompute_kv_load_failures
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    node.signal(signal.SIGKILL)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.finished["unlucky"] == "length"
    assert loop.tokens["unlucky"] == right_answer(tokens, 4)
    node.kill()
    node.start()
    run_until(loop, lambda: answer_again(loop, tokens) < 100)
    assert loop.left_over() == []


@ORDERS
def test_its_policy_can_be_left_as_it_is(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    fill(start_loop, node, tokens)
    loop = start_both(node, first, extra={"load_failure_policy": "keep"})
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    drop(node)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.finished["unlucky"] == "error"


@ORDERS
def test_what_another_connector_failed_to_load_is_stored_by_nobody(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    tokens = prompt(200)
    loop = start_both(node, first)
    loop.add("unlucky", tokens, params={LOADS: 4 * BLOCK_SIZE})
    loop.add("shares", tokens, params={LOADS: 4 * BLOCK_SIZE})
    run_all(loop)
    assert loop.load_failures > 0
    assert loop.tokens["unlucky"] == loop.tokens["shares"] == right_answer(tokens, 4)
    assert loop.left_over() == []
    assert answer(start_loop(node), "again", tokens) < 203  # what it loads is right


def nixl_like(loop: Loop) -> NixlLikeConnector:
    """Its worker half."""
    [sibling] = [each for each in loop.worker.sub_connectors if isinstance(each, NixlLikeConnector)]
    return sibling


def kept_pages(node: NodeProcess) -> int:
    """Pages that the node has pinned."""
    with kvstore.connect(node.url, timeout=30.0) as client:
        return sum(each.pinned_pages for each in client.status().namespaces)


def pages_at(node: NodeProcess, tokens: list[int]) -> int:
    """How many of a prompt's full blocks the node has."""
    with kvstore.connect(node.url, timeout=30.0) as client:
        known = [client.namespace(Layout.from_json(each.layout)) for each in client.status().namespaces]
        return sum(each.lookup(kvstore.hash_blocks(tokens, BLOCK_SIZE)).prefix for each in known)


@ORDERS
def test_blocks_that_another_connector_holds_longer_are_held_until_it_has_told(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    """And then a prompt that is to be kept is pinned: where the last one tells, all are told."""
    loop = start_both(node, first, other=NIXL_LIKE)
    tokens = prompt(200)
    loop.add("held", tokens, params={HOLDS: NEVER, "kvstore_keep_minutes": 5})
    run_until(loop, lambda: loop.finished.get("held") == "length")
    loop.step()  # the workers hear of it: two of them are to tell, until kvstore's has
    run_until(loop, lambda: pages_at(node, tokens) == 6 and "held" not in loop.worker._extra_async_saves)
    assert loop.scheduler.requests.keys() == {"held"}
    assert kept_pages(node) == 0
    nixl_like(loop).held["held"] = 1
    run_all(loop)
    run_until(loop, lambda: kept_pages(node) == 6)
    assert loop.left_over() == []
    assert answer_again(loop, tokens) == 200 % BLOCK_SIZE + 3
    assert answer(start_loop(node), "hits", tokens) == 200 % BLOCK_SIZE + 3


@ORDERS
def test_blocks_that_kvstore_holds_longer_are_held_until_it_has_told(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
) -> None:
    loop = start_both(node, first, other=NIXL_LIKE)
    tokens = prompt(200)
    answer(loop, "first", prompt(100, 1))  # all have found the node
    node.pause()  # no store ends
    loop.add("held", tokens, params={HOLDS: 1, "kvstore_keep_minutes": 5})
    run_until(loop, lambda: "held" in loop.finished)
    for _ in range(20):
        loop.step()
    assert nixl_like(loop).held == {}
    assert loop.scheduler.requests.keys() == {"held"}
    node.resume()
    run_all(loop)
    run_until(loop, lambda: kept_pages(node) == 6)
    assert loop.left_over() == []
    assert answer(start_loop(node), "hits", tokens) == 200 % BLOCK_SIZE + 3


@ORDERS
@pytest.mark.parametrize("lost", [0, 2])
def test_what_another_connector_loads_asynchronously_is_stored_as_far_as_it_came(
    start_loop: Callable[..., Loop],
    start_both: Callable[..., Loop],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    first: bool,
    lost: int,
) -> None:
    loop = start_both(node, first, other=NIXL_LIKE)
    tokens = prompt(200)
    params = {LOADS_LATER: 6 * BLOCK_SIZE, STEPS: NEVER, LOST: lost}
    loop.add("loads", tokens, params=params)
    run_until(loop, lambda: nixl_like(loop).loading)
    assert loop.status("loads") == "WAITING_FOR_REMOTE_KVS"
    loop.add("beside", prompt(100, 1))
    run_until(loop, lambda: "beside" in loop.finished)
    assert loop.tokens["beside"] == right_answer(prompt(100, 1), 4)
    assert loop.status("loads") == "WAITING_FOR_REMOTE_KVS"
    assert pages_at(node, tokens) == 0
    nixl_like(loop).loading[0].steps = 1
    run_all(loop)
    assert loop.tokens["loads"] == right_answer(tokens, 4)
    assert loop.computed["loads"] == lost * BLOCK_SIZE + 200 % BLOCK_SIZE + 3
    assert (loop.load_failures > 0) == (lost > 0)
    assert loop.left_over() == []
    assert answer(start_loop(node), "hits", tokens) == 200 % BLOCK_SIZE + 3  # and what it loads is right
    assert answer_again(loop, tokens) == 200 % BLOCK_SIZE + 3
