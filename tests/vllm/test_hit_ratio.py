"""The hit ratio of real vLLM: its own, the connector's counters on its ``/metrics``, and the node's are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from node_process import NodeProcess

import kvstore

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from kvstore.status import LookupTotals
from tests.vllm.driving import answer, fill, only_on_disk
from tests.vllm.loop import BLOCK_SIZE, Loop
from tests.vllm.test_loop_metrics import metrics

BLOCKS = 4
PROMPTS, THERE = 50, 4


@pytest.mark.parametrize("kind", ["full", "states"])
@pytest.mark.parametrize("tier", ["arena", "disk"])
def test_four_of_fifty_prompts_are_there(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., NodeProcess],
    prompt: Callable[..., list[int]],
    kind: str,
    tier: str,
) -> None:
    node = node_process()
    prompts = [prompt(BLOCKS * BLOCK_SIZE, seed) for seed in range(PROMPTS)]
    fill(start_loop, node, *prompts[:THERE], kind=kind)
    if tier == "disk":
        only_on_disk(node)
    with kvstore.connect(node.url, timeout=30.0) as client:
        before = client.status().lookups
    loop = start_loop(node, kind=kind)
    for number, each in enumerate(prompts):
        answer(loop, f"r{number}", each)
    counted = metrics(loop)
    loop.close()
    with kvstore.connect(node.url, timeout=30.0) as client:
        of_node = client.status().lookups.since(before)
    blocks = BLOCKS if kind == "full" else BLOCKS - 1  # of states: before the last token, which is computed
    pages, found = PROMPTS * blocks, THERE * blocks
    assert of_node == LookupTotals(pages, **{tier: found})
    assert counted["vllm:kvstore_pages_looked_up_total"] == pages
    assert counted[f"vllm:kvstore_pages_found_total|{tier}"] == found
    if kind == "full":
        assert counted["vllm:external_prefix_cache_queries_total"] == pages * BLOCK_SIZE
        assert counted["vllm:external_prefix_cache_hits_total"] == found * BLOCK_SIZE


def test_a_node_that_is_away_was_asked_and_has_found_nothing(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., NodeProcess],
    prompt: Callable[..., list[int]],
) -> None:
    node = node_process()
    loop = start_loop(node, extra={"lookup_budget_ms": 20, "store_deadline_ms": 200})
    node.kill()
    for number in range(3):
        answer(loop, f"r{number}", prompt(BLOCKS * BLOCK_SIZE, number))
    assert metrics(loop)["vllm:kvstore_pages_looked_up_total"] == 3 * BLOCKS
    assert not [name for name, value in metrics(loop).items() if "pages_found" in name and value]
