"""Decode context parallelism: ranks that share each block by its tokens, with vLLM's scheduler and a made-up model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_models import write_llama
from node_process import NodeProcess

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.driving import PATIENT, answer, answer_again, begin_load, drop
from tests.vllm.engine import transfer_config
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all
from tests.vllm.shared_blocks import RANKS, SharedBlocks

BLOCK = BLOCK_SIZE * RANKS
"""Tokens of a block on both ranks."""
KINDS = pytest.mark.parametrize("kind", ["full", "mla"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranks share tokens of heads that they would have alike: here there is one."""
    return write_llama(tmp_path_factory.mktemp("model") / "one-head", num_key_value_heads=1)


@pytest.fixture
def start_shared(model: Path, runner: str) -> Iterator[Callable[..., SharedBlocks]]:
    loops: list[SharedBlocks] = []

    def start(node: NodeProcess, *, extra: dict[str, Any] | None = None, **options: Any) -> SharedBlocks:
        deadlines = {"lookup_budget_ms": PATIENT, "load_deadline_ms": PATIENT, "store_deadline_ms": PATIENT}
        transfer = transfer_config(node.url, **(deadlines | (extra or {})))
        loops.append(SharedBlocks(model, transfer, runner=runner, **options))
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


@KINDS
@pytest.mark.parametrize("interleave", [1, 8, BLOCK_SIZE])
def test_another_engine_finds_what_was_stored(
    start_shared: Callable[..., SharedBlocks],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    kind: str,
    interleave: int,
) -> None:
    tokens = prompt(200)
    first = start_shared(node, kind=kind, interleave=interleave)
    assert answer(first, "first", tokens, 80) == 200 + 79
    assert first.left_over() == []
    first.close()
    second = start_shared(node, kind=kind, interleave=interleave)
    assert answer(second, "hits", tokens) == 200 % BLOCK + 3
    longer = tokens + right_answer(tokens, 60)
    assert answer_again(second, longer) == len(longer) % BLOCK + 3
    assert second.left_over() == []


def test_what_lies_otherwise_is_not_found(
    start_shared: Callable[..., SharedBlocks], model: Path, node: NodeProcess, prompt: Callable[..., list[int]]
) -> None:
    """By tokens in other turns, or whole on one rank."""
    tokens = prompt(200)
    answer(start_shared(node, interleave=1), "first", tokens)
    assert answer(start_shared(node, interleave=8), "misses", tokens) == 203
    alone = Loop(model, transfer_config(node.url, lookup_budget_ms=PATIENT))
    try:
        assert answer(alone, "misses", tokens) == 203
    finally:
        alone.close()


@pytest.mark.parametrize("async_load", [True, False], ids=["async", "sync"])
def test_pages_that_leave_before_their_load_are_computed(
    start_shared: Callable[..., SharedBlocks],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    async_load: bool,
) -> None:
    tokens = prompt(200)
    answer(start_shared(node), "first", tokens)
    loop = start_shared(node, extra={"async_load": async_load})
    loop.add("unlucky", tokens)
    planned = begin_load(loop, "unlucky")
    drop(node)
    loop.update(planned, loop.execute(planned))
    run_all(loop)
    assert loop.load_failures > 0
    assert loop.tokens["unlucky"] == right_answer(tokens, 4)
    assert loop.left_over() == []
    assert answer(start_shared(node), "again", tokens) == 200 % BLOCK + 3  # stored anew


def test_prefill_and_decode_apart(
    start_shared: Callable[..., SharedBlocks], node: NodeProcess, prompt: Callable[..., list[int]], key: Path
) -> None:
    """Its last block, too, of which each rank has some tokens."""
    tokens = prompt(200)
    extra = {"ticket_key_file": str(key)}
    prefill, decode = start_shared(node, extra=extra), start_shared(node, extra=extra)
    answer(prefill, "prefill", tokens, 1, params={"do_remote_decode": True})
    assert answer(decode, "decode", tokens, params=prefill.params["prefill"]) == 1 + 3
    assert decode.left_over() == []


def test_requests_that_are_preempted(
    start_shared: Callable[..., SharedBlocks], node: NodeProcess, prompt: Callable[..., list[int]]
) -> None:
    prompts = [prompt(200, seed) for seed in range(4)]
    loop = start_shared(node, num_blocks=13)
    for _ in range(2):
        for index, tokens in enumerate(prompts):
            loop.add(f"request-{len(loop.requests)}-{index}", tokens, max_tokens=70)
        run_all(loop)
        loop.reset_prefix_cache()
    for name, request in loop.requests.items():
        assert loop.tokens[name] == right_answer(request.prompt_token_ids, 70)
    assert sum(request.num_preemptions for request in loop.requests.values()) > 0
    assert loop.left_over() == []


def test_cut_by_heads_and_by_tokens_is_refused_at_start(
    start_shared: Callable[..., SharedBlocks], node: NodeProcess
) -> None:
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match="kv_parts: pages are not cut by heads where decode_context_parallel_size is"):
        start_shared(node, extra={"kv_parts": "heads"})


def test_layers_that_ranks_do_not_share_run_without_kvstore(
    start_shared: Callable[..., SharedBlocks],
    node: NodeProcess,
    prompt: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = start_shared(node, kind="recurrent")
    assert "layers of the kind MambaSpec, whose blocks ranks do not share by tokens, are not kept" in caplog.text
    assert loop.worker.sub_connectors[0].get_handshake_metadata() is None
