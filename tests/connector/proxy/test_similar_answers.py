"""``kvstore proxy --responses-similar``: the whole way, with real instances' servers."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai_instance import OpenAIInstance
from proxy_process import CHAT, ProxyProcess
from redis_servers import wait_until

from kvstore.cli.main import main

FIRST, SIMILAR = "How do I reset my password?", "How can I reset my password?"


def ask(proxy: ProxyProcess, text: str, key: str = "k", **fields: Any) -> tuple[str, bytes]:
    """What the cache says, and the body."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    connection = proxy.open("POST", CHAT, body, Authorization=f"Bearer {key}")
    try:
        response = connection.getresponse()
        assert response.status == 200
        return response.headers.get("X-KVStore-Cache", ""), response.read()
    finally:
        connection.close()


@pytest.fixture
def front(
    instance: Callable[..., OpenAIInstance], proxy: Callable[..., ProxyProcess], tmp_path: Path
) -> Callable[..., tuple[ProxyProcess, OpenAIInstance]]:
    """A proxy that answers similar prompts, and the instance behind it."""

    def start(**flags: object) -> tuple[ProxyProcess, OpenAIInstance]:
        decode = instance("d", "finished")
        given: dict[str, object] = {
            "responses": tmp_path / "r.sqlite",
            "responses_plain": True,
            "responses_deadline": 30_000,
            "responses_similar": 2,
            "responses_compare": "short",
        }
        return proxy([instance("p")], [decode], **given | flags), decode

    return start


def metric(proxy: ProxyProcess, name: str) -> float:
    return proxy.metric(name, "kvstore_responses_")


def stored(proxy: ProxyProcess, count: int) -> None:
    wait_until(lambda: metric(proxy, 'kept_total{outcome="stored"}') == count)


def test_a_similar_prompt_is_told_the_answer_and_says_so(front):
    proxy, decode = front(responses_shadow=0.000001)
    said, first = ask(proxy, FIRST)
    assert said == ""
    stored(proxy, 1)
    said, again = ask(proxy, SIMILAR)
    assert said.startswith("hit; similarity=0.")
    assert json.loads(again)["choices"] == json.loads(first)["choices"]
    said, events = ask(proxy, SIMILAR, stream=True)
    assert said.startswith("hit; similarity=0.")
    assert events.endswith(b"data: [DONE]\n\n")
    assert ask(proxy, "How can't I reset my password?")[0] == ""
    assert metric(proxy, "similar_hits_total") == 2
    assert len(decode.seen()) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_answer_is_noticed_removed_and_nothing_more_is_told(front, stream):
    """The instance answers by the prompt's bytes, so that what a similar one is told is always wrong."""
    proxy, decode = front(responses_shadow=100)
    for number in (1, 2, 3):
        assert metric(proxy, "similar_open") == 1
        ask(proxy, FIRST, key=f"k{number}")
        stored(proxy, number)
        assert ask(proxy, SIMILAR, key=f"k{number}", stream=stream)[0].startswith("hit; similarity=0.")
        wait_until(lambda: metric(proxy, 'similar_shadows_total{outcome="wrong"}') == number)  # noqa: B023
    assert len(decode.seen()) == 6
    assert metric(proxy, "similar_open") == 0
    assert metric(proxy, "similar_shut") == 1
    assert ask(proxy, SIMILAR, key="k1")[0] == ""
    assert "similar prompts are computed from now on" in proxy.log.read_text()

    proxy.process.send_signal(signal.SIGUSR1)  # without a restart
    wait_until(lambda: metric(proxy, "similar_open") == 1)
    assert metric(proxy, "similar_shut") == 0
    ask(proxy, FIRST, key="k4")
    stored(proxy, 5)
    assert ask(proxy, SIMILAR, key="k4")[0].startswith("hit; similarity=0.")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--responses-compare", "short"], "give --responses-similar PERCENT as well"),
        (["--responses-similar", "0"], "--responses-similar must be above 0 and at most 50 percent, got 0"),
        (["--responses-similar", "2", "--responses-shadow", "0"], "--responses-shadow must be above 0"),
        (["--responses-similar", "2", "--responses-compare", "ftp://x"], "is short or a URL"),
        (["--responses-similar", "2", "--responses-compare", "http://x/v1"], "needs --responses-judge-model"),
        (["--responses-similar", "2", "--responses-judge-model", "m"], "are for a model that judges"),
        (["--responses-embedding", "lexical"], "--responses-embedding is for similar prompts"),
        (["--responses-similar", "2", "--responses-embedding", "http://x/v1"], "needs --responses-embedding-model"),
        (
            ["--responses-similar", "2", "--responses-embedding", "http://a:b", "--responses-embedding-model", "m"],
            "no URL",
        ),
        (["--responses-similar", "2", "--responses-embedding", "ftp://x"], "a URL with http:// or https://"),
        (["--responses-similar", "2", "--responses-embedding", "/nowhere"], "/nowhere is no folder"),
        (["--responses-similar", "2", "--responses-embedding-model", "m"], "are for an API"),
        (["--responses-similar", "2", "--responses-embedding-deadline", "5"], "is for a model"),
        (
            [
                "--responses-similar",
                "2",
                "--responses-embedding",
                "http://x/v1",
                "--responses-embedding-model",
                "m",
                "--responses-embedding-deadline",
                "0",
            ],
            "--responses-embedding-deadline must be above 0 and at most 10000, got 0",
        ),
    ],
)
def test_flags_that_can_not_be_used_are_refused(tmp_path, flags, words):
    given = ["proxy", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--responses-plain"]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main([*given, "--responses", str(tmp_path / "r.sqlite"), *flags])
    assert code == 2, errors.getvalue()
    assert words in " ".join(errors.getvalue().split())
