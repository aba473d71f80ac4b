"""Engines of different tensor-parallel sizes that read each other's pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

from tests.vllm.engine import PATIENT, TWO_RANKS, Prompt, transfer_config

ASK = {"do_remote_decode": True}


def test_one_rank_and_two_ranks_hand_over_to_each_other(
    node: NodeProcess,
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    key: Path,
) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((40, 129, 300, 333))]
    expected = plain(prompts, max_tokens=20).tokens
    transfer = transfer_config(node.url, kv_parts=2, ticket_key_file=str(key), **PATIENT)
    with (
        start_engine(transfer=transfer) as one,
        start_engine(transfer=transfer, **TWO_RANKS) as two,
    ):
        for prefill, decode, share in ((one, two, prompts[::2]), (two, one, prompts[1::2])):
            tickets = prefill.run([Prompt(tokens, 1, ASK) for tokens in share])
            answers = decode.run(
                [Prompt(tokens, 20, given.params) for tokens, given in zip(share, tickets.answers, strict=True)]
            )
            assert answers.tokens == [expected[prompts.index(tokens)] for tokens in share]
            assert answers.external_hits == sum(len(tokens) - 1 for tokens in share)
        one.drain()
        assert one.state()["blocks_in_use"] == 0


def test_heads_that_can_not_be_cut_so_are_refused_at_start(
    node_process: Callable[..., NodeProcess], models: Callable[[str], Path]
) -> None:
    pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")
    from kvstore.errors import ConfigError
    from tests.vllm.loop import Loop

    with pytest.raises(ConfigError, match=r"a rank's 1 KV heads of .* can't be cut into 2 parts"):
        Loop(models("llama"), transfer_config(node_process().url, kv_parts=2))
