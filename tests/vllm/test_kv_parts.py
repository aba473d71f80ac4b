"""Engines of different tensor-parallel sizes that read each other's pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

from tests.vllm.engine import PATIENT, TWO_RANKS, Prompt, transfer_config

ASK = {"do_remote_decode": True}


@pytest.mark.parametrize("kv_parts", [2, "heads"])  # the model has four
def test_one_rank_and_two_ranks_hand_over_to_each_other(
    node: NodeProcess,
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    key: Path,
    kv_parts: int | str,
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((40, 129, 300, 333))]
    expected = plain(prompts, max_tokens=20).tokens
    transfer = transfer_config(node.url, kv_parts=kv_parts, ticket_key_file=str(key), **PATIENT)
    with (
        start_engine(transfer=transfer) as one,
        start_engine(transfer=transfer, **TWO_RANKS) as two,
    ):
        for prefill, decode, share in ((one, two, prompts[::2]), (two, one, prompts[1::2])):
            tickets = prefill.run([Prompt(tokens, 1, ASK) for tokens in share])
            if prefill is one:
                one.drain()  # in this process nobody steps on, and what the last step was told of is stored behind it
            answers = decode.run(
                [Prompt(tokens, 20, given.params) for tokens, given in zip(share, tickets.answers, strict=True)]
            )
            assert answers.tokens == [expected[prompts.index(tokens)] for tokens in share]
            assert answers.external_hits == sum(len(tokens) - 1 for tokens in share)
        one.drain()
        assert one.state()["blocks_in_use"] == 0


@pytest.mark.parametrize("kind", ["full", "unlike", "mla", "hybrid"])
def test_a_part_for_each_head_is_for_every_size(
    start_loop: Callable[..., Any], node: NodeProcess, prompt: Callable[..., list[int]], kind: str
) -> None:
    """Where nothing can be cut the pages are those of engines that cut nothing."""
    from tests.vllm.driving import answer, fill

    tokens = prompt(200)
    fill(start_loop, node, tokens, extra={"kv_parts": "heads"}, kind=kind)
    assert answer(start_loop(node, kind=kind), "hits", tokens) == 200 % 32 + 3


def test_layers_without_heads_are_refused_at_start(start_loop: Callable[..., Any], node: NodeProcess) -> None:
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match=r"kv_parts: .*layers\.1.* has no KV heads to cut by"):
        start_loop(node, extra={"kv_parts": "heads"}, kind="states")


def test_heads_that_can_not_be_cut_so_are_refused_at_start(
    node_process: Callable[..., NodeProcess], models: Callable[[str], Path]
) -> None:
    pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")
    from kvstore.errors import ConfigError
    from tests.vllm.loop import Loop

    with pytest.raises(ConfigError, match=r"a rank's 1 KV heads of .* can't be cut into 2 parts"):
        Loop(models("llama"), transfer_config(node_process().url, kv_parts=2))
