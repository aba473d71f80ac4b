"""Hints of requests, through vLLM's scheduler to a real node: what is kept there, and what is stored at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

import kvstore
from tests.vllm.driving import KINDS, answer
from tests.vllm.loop import BLOCK_SIZE, Loop, run_until


@KINDS
def test_a_prompt_is_kept(
    start_loop: Callable[..., Loop], node: Any, prompt: Callable[..., list[int]], kind: str
) -> None:
    loop = start_loop(node, kind=kind)
    answer(loop, "keeps", prompt(200), params={"kvstore_keep_minutes": 5})
    groups = loop.kv_cache_config.kv_cache_groups
    expected = {"full": 6, "hybrid": 6 + 3, "states": 6 + 1}[kind]
    assert len(groups) == (1 if kind == "full" else 2)
    with kvstore.connect(node.url) as client:
        run_until(loop, lambda: sum(each.pinned_pages for each in client.status().namespaces) == expected)
    assert loop.left_over() == []


@pytest.mark.parametrize(
    ("params", "blocks"),
    [
        ({"kvstore_store_first": 2}, 2),
        ({"kvstore_store_generated": False}, 6),
        ({"kvstore_store": False}, 0),
        ({"kvstore_store": "nonsense"}, 0),
        ({"kvstore_keep_minutes": "nonsense"}, 9),
    ],
    ids=str,
)
def test_what_is_stored(
    start_loop: Callable[..., Loop],
    node: Any,
    prompt: Callable[..., list[int]],
    params: dict[str, Any],
    blocks: int,
) -> None:
    loop = start_loop(node)
    answer(loop, "stores", prompt(200), max_tokens=100, params=params)
    tokens = prompt(200) + loop.tokens["stores"]
    assert loop.left_over() == []
    loop.close()
    assert answer(start_loop(node), "again", tokens) == 300 - blocks * BLOCK_SIZE + 3


def test_the_last_blocks_go_behind_what_others_have_stored(
    start_loop: Callable[..., Loop], node: Any, prompt: Callable[..., list[int]]
) -> None:
    loop = start_loop(node)
    tokens = prompt(200)
    answer(loop, "head", tokens, params={"kvstore_store_first": 4})
    loop.reset_prefix_cache()
    answer(loop, "tail", tokens, params={"kvstore_store_last": 1, "kvstore_load": False})
    assert loop.left_over() == []
    loop.close()
    with kvstore.connect(node.url) as client:
        assert [each.arena_pages for each in client.status().namespaces] == [4 + 1]
