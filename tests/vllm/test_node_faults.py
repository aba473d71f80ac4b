"""Whatever happens to the node, every request finishes, with the tokens of a run without kvstore."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from node_process import NodeProcess

from tests.vllm.engine import transfer_config

KILLS = 10
DEADLINES = {"load_deadline_ms": 500, "store_deadline_ms": 500}


@pytest.fixture
def prompts(prompt: Callable[..., list[int]]) -> list[list[int]]:
    """Fifty, of ten conversations: five that share a beginning each."""
    return [prompt(100, seed % 10) + prompt(16 * seed, 100 + seed) for seed in range(50)]


def finished(answers: Any) -> bool:
    return all(answer.finish == "length" for answer in answers.answers)


@pytest.mark.parametrize("async_load", [True, False], ids=["async", "sync"])
def test_killed_ten_times_at_random_moments_of_a_run(
    node_process: Callable[..., NodeProcess],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompts: list[list[int]],
    async_load: bool,
) -> None:
    expected = plain(prompts, max_tokens=40)
    node = node_process(arena="32MiB", disk_limit="256MiB")
    engine = start_engine(transfer=transfer_config(node.url, async_load=async_load, **DEADLINES))
    moments = random.Random(1)
    hits = kills = 0
    with ThreadPoolExecutor(1) as pool:
        while kills < KILLS:
            run = pool.submit(engine.run, prompts, max_tokens=40, concurrency=4)
            while not run.done() and kills < KILLS:
                time.sleep(moments.uniform(0.0, 1.5))
                node.kill()
                kills += 1
                time.sleep(moments.uniform(0.0, 0.5))
                node.start()
            answers = run.result()
            assert finished(answers)
            assert answers.tokens == expected.tokens
            hits += answers.external_hits
            engine.forget()
    end = time.monotonic() + 60
    while True:  # each load may have met a kill, and the node is asked again some time after the last one
        answers = engine.run(prompts, max_tokens=40)
        assert answers.tokens == expected.tokens
        if hits + answers.external_hits > 0:
            break
        assert time.monotonic() < end
        engine.forget()
    engine.drain()
    assert engine.state()["blocks_in_use"] == 0
    engine.close()


def test_never_there_then_there(
    node_process: Callable[..., NodeProcess],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompts: list[list[int]],
) -> None:
    expected = plain(prompts)
    node = node_process(ready=False, arena="64MiB", disk_limit="256MiB")
    engine = start_engine(transfer=transfer_config(node.url, **DEADLINES))
    assert engine.run(prompts).tokens == expected.tokens
    node.start()
    end = time.monotonic() + 60
    while True:  # it is found by itself
        engine.forget()
        answers = engine.run(prompts)
        assert answers.tokens == expected.tokens
        if answers.external_hits > 1000:
            break
        assert time.monotonic() < end
    engine.close()


def test_stopped_and_woken_up(
    node_process: Callable[..., NodeProcess],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompts: list[list[int]],
) -> None:
    expected = plain(prompts)
    node = node_process(arena="64MiB", disk_limit="256MiB")
    engine = start_engine(transfer=transfer_config(node.url, **DEADLINES))
    assert engine.run(prompts[:25]).tokens == expected.tokens[:25]
    engine.forget()
    node.pause()
    stopped = engine.run(prompts)
    assert finished(stopped)
    assert stopped.tokens == expected.tokens
    engine.drain()
    assert engine.state()["blocks_in_use"] == 0
    node.resume()
    end = time.monotonic() + 60
    while True:
        engine.forget()
        answers = engine.run(prompts)
        assert answers.tokens == expected.tokens
        if answers.external_hits > 1000:
            break
        assert time.monotonic() < end
    engine.close()


def test_so_small_that_pages_leave_all_the_time(
    node_process: Callable[..., NodeProcess],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompts: list[list[int]],
) -> None:
    expected = plain(prompts)
    node = node_process(arena="2MiB", disk_limit="64MiB")  # 16 pages in memory, and some prompts have 27
    engine = start_engine(transfer=transfer_config(node.url, **DEADLINES))
    for _ in range(3):
        answers = engine.run(prompts)
        assert finished(answers)
        assert answers.tokens == expected.tokens
        engine.forget()
    engine.drain()
    assert engine.state()["blocks_in_use"] == 0
    engine.close()
