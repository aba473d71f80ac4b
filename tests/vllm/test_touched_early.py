"""vLLM's V2 model runner zeroes and copies a step's new blocks before it tells the connector of the step: what a store
reads meanwhile is not to be found. Of models whose blocks it leaves alone everything is published at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from kvstore.connector.plan import StepPlan
from tests.vllm.driving import answer
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until

EARLY = {"full": False, "mla": False, "unlike": False, "hybrid": False, "window": False} | {
    "mixed": True,
    "states": True,
    "recurrent": True,
}
"""Whether V2 touches blocks of such a model before it tells of them."""


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize(("kind", "num_blocks"), [("full", 9), ("mixed", 19), ("states", 13)])
def test_blocks_that_a_store_still_reads_when_they_are_given_away(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    num_blocks: int,
    overlap: bool,
) -> None:
    node, tokens = node_process(), prompt(200)
    loop = start_loop(node, kind=kind, num_blocks=num_blocks, overlap=overlap, max_model_len=256)
    loop.add("a", tokens, max_tokens=20, params={"kvstore_load": False})
    node.pause()  # its stores wait
    run_until(loop, lambda: bool(loop.tokens["a"]))
    touch = loop._touch

    def copy_meanwhile(step: Any) -> None:
        touch(step)
        node.resume()
        assert loop.worker is not None
        loop.worker._worker.wait_for_save(20.0)

    monkeypatch.setattr(loop, "_touch", copy_meanwhile)
    assert loop.scheduler.reset_prefix_cache(reset_running_requests=True)
    step = loop.step()  # gives its blocks away: to itself, for its first tokens
    loop.catch_up()
    assert "a" in step.num_scheduled_tokens
    monkeypatch.undo()
    run_all(loop)
    assert loop.tokens["a"] == right_answer(tokens, 20)
    assert loop.left_over() == []

    other = start_loop(node, kind=kind)
    assert answer(other, "again", tokens) == 200 % BLOCK_SIZE + 3
    assert other.left_over() == []


@pytest.mark.parametrize("kind", EARLY)
def test_who_waits_for_the_next_step(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], runner: str, kind: str
) -> None:
    loop = start_loop(node_process(), kind=kind)
    assert loop.worker is not None
    assert loop.worker._worker._touched_early is (EARLY[kind] and runner == "V2")
    assert loop.kv_cache_config.needs_kv_cache_zeroing is EARLY[kind]


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("kind", ["full", "mixed", "states", "recurrent"])
def test_an_engine_that_has_nothing_else_to_do_publishes_everything(
    start_loop: Callable[..., Loop],
    node_process: Callable[..., Any],
    prompt: Callable[..., list[int]],
    kind: str,
    overlap: bool,
) -> None:
    """vLLM goes on with empty steps for as long as a request that has ended holds blocks for its stores."""
    node = node_process()
    loop = start_loop(node, kind=kind, overlap=overlap)
    answer(loop, "first", prompt(200), max_tokens=1)
    assert loop.worker is not None
    statistics = loop.worker._worker.statistics()
    assert statistics.pages_stored >= (1 if kind == "recurrent" else 6)
    assert (statistics.pages_dropped, statistics.stores_late) == (0, 0)
    assert not loop.worker._worker._stores._table.live()
    assert loop.left_over() == []


def test_where_blocks_are_left_alone_a_page_needs_no_further_step(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    node, tokens = node_process(), prompt(200)
    loop = start_loop(node, kind="full")
    loop.add("first", tokens, max_tokens=40)
    run_until(loop, lambda: bool(loop.tokens["first"]))
    assert loop.worker is not None
    loop.worker._worker.wait_for_save()
    assert loop.worker._worker.statistics().pages_stored == 200 // BLOCK_SIZE
    run_all(loop)


def test_a_load_is_not_zeroed_away(
    start_loop: Callable[..., Loop], node_process: Callable[..., Any], prompt: Callable[..., list[int]]
) -> None:
    """What a load fills is zeroed before it begins, or not at all, however late it comes."""
    node, tokens = node_process(), prompt(200)
    for kind in ("mixed", "states"):
        answer(start_loop(node, kind=kind), "first", tokens)
        loop = start_loop(node, kind=kind)
        zeroed: list[set[int]] = []
        touch = loop._touch

        def note(step: Any, touch: Any = touch, zeroed: list[set[int]] = zeroed) -> None:
            touch(step)
            zeroed.append(set(step.new_block_ids_to_zero or ()))

        loop._touch = note  # type: ignore[method-assign]
        loop.add("again", tokens)
        filled: set[int] = set()
        while not filled:
            step = loop.schedule()
            plan = StepPlan.from_bytes(step.kv_connector_metadata.plan)
            filled = {block for load in plan.loads for block in load.block_ids}
            loop.update(step, loop.execute(step))
        behind = len(zeroed)
        run_all(loop)
        assert not any(filled & each for each in zeroed[behind:])
        assert loop.tokens["again"] == right_answer(tokens, 4)
        assert loop.left_over() == []
