"""Prefill and decode as processes of their own, beside real nodes, killed in between."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

pytest.importorskip("torch", reason="the reference engine needs torch")

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/compose/engine_client.py"
PATIENCE = 90.0
TOKENS = 323
"""Of each of the script's prompts: 20 full blocks and 3 tokens."""
GIVE = {"do_remote_decode": True}


class EngineProcess:
    """The script that the tests in containers run, here."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(SCRIPT), *arguments],
                cwd=ROOT,
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        reply: dict[str, Any] = json.loads(self._lines.get(timeout=PATIENCE))
        return reply

    def answer(self, prompt: int, **options: Any) -> dict[str, Any]:
        self.send(prompt=prompt, **options)
        return self.receive()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    started: list[EngineProcess] = []

    def start(*arguments: str) -> EngineProcess:
        started.append(EngineProcess(tmp_path / "log", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.fixture
def nodes(short_folder: Path, shm_folder: Path) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """One for each of two hosts."""
    started = []
    for name in ("1", "2"):
        for folder in (short_folder, shm_folder):
            (folder / name).mkdir()
        started.append(NodeProcess(short_folder / name, shm_folder / name))
        started[-1].start()
    yield started[0], started[1]
    for node in started:
        node.kill()


@pytest.mark.timeout(300)
def test_two_hosts_whose_parts_are_killed_in_turn(engine, nodes, eventually):
    first, second = nodes

    def start_prefill() -> EngineProcess:
        return engine(first.url, "host 1")

    def start_decode() -> EngineProcess:
        return engine(second.url, "host 2", f"host 1={first.kv_url}")

    prefill, decode = start_prefill(), start_decode()
    right: dict[int, list[int]] = {}

    def check(prompt: int, answer: dict[str, Any]) -> dict[str, Any]:
        if prompt not in right:
            plain = decode.answer(prompt, plain=True)
            assert plain["gap"] > 1e-4, "rounding could decide between two tokens"
            right[prompt] = plain["tokens"]
        assert answer["tokens"] == right[prompt]
        return answer

    def hand_over(prompt: int) -> dict[str, Any]:
        ticket = prefill.answer(prompt, transfer=GIVE)["ticket"]
        return check(prompt, decode.answer(prompt, transfer=ticket))

    # Nothing is killed: only the last token is computed, and what is said of eight tokens.
    whole = hand_over(100)
    assert (whole["loaded"], whole["computed"]) == (TOKENS - 1, 8)

    # Prefill dies with its answer: what it had not stored by then is computed.
    prefill.send(prompt=200, transfer=GIVE)
    ticket = prefill.receive()["ticket"]
    prefill.kill()
    check(200, decode.answer(200, transfer=ticket))
    prefill = start_prefill()
    assert hand_over(300)["loaded"] == TOKENS - 1

    # The node with the pages dies: they are computed, and when it is back its pages are.
    ticket = prefill.answer(400, transfer=GIVE)["ticket"]
    first.kill()
    assert check(400, decode.answer(400, transfer=ticket))["loaded"] == 0
    first.start()
    again = iter(range(10_000, 10**6, 100))
    eventually(lambda: hand_over(next(again))["loaded"] == TOKENS - 1, "prompts are handed over again")

    # Decode dies in the middle, and another one answers with the same ticket.
    ticket = prefill.answer(700, transfer=GIVE)["ticket"]
    decode.send(prompt=700, transfer=ticket)
    decode.kill()
    decode = start_decode()
    assert check(700, decode.answer(700, transfer=ticket))["loaded"] >= TOKENS // 16 * 16

    # Decode's own node dies: that is where it stores, and not where it loads from.
    ticket = prefill.answer(800, transfer=GIVE)["ticket"]
    second.kill()
    assert check(800, decode.answer(800, transfer=ticket))["loaded"] == TOKENS - 1
    second.start()
    assert hand_over(900)["loaded"] == TOKENS - 1


@pytest.mark.timeout(300)
def test_one_node_for_both_that_is_killed_at_random_moments(engine, node_process, eventually):
    node = node_process()
    prefill, decode = engine(node.url, "n"), engine(node.url, "n")
    for each in (prefill, decode):
        each.answer(-1)  # it has found the node
    rng = random.Random(7)
    prompts = iter(range(1000, 10**6, 100))  # those of the same hundred have their first pages in common

    def hand_over() -> int:
        """How many tokens came."""
        prompt = next(prompts)
        answer = decode.answer(prompt, transfer=prefill.answer(prompt, transfer=GIVE)["ticket"])
        assert answer["tokens"] == decode.answer(prompt, plain=True)["tokens"]
        return int(answer["loaded"])

    for _ in range(3):
        eventually(lambda: hand_over() == TOKENS - 1, "prompts are handed over")
        killer = threading.Timer(rng.uniform(0.0, 0.25), node.kill)
        killer.start()
        while killer.is_alive():
            hand_over()
        node.start()
    eventually(lambda: hand_over() == TOKENS - 1, "prompts are handed over")
