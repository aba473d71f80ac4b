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


def ask(proxy: ProxyProcess, text: str, key: str = "", **fields: Any) -> tuple[str, bytes]:
    """What the cache says, and the body."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    connection = proxy.open("POST", CHAT, body, **{"Authorization": f"Bearer {key}"} if key else {})
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
    """Proxies that answer similar prompts, and the instance behind them."""
    prefill, decode = instance("p"), instance("d", "finished")

    def start(**flags: object) -> tuple[ProxyProcess, OpenAIInstance]:
        given: dict[str, object] = {
            "responses": tmp_path / "r.sqlite",
            "responses_deadline": 30_000,
            "responses_similar": 2,
            "responses_compare": "short",
        }
        given |= {} if "responses_key_file" in flags else {"responses_plain": True}
        return proxy([prefill], [decode], **given | flags), decode

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


def command(*words: str) -> str:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        assert main(["responses", *words]) == 0, errors.getvalue()
    return out.getvalue()


QUIET = {"responses_shadow": 0.000001}


def test_two_proxies_on_a_redis_know_the_same_and_deletes_reach_both(front, redis, key_file):
    shared = QUIET | {"responses": redis.url, "responses_key_file": key_file}
    first, second = front(**shared)[0], front(**shared)[0]
    api_key = key_file.parent / "api.key"
    api_key.write_text("my-key")
    for number, chosen in enumerate(("model", "api-key", "entry", "all")):
        asked = {"key": "my-key", "model": "m", "seed": number}
        kept = metric(first, 'kept_total{outcome="stored"}')
        assert ask(first, FIRST, **asked)[0] == ""
        stored(first, kept + 1)
        said, _ = ask(second, SIMILAR, **asked)
        assert said.startswith("hit; similarity=0.")
        entry = said.rpartition("=")[2]
        assert ask(second, SIMILAR, **asked | {"key": "other-key"})[0] == ""
        flags = {
            "model": ["--model", "m"],
            "api-key": ["--api-key-file", str(api_key), "--key-file", str(key_file)],
            "entry": ["--entry", entry],
            "all": ["--all"],
        }
        assert command("delete", *flags[chosen], "--store", redis.url) != "0 deleted\n"
        assert ask(second, SIMILAR, **asked)[0] == "", chosen
        assert entry not in ask(first, FIRST, **asked)[0], chosen


def test_a_shadow_check_of_one_proxy_shuts_the_other(front, redis):
    """The instance answers by the prompt's bytes, so that what a similar one is told is always wrong."""
    first, _ = front(responses=redis.url, responses_shadow=100)
    second, _ = front(responses=redis.url, responses_shadow=0.000001)
    keys = ["k1", "k2", "k3"]
    for number, key in enumerate(keys, 1):
        ask(first, FIRST, key)
        stored(first, number)
        assert ask(first, SIMILAR, key)[0] != ""
        wait_until(lambda: metric(first, 'similar_shadows_total{outcome="wrong"}') == number)  # noqa: B023 - at once
    assert (metric(first, "similar_open"), metric(second, "similar_open")) == (0, 1)
    wait_until(lambda: json.loads(command("status", "--json", "--store", redis.url))["outcomes"] == 3)
    for key in keys:
        assert ask(second, SIMILAR, key)[0] == ""
    assert metric(second, "similar_open") == 0


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_killed_proxy_has_lost_nothing_that_was_stored(front, tmp_path, key_file, kind, request):
    where = request.getfixturevalue("redis").url if kind == "redis" else tmp_path / "r.sqlite"
    given = QUIET | {"responses": where, "responses_key_file": key_file}
    proxy, _ = front(**given)
    ask(proxy, FIRST)
    stored(proxy, 1)
    ask(proxy, "How do I reset my router?")
    stored(proxy, 2)
    wait_until(lambda: metric(proxy, 'similar_outcomes_total{outcome="wrong"}') == 1)
    store = ["--store", str(where)]
    wait_until(lambda: json.loads(command("status", "--json", *store))["outcomes"] == 1)
    proxy.kill()
    again, _ = front(**given)
    assert ask(again, SIMILAR)[0].startswith("hit; similarity=0.")
    assert json.loads(command("status", "--json", *store))["prompts"] == 2


def test_a_redis_that_goes_and_comes_back_empty_costs_computations(front, redis):
    proxy, _ = front(responses=redis.url, responses_shadow=0.000001)
    ask(proxy, FIRST)
    stored(proxy, 1)
    assert ask(proxy, SIMILAR)[0] != ""
    redis.kill()
    for _ in range(5):
        assert ask(proxy, SIMILAR)[0] == ""
    redis.start()

    wait_until(lambda: ask(proxy, FIRST)[0].startswith("hit; similarity=1;"))
    assert ask(proxy, "How could I reset my password?")[0].startswith("hit; similarity=0.")


def test_the_command_tells_of_similar_prompts_and_explains_them(front, tmp_path, key_file):
    proxy, _ = front(**QUIET, responses_key_file=key_file)
    ask(proxy, FIRST, model="m")
    stored(proxy, 1)
    ask(proxy, "How do I reset my router?\x1b", model="m")
    stored(proxy, 2)
    wait_until(lambda: metric(proxy, 'similar_outcomes_total{outcome="wrong"}') == 1)
    store = ["--store", str(tmp_path / "r.sqlite")]
    wait_until(lambda: json.loads(command("status", "--json", *store))["outcomes"] == 1)
    assert "2 of them may be found by similar prompts; 1 outcomes of comparisons" in command("status", *store)
    listed = [json.loads(line) for line in command("list", "--json", *store).splitlines()]
    assert listed[0]["group"] == listed[1]["group"]
    assert f" {listed[0]['group'][:8]} " in command("list", *store)

    def explain(text: str, *flags: str, **fields: Any) -> str:
        asked = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0} | fields
        given = command("explain", json.dumps(asked), "--key-file", str(key_file), *store, *flags)
        return " ".join(given.split())

    entry = ask(proxy, SIMILAR, model="m")[0].rpartition("=")[2]
    told = explain(SIMILAR)
    assert f"told what {entry} was told: the best one would be wrong with a probability of" in told
    assert "How do I reset my password?" in told
    assert "How do I reset my router?\N{REPLACEMENT CHARACTER}" in told
    assert "0 right, 1 wrong" in told
    assert "same text" in told
    said = json.loads(explain(SIMILAR, "--json"))
    assert (said["similar"]["told"], said["similar"]["candidates"][0]["entry"], said["found"]) == (entry, entry, None)
    assert said["similar"]["candidates"][0]["wrong"] <= 0.02 < said["similar"]["candidates"][1]["wrong"]
    assert "above" not in told
    assert "it is computed: the best one (they differ in words) would be wrong" in explain("How do I reset my phone?")
    refused = explain("Don't I reset my password?")
    assert "computed: guards refuse all that are near" in refused
    assert "refused: negations" in refused
    assert "no prompt is kept that has everything else in common" in explain(SIMILAR, model="n")
    for fields, words in (
        ({"tools": [{"type": "function"}]}, "it has tools"),
        ({"n": 2}, "it asks for 2 choices"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "end with a user's"),
        ({"messages": [{"role": "user", "content": "a" * 4001}]}, "has 4001 characters, and 1 to 4000"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "more than text"),
    ):
        assert words in explain("", **fields)
    assert "and the bound is 0.01 %" in explain(SIMILAR, "--similar", "0.01")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert main(["responses", "explain", "{}", "--plain", "--similar", "51", *store]) == 2
    assert "--similar must be above 0 and at most 50 percent, got 51" in errors.getvalue()
    with contextlib.redirect_stderr(errors):
        asked = json.dumps({"model": "m", "messages": [{"role": "user", "content": SIMILAR}], "temperature": 0})
        api = ["--embedding", "http://127.0.0.1:1/v1", "--embedding-model", "e"]
        assert main(["responses", "explain", asked, "--key-file", str(key_file), *store, *api]) == 1
    assert "the prompt has no embedding: " in " ".join(errors.getvalue().split())


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
