"""Engines at random: requests that share prefixes come, with tickets or without, some of which turn loading or storing
off and some of which go before others, are aborted and preempted, while the node loses pages, hangs, dies and comes
back. Every answer must be right, and in the end nothing is held.

``RANDOM_LIVES`` says how many of each kind.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import KVStoreError
from kvstore.layout import Layout

pytest.importorskip("vllm", reason="drives vLLM, which is not installed (make test-vllm)")

from tests.vllm.engine import transfer_config
from tests.vllm.loop import BLOCK_SIZE, Loop, right_answer, run_all, run_until

LIVES = int(os.environ.get("RANDOM_LIVES", "2"))
OPERATIONS = 100
DEADLINES = {"lookup_budget_ms": 20, "load_deadline_ms": 200, "store_deadline_ms": 200}


class Life:
    """A node and an engine on it, and what happens to them."""

    def __init__(self, seed: int, node: Any, make_loop: Callable[[], Loop]) -> None:
        self.random = random.Random(seed)
        self.node = node
        self.make_loop = make_loop
        self.loop = make_loop()
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.done: dict[str, int] = {}
        self.count = 0
        self.serves = True
        self.trunks = [[self.random.randrange(2, 1000) for _ in range(320)] for _ in range(4)]

    def run(self) -> None:
        operations = [
            (25, self.ask),
            (40, self.step),
            (6, self.abort),
            (4, self.forget),
            (12, self.lose_pages),
            (2, self.pause),
            (8, self.resume),
            (2, self.kill),
            (1, self.another_engine),
        ]
        for _ in range(OPERATIONS):
            (operation,) = self.random.choices([each for _, each in operations], [weight for weight, _ in operations])
            operation()
        self.resume()
        self.finish()

    def ask(self) -> None:
        for _ in range(self.random.randrange(1, 5)):
            self.count += 1
            name = f"request-{self.count}"
            prompt = self.random.choice(self.trunks)[: self.random.choice([1, 31, 32, 33, 64, 100, 160, 200, 256, 300])]
            if self.random.random() < 0.4:
                prompt = [*prompt, *(self.random.randrange(2, 1000) for _ in range(self.random.randrange(1, 60)))]
            max_tokens = self.random.choice([1, 2, 5, 40, 70])
            params: dict[str, Any] | None = None
            kind = self.random.random()
            tickets = [each for each, given in self.loop.params.items() if given]
            if kind < 0.2:
                params, max_tokens = {"do_remote_decode": True}, 1
            elif kind < 0.5 and tickets:
                ticket = self.random.choice(tickets)
                prompt, params = self.asked[ticket][0], self.loop.params[ticket]
            elif kind < 0.7:
                params = {self.random.choice(["kvstore_load", "kvstore_store"]): False}
            self.asked[name] = prompt, max_tokens
            scored = 1 if self.random.random() < 0.05 else None
            priority = self.random.randrange(3)
            self.loop.add(name, prompt, max_tokens=max_tokens, params=params, prompt_logprobs=scored, priority=priority)

    def step(self) -> None:
        for _ in range(self.random.randrange(1, 12)):
            self.loop.step()

    def abort(self) -> None:
        if alive := [name for name in self.loop.requests if name not in self.loop.finished]:
            self.loop.abort(self.random.choice(alive))

    def forget(self) -> None:
        self.loop.scheduler.reset_prefix_cache()  # refused while requests run

    def lose_pages(self) -> None:
        """Between the plan of a step and its execution; of a request that is to load some, if there is one."""
        step = self.loop.schedule()
        self.loop.catch_up()
        if self.serves:
            loading = [r for r in self.loop.requests.values() if r.status.name == "WAITING_FOR_REMOTE_KVS"]
            tokens = self.random.choice(loading).prompt_token_ids if loading else self.random.choice(self.trunks)
            self.evict(kvstore.hash_blocks(tokens, BLOCK_SIZE))
        self.loop.update(step, self.loop.execute(step))

    def evict(self, hashes: list[bytes]) -> None:
        start = self.random.randrange(len(hashes) + 1)
        with suppress(KVStoreError), kvstore.connect(self.node.url, timeout=10.0) as client:
            for each in client.status().namespaces:
                namespace = client.namespace(Layout.from_json(each.layout))
                if self.random.random() < 0.1:
                    namespace.clear()
                elif hashes[start : start + 3]:
                    namespace.evict(hashes[start : start + 3])

    def pause(self) -> None:
        if self.serves:
            self.node.pause()
            self.serves = False

    def resume(self) -> None:
        if not self.serves:
            self.node.resume()
            self.serves = True

    def kill(self) -> None:
        self.resume()
        self.node.kill()
        self.step()
        self.node.start()

    def another_engine(self) -> None:
        self.resume()
        self.finish()
        self.loop.close()
        self.loop = self.make_loop()

    def finish(self) -> None:
        """Every request ends, rightly, and nothing is held."""
        run_all(self.loop)
        for name, why in self.loop.finished.items():
            right = right_answer(*self.asked[name])
            told = self.loop.tokens[name]
            assert told == (right if why == "length" else right[: len(told)]), f"{name} ended by {why}"
            self.done[why] = self.done.get(why, 0) + 1
        assert set(self.loop.finished) == set(self.loop.requests)
        run_until(self.loop, lambda: not self.loop.left_over())


@pytest.fixture
def make_loop(models: Callable[[str], Path], key: Path) -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def make(node: Any, kind: str, async_load: bool, caching: bool, overlap: bool, policy: str, runner: str) -> Loop:
        loops.append(
            Loop(
                models("llama"),
                transfer_config(node.url, async_load=async_load, ticket_key_file=str(key), **DEADLINES),
                num_blocks=26,
                kind=kind,
                overlap=overlap,
                runner=runner,
                enable_prefix_caching=caching,
                max_num_batched_tokens=96,
                max_num_seqs=6,
                scheduling_policy=policy,
            )
        )
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


@pytest.mark.parametrize("seed", range(LIVES))
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "one by one"])
@pytest.mark.parametrize(
    ("kind", "async_load"),
    [
        ("full", True),
        ("full", False),
        ("mixed", True),
        ("hybrid", True),
        ("window", True),
        ("states", True),
        ("recurrent", True),
    ],
    ids=["full-async", "full-sync", "mixed", "hybrid", "window", "states", "recurrent"],
)
def test_every_answer_is_right_and_nothing_is_left(
    node_process: Callable[..., Any],
    make_loop: Callable[..., Loop],
    kind: str,
    async_load: bool,
    overlap: bool,
    runner: str,
    seed: int,
) -> None:
    node = node_process(arena="3MiB")
    caching = kind in ("states", "recurrent") or bool(seed % 2)  # vLLM keeps no states without it
    policy = "priority" if (seed + seed // 2 + overlap) % 2 else "fcfs"
    life = Life(seed, node, lambda: make_loop(node, kind, async_load, caching, overlap, policy, runner))
    try:
        life.run()
    finally:
        life.resume()
    assert life.done.get("length", 0) > 10
    assert set(life.done) <= {"length", "abort"}
