"""What vLLM's own listeners are told of kvstore's blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvstore
from tests.vllm.engine import transfer_config


def test_blocks_are_announced_when_they_are_stored_and_taken_back_when_a_lookup_misses_them(
    models: Callable[[str], Path], node_process: Callable[..., Any], prompt: Callable[..., list[int]], runner: str
) -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    from tests.vllm.loop import BLOCK_SIZE, Loop, run_all

    node = node_process()
    loop = Loop(
        models("llama"),
        transfer_config(node.url, lookup_budget_ms=20_000, store_deadline_ms=20_000),
        runner=runner,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    told: list[Any] = []
    of_vllm: list[Any] = []

    def publish(batch: Any) -> None:
        for event in batch.events:
            (told if getattr(event, "ownership", None) == "kvstore" else of_vllm).append(event)

    loop.scheduler.kv_event_publisher.publish = publish
    tokens = prompt(3 * BLOCK_SIZE + 5)
    loop.add("a", tokens, max_tokens=2)
    run_all(loop)
    names = [event.block_hashes[0] for event in told]
    assert [type(event) for event in told] == [BlockStored] * 3
    assert names == [name for event in of_vllm for name in event.block_hashes][:3]
    assert [event.parent_block_hash for event in told] == [None, *names[:2]]
    assert [token for event in told for token in event.token_ids] == tokens[: 3 * BLOCK_SIZE]
    assert {event.medium for event in told} == {"CPU"}

    told.clear()
    with kvstore.connect(node.url, timeout=60.0) as client:
        for layout in itertools.chain(*loop.worker._layouts):
            client.namespace(layout).clear()
    loop.reset_prefix_cache()
    loop.add("b", tokens, max_tokens=2)
    run_all(loop)
    assert [type(event) for event in told] == [BlockRemoved] * 3 + [BlockStored] * 3
    assert [event.block_hashes[0] for event in told] == names * 2
    loop.close()
