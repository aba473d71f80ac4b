"""A prefix that requests with different salts share, because both of them and the engines' settings say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

import kvstore
from tests.vllm.driving import KINDS, answer
from tests.vllm.engine import Prompt
from tests.vllm.loop import BLOCK_SIZE, Loop

LENGTH = 5 * BLOCK_SIZE + 7
"""Tokens of the prefix: the block that its last ones begin is everybody's own."""
SHARED = 5 * BLOCK_SIZE
KEEPS: dict[str, dict[str, int]] = {
    "full": {},
    "hybrid": {"prefix_cache_retention_interval": BLOCK_SIZE},
    "states": {"max_num_batched_tokens": BLOCK_SIZE},
}
"""With which vLLM keeps what a hit at the prefix' end needs: a window, or a state."""
SHARES = {"kvstore_shared_prefix": "assistant"}


@pytest.fixture
def prefix(prompt: Callable[..., list[int]]) -> list[int]:
    return prompt(LENGTH)


@pytest.fixture
def shared_prefixes(prefix: list[int]) -> dict[str, Any]:
    """The setting, as docs/vllm.md has it made."""
    return {"assistant": {"tokens": LENGTH, "hash": kvstore.hash_blocks(prefix, LENGTH)[0].hex()}}


@KINDS
def test_it_is_computed_once(
    start_loop: Callable[..., Loop],
    node: Any,
    prefix: list[int],
    shared_prefixes: dict[str, Any],
    prompt: Callable[..., list[int]],
    kind: str,
) -> None:
    def computed(name: str, tokens: list[int], salt: str, params: dict[str, Any] | None = SHARES) -> int:
        """In an engine of its own, which ends. Without the three steps behind the first token."""
        loop = start_loop(node, kind=kind, extra={"shared_prefixes": shared_prefixes}, **KEEPS[kind])
        tokens = answer(loop, name, tokens, salt=salt, params=params) - 3
        assert loop.left_over() == []
        loop.close()
        return tokens

    tails = [prompt(100, seed) for seed in (1, 2)]
    length = LENGTH + 100
    assert computed("a", prefix + tails[0], "mine") == length
    assert computed("b", prefix + tails[1], "yours") == length - SHARED
    # The same text behind it is each salt's own.
    assert computed("c", prefix + tails[0], "yours") == length - SHARED
    assert computed("d", prefix + tails[0], "mine") == length - length // BLOCK_SIZE * BLOCK_SIZE
    # Who does not say so shares nothing, and nobody shares what differs in its last token.
    assert computed("e", prefix + tails[0], "yours", None) == length
    assert computed("f", [*prefix[:-1], prefix[-1] + 1, *tails[0]], "theirs") == length


def test_a_ticket_says_so_to_decode(
    start_loop: Callable[..., Loop],
    node: Any,
    key: Path,
    prefix: list[int],
    shared_prefixes: dict[str, Any],
    prompt: Callable[..., list[int]],
    runner: str,
) -> None:
    with_key = {"ticket_key_file": str(key)}
    tokens = prefix + prompt(100, 1)
    prefill = start_loop(node, extra=with_key | {"shared_prefixes": shared_prefixes})
    answer(prefill, "p", tokens, max_tokens=1, salt="mine", params=SHARES | {"do_remote_decode": True})
    ticket = prefill.params["p"]
    assert ticket["kvstore_shared_prefix"] == "assistant"
    decode = start_loop(node, extra=with_key | {"shared_prefixes": shared_prefixes})
    assert answer(decode, "d", tokens, salt="mine", params=ticket) == 1 + 3
    assert decode.left_over() == []
    # One without the setting has other names for the pages: it computes, and waits for nothing.
    without = start_loop(node, extra=with_key)
    assert answer(without, "w", tokens, salt="mine", params=ticket) == len(tokens) + 3
    assert without.left_over() == []


def test_many_tenants_of_one_server_compute_it_once(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prefix: list[int],
    shared_prefixes: dict[str, Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prefix + prompt(50, seed) for seed in range(8)]
    expected = plain(prompts, max_tokens=8).tokens
    transfer["kv_connector_extra_config"]["shared_prefixes"] = shared_prefixes
    with start_engine(transfer=transfer) as engine:
        for params, hits in ((None, 0), (SHARES, 7 * SHARED)):
            found = []
            for seed, tokens in enumerate(prompts):
                salted = Prompt(tokens, params=params, salt=f"tenant-{seed}-{params is None}")
                found.append(engine.run([salted]))
                engine.drain()
            assert [tokens for answers in found for tokens in answers.tokens] == expected
            assert sum(answers.external_hits for answers in found) == hits
            assert sum(answers.local_hits for answers in found) == 0
