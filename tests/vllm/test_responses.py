"""Answers to similar prompts before real servers: two proxies, one Redis, a chat model in two instances, and an
embedding model.

Both models have random weights. That parts fit together is shown; how good answers and embeddings are is not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proxy_process import CHAT, ProxyProcess
from redis_servers import RedisServer, wait_until

from kvstore.responses.embedding.api import ApiEmbedder
from kvstore.responses.semantic.guards import Likeness, compare
from kvstore.responses.semantic.reading import read_prompt
from tests.vllm.server import ServerProcess

PROMPTS = (
    "How do I delete a file ?",
    "How do I remove a file ?",
    "How do I erase a file ?",
    "How do I delete files ?",
)
OTHER = "How do I reset my router ?"
PLACES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
PATIENCE_MS = 60_000


@pytest.fixture
def servers(models: Callable[[str], Path], tmp_path: Path) -> Iterator[tuple[ServerProcess, ...]]:
    """A chat model, for prefill and for decode, and an embedding model."""
    folder = models("chat")
    flags = {"prefill": (), "decode": (), "embedding": ("--runner", "pooling", "--convert", "embed")}
    started = [ServerProcess(folder, tmp_path / f"{name}.log", words=True, flags=each) for name, each in flags.items()]
    try:
        for each in started:
            each.launch()
        for each in started:
            each.wait_ready()
        yield tuple(started)
    finally:
        for each in started:
            each.kill()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.close()


def ask(proxy: ProxyProcess, place: str, text: str, **fields: Any) -> tuple[str, str]:
    """What the cache says, and the answer. The model is made to say always the same."""
    turns = [{"role": "system", "content": f"place {place}"}, {"role": "user", "content": text}]
    body = {"model": "model", "messages": turns, "temperature": 0, "max_tokens": 3, "logit_bias": {"5": 100}}
    connection = proxy.open("POST", CHAT, body | fields)
    try:
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return response.headers.get("X-KVStore-Cache", ""), json.loads(content)["choices"][0]["message"]["content"]
    finally:
        connection.close()


def pairs_by_similarity(embedding: ServerProcess) -> list[tuple[str, str]]:
    """The least similar first."""
    embed = ApiEmbedder(f"{embedding.url}/v1", "model", 60.0)
    vectors = {text: embed(text) for text in PROMPTS}
    embed.close()

    def similarity(pair: tuple[str, str]) -> float:
        one, other = (vectors[text] for text in pair)
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    ordered = sorted(itertools.combinations(PROMPTS, 2), key=similarity)
    # Outcomes tell of what is more similar than they are.
    assert similarity(ordered[0]) + 0.02 < similarity(ordered[-1])
    return ordered


def test_similar_prompts_are_found_by_a_served_embedding_and_computed_without_it(
    servers: tuple[ServerProcess, ...], redis: RedisServer, tmp_path: Path
) -> None:
    prefill, decode, embedding = servers
    ordered = pairs_by_similarity(embedding)
    for one, other in ordered:
        assert compare(read_prompt(one), read_prompt(other)).likeness is Likeness.SAME_WORDS
    flags = {
        "responses": redis.url,
        "responses_plain": True,
        "responses_deadline": PATIENCE_MS,
        "responses_similar": 40,
        "responses_shadow": 0.000001,
        "responses_compare": "short",
        "responses_embedding": f"{embedding.url}/v1",
        "responses_embedding_model": "model",
        "responses_embedding_deadline": 10_000,
    }
    proxies: list[ProxyProcess] = []
    try:
        for number in (1, 2):
            proxies.append(ProxyProcess([prefill], [decode], tmp_path / f"proxy{number}.log", None, **flags))
        one, other = proxies
        stored = 0

        def computed(proxy: ProxyProcess, place: str, text: str) -> str:
            said, answer = ask(proxy, place, text)
            assert said == ""
            nonlocal stored
            stored += 1
            wait_until(lambda: sum(metric(each, 'kept_total{outcome="stored"}') for each in proxies) == stored)
            return answer

        for place, proxy in zip(PLACES, itertools.cycle(proxies), strict=False):  # nothing is known of the embedding
            for text in ordered[0]:
                computed(proxy, place, text)
        wait_until(
            lambda: sum(metric(each, 'similar_outcomes_total{outcome="right"}') for each in proxies) == len(PLACES)
        )
        first = computed(one, "told", ordered[-1][0])

        said, answer = ask(other, "told", ordered[-1][1])  # by the one that did not compute it, from what both taught
        assert said.startswith("hit; similarity=")
        assert answer == first
        assert ask(other, "told", OTHER)[0] == ""
        for each in proxies:
            assert metric(each, 'embeddings_total{outcome="made"}') > 0
            assert metric(each, 'embeddings_total{outcome="failed"}') == 0
            assert metric(each, "embedding_seconds_count") > 0

        embedding.kill()
        assert ask(other, "told", ordered[-1][0])[0].startswith("hit; similarity=1;")  # an equal one needs none
        assert ask(other, "told", "How may we reset my router ?")[0] == ""
        assert metric(other, 'embeddings_total{outcome="failed"}') == 1
    finally:
        for each in proxies:
            each.kill()


def metric(proxy: ProxyProcess, name: str) -> int:
    return proxy.metric(name, "kvstore_responses_")
