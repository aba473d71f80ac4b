"""A router's prefetch, as the documentation has it: what a prompt loads is in the arena before the prompt comes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

import kvstore
from tests.vllm.driving import KINDS, answer, fill, only_on_disk
from tests.vllm.loop import Loop

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


@KINDS
def test_pages_are_up_before_their_prompt_comes(
    start_loop: Callable[..., Loop], node: Any, prompt: Callable[..., list[int]], kind: str
) -> None:
    tokens = prompt(200)
    fill(start_loop, node, tokens, kind=kind)
    only_on_disk(node)
    with kvstore.connect(node.kv_url) as router:
        before = _tiers(router, tokens)
        assert set(before) == ({"disk", None} if kind == "states" else {"disk"})
        [namespace, *_] = router.status().namespaces
        _documented("prompt_is_coming")(router, namespace.labels[0], tokens)
        assert _tiers(router, tokens) == [tier and "arena" for tier in before]
    assert answer(start_loop(node, kind=kind), "hits", tokens) == 200 % 32 + 3


def _tiers(client: kvstore.Client, tokens: list[int]) -> list[str | None]:
    """Where each page of a prompt is, of all groups."""
    tiers: list[str | None] = []
    for each in client.status().namespaces:
        layout = kvstore.Layout.from_json(each.layout)
        tiers += client.namespace(layout).lookup(kvstore.hash_blocks(tokens, layout.block_size)).tiers
    return tiers


def _documented(name: str) -> Any:
    """A function that stands in the document."""
    [code] = [each for each in re.findall("```python\n(.*?)```", DOCUMENT.read_text(), re.S) if f"def {name}(" in each]
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]
