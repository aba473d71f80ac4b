"""Sleep, resets and the end of an engine, while pages move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_process import NodeProcess

from tests.vllm.engine import transfer_config


def test_an_engine_that_wakes_up_finds_nothing_older(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    tokens = prompt(200)
    expected = plain([tokens]).tokens
    # The engine in a process of its own, as behind a server: it waits for stores before it sleeps.
    with start_engine(transfer=transfer, in_process=False) as engine:
        for level in (1, 2):
            assert engine.run([tokens]).tokens == expected
            engine.do("sleep", level=level)
            engine.do("wake_up")
            woken = engine.run([tokens])
            assert woken.tokens == expected
            assert woken.external_hits == woken.local_hits == 0
        engine.forget()
        assert engine.run([tokens]).external_hits == 192  # what it stored since
    with start_engine(transfer=transfer) as other:
        found = other.run([tokens])
        assert (found.external_hits, found.tokens) == (192, expected)


def test_a_reset_in_the_middle_of_requests(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    prompts = [prompt(200 + seed, seed) for seed in range(6)]
    expected = plain(prompts, max_tokens=30).tokens
    with start_engine(transfer=transfer) as engine:
        answers = engine.run(prompts, max_tokens=30, reset_after=10)
        assert answers.tokens == expected
        assert answers.preemptions > 0
        engine.drain()
        engine.forget()
        again = engine.run(prompts, max_tokens=30)
        assert again.tokens == expected
        assert again.external_hits > 0
        engine.drain()
        assert engine.state()["blocks_in_use"] == 0


@pytest.mark.parametrize("in_process", [True, False])
def test_an_engine_ends_in_order_while_its_node_hangs(
    node: NodeProcess,
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
    in_process: bool,
) -> None:
    prompts = [prompt(300, seed) for seed in range(4)]
    expected = plain(prompts).tokens
    engine = start_engine(transfer=transfer_config(node.url), in_process=in_process)
    assert engine.run(prompts[:2]).tokens == expected[:2]
    node.pause()
    try:
        assert engine.run(prompts[2:]).tokens == expected[2:]  # its stores hang
        engine.close()
    finally:
        node.resume()
