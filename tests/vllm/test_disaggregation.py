"""Prefill and decode by vLLM instances of their own, with the proxy before them."""

from __future__ import annotations

import http.client
import json
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import ROOT, NodeProcess

from tests.vllm.engine import transfer_config

PATIENCE = 240.0
MAX_TOKENS = 8


class Proxy:
    """``kvstore proxy`` as a process, and a client of it."""

    def __init__(self, prefill: str, decode: str, log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvstore.cli", "proxy", "--listen", "127.0.0.1:0"),
                    *("--prefill", prefill, "--decode", decode),
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        ready = re.search(r":(\d+) \(", self.process.stdout.readline() if readable else "")
        assert ready, log.read_text()
        self.port = int(ready[1])

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, tokens: list[int], **fields: Any) -> tuple[int, bytes]:
        request = {"model": "model", "prompt": tokens, "max_tokens": MAX_TOKENS, "temperature": 0.0}
        return self.ask("POST", "/v1/completions", request | {"ignore_eos": True, "return_token_ids": True} | fields)

    def answer(self, tokens: list[int]) -> tuple[int, ...]:
        status, body = self.complete(tokens)
        assert status == 200, (status, body)
        return tuple(json.loads(body)["choices"][0]["token_ids"])

    def stream(self, tokens: list[int]) -> tuple[int, ...]:
        """The same, token by token."""
        status, body = self.complete(tokens, stream=True)
        events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
        assert (status, events.pop()) == (200, b"[DONE]")
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return tuple(token for choice in choices for token in choice["token_ids"])

    def metric(self, line: str) -> int:
        found = re.search(rf"^kvstore_proxy_{re.escape(line)} (\d+)$", self.ask("GET", "/metrics")[1].decode(), re.M)
        return int(found[1]) if found else 0

    def all_in_service(self) -> bool:
        return all(each["in_service"] for each in json.loads(self.ask("GET", "/health")[1])["instances"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def start_proxy(tmp_path: Path) -> Iterator[Callable[[str, str], Proxy]]:
    started: list[Proxy] = []

    def start(prefill: str, decode: str) -> Proxy:
        started.append(Proxy(prefill, decode, tmp_path / "proxy.log"))
        return started[-1]

    yield start
    for proxy in started:
        proxy.kill()


def external_hits(server: Any) -> float:
    """Tokens that a server has loaded."""
    return sum(
        map(float, re.findall(r"^vllm:external_prefix_cache_hits_total\{[^}]*\} (\S+)$", server.metrics(), re.M))
    )


def test_instances_killed_and_restarted_in_turn_under_load(
    node: NodeProcess,
    start_server: Callable[..., Any],
    start_proxy: Callable[[str, str], Proxy],
    start_engine: Callable[..., Any],
    prompt: Callable[..., list[int]],
    key: Path,
) -> None:
    prompts = [prompt(150 + 37 * seed, seed) for seed in range(12)]
    with start_engine() as plain:
        expected = [tuple(tokens) for tokens in plain.run(prompts, max_tokens=MAX_TOKENS).tokens]
    transfer = transfer_config(node.url, ticket_key_file=str(key))
    prefill, decode = (start_server(transfer=transfer, ready=False) for _ in range(2))
    prefill.wait_ready()
    decode.wait_ready()
    proxy = start_proxy(prefill.url, decode.url)

    # Nobody dies: decode computes the last token of each prompt alone, or, where prefill's process was late with the
    # partial block, the few tokens of that.
    for tokens, right in zip(prompts, expected, strict=True):
        assert proxy.answer(tokens) == right
    assert proxy.metric('prefills_total{outcome="ticket"}') == len(prompts)
    whole = sum(len(tokens) // 32 * 32 for tokens in prompts)
    assert whole < external_hits(decode) <= sum(len(tokens) - (len(tokens) % 32 > 0) for tokens in prompts)
    assert external_hits(prefill) == 0
    assert re.search(rf'^vllm:kvstore_tickets_total\{{.*result="taken".*\}} {len(prompts)}\.0$', decode.metrics(), re.M)
    assert proxy.stream(prompts[0]) == expected[0]

    stop = threading.Event()
    wrong: list[object] = []
    answered = [0, 0]

    def load(client: int) -> None:
        while not stop.is_set():
            place = (answered[client] + 5 * client) % len(prompts)
            try:
                status, body = proxy.complete(prompts[place])
                tokens = tuple(json.loads(body)["choices"][0]["token_ids"]) if status == 200 else body
            except OSError as error:
                tokens = repr(error).encode()
            if tokens != expected[place]:
                wrong.append((place, tokens))
            answered[client] += 1
            stop.wait(0.3)  # the processors are wanted for the restart, too

    def wait_for_more() -> None:
        ends = [count + 5 for count in answered]
        end = time.monotonic() + PATIENCE
        while not all(count >= target for count, target in zip(answered, ends, strict=True)):
            assert time.monotonic() < end, "no answers any more"
            time.sleep(0.05)

    clients = [threading.Thread(target=load, args=(client,)) for client in range(2)]
    for client in clients:
        client.start()
    try:
        for victim in (decode, prefill):
            wait_for_more()
            victim.kill()
            wait_for_more()
            victim.launch()
            end = time.monotonic() + 3 * PATIENCE
            while not proxy.all_in_service():
                assert time.monotonic() < end, victim.printed()[-2000:]
                time.sleep(0.5)
        wait_for_more()
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert wrong == []
    assert proxy.metric("answered_plainly_total") > 0
    assert proxy.metric('prefills_total{outcome="ticket"}') > len(prompts)
    assert external_hits(decode) > 0
