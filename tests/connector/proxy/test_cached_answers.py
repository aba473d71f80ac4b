"""``kvstore proxy --responses``: the whole way, with real instances' servers, a real SQLite file and a real Redis."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import itertools
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai_instance import USAGE, OpenAIInstance, words_of
from proxy_process import CHAT, COMPLETIONS, PATIENCE, ProxyProcess
from redis_servers import wait_until

from kvstore.cli.main import main

DETERMINED = {"temperature": 0}
TEXT = "".join(words_of("hello"))


@pytest.fixture
def decode(instance: Callable[..., OpenAIInstance]) -> OpenAIInstance:
    return instance("d", "finished")


@pytest.fixture
def front(
    instance: Callable[..., OpenAIInstance],
    decode: OpenAIInstance,
    proxy: Callable[..., ProxyProcess],
    tmp_path: Path,
    key_file: Path,
) -> Callable[..., ProxyProcess]:
    """Start a proxy that keeps responses, with flags besides."""
    prefill = instance("p")

    def start(**flags: object) -> ProxyProcess:
        given: dict[str, object] = {"responses": tmp_path / "cache" / "r.sqlite", "responses_deadline": 30_000}
        given |= {} if "responses_plain" in flags else {"responses_key_file": key_file}
        return proxy([prefill], [decode], **given | flags)

    return start


def ask(proxy: ProxyProcess, path: str = COMPLETIONS, headers: dict[str, str] | None = None, **fields: Any):
    """Status, headers and body."""
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    connection = proxy.open("POST", path, prompt | DETERMINED | fields, **headers or {})
    try:
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def stored(proxy: ProxyProcess, count: int = 1) -> None:
    wait_until(lambda: proxy.metric('kept_total{outcome="stored"}', "kvstore_responses_") == count)


def hits(proxy: ProxyProcess) -> int:
    return proxy.metric('lookups_total{outcome="hit"}', "kvstore_responses_")


def is_hit(headers: Any) -> bool:
    return headers.get("X-KVStore-Cache", "").startswith("hit; similarity=1; entry=")


def events_of(body: bytes) -> list[dict[str, Any]]:
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_equal_request_is_told_the_same_answer_with_a_new_id(front, decode, path):
    proxy = front()
    status, headers, first = ask(proxy, path)
    assert (status, is_hit(headers)) == (200, False)
    stored(proxy)
    status, headers, again = ask(proxy, path)
    assert (status, is_hit(headers), headers["Content-Type"]) == (200, True, "application/json")
    assert int(headers["Age"]) >= 0
    computed, told = json.loads(first), json.loads(again)
    assert told["choices"] == computed["choices"]
    assert told["id"].startswith("chatcmpl-" if path == CHAT else "cmpl-")
    assert told["created"] > computed["created"]
    assert told["usage"] == USAGE | {"prompt_tokens_details": {"cached_tokens": 5}, "cached": True}
    assert len(decode.seen()) == 1
    assert hits(proxy) == 1
    assert proxy.metric("saved_tokens_total", "kvstore_responses_") == USAGE["total_tokens"]
    assert proxy.metric('requests_total{outcome="answered"}') == 2


def test_a_stream_and_a_body_answer_each_other(front, decode):
    proxy = front()
    for number, (path, first_streams) in enumerate(itertools.product((COMPLETIONS, CHAT), (True, False)), 1):
        answers_each_other(proxy, path, first_streams, number)
    assert len(decode.seen()) == 4


def answers_each_other(proxy: ProxyProcess, path: str, first_streams: bool, number: int) -> None:
    given = partial(ask, seed=number)
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    given(proxy, path, **streams if first_streams else {})
    stored(proxy, number)
    _, headers, body = given(proxy, path)
    assert is_hit(headers)
    choice = json.loads(body)["choices"][0]
    expected = "".join(words_of([{"role": "user", "content": "hello"}] if path == CHAT else "hello"))
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == expected
    assert choice["finish_reason"] == "stop"
    _, headers, body = given(proxy, path, **streams)
    assert is_hit(headers)
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *parts, usage = events_of(body)
    assert usage["usage"]["cached"] is True
    told = [each["choices"][0] for each in parts]
    text = "".join(each["delta"].get("content", "") if path == CHAT else each["text"] for each in told)
    assert (text, told[-1]["finish_reason"]) == (expected, "stop")
    assert len({each["id"] for each in parts}) == 1
    assert parts[0]["id"] != "theirs"
    _, headers, body = given(proxy, path, stream=True)
    assert is_hit(headers)
    assert b"usage" not in body


def test_what_may_mean_anything_or_is_not_determined_is_computed(front, decode):
    proxy = front()
    given: list[dict[str, Any]] = [
        {"of_tomorrow": 1},
        {"temperature": 1},
        {"temperature": None},
        {"temperature": False},
        {"stream_options": {"of_tomorrow": True}},
        {"kv_transfer_params": {"x": 1}},
    ]
    for fields in (*given, *given):
        assert not is_hit(ask(proxy, **fields)[1]), fields
    assert len(decode.seen()) == 2 * len(given)
    assert proxy.metric('kept_total{outcome="stored"}', "kvstore_responses_") == 0


def test_a_seed_or_temperature_zero_determines_the_answer(front):
    proxy = front()
    for count, fields in enumerate(({"seed": 1, "temperature": 1}, {"temperature": 0.0}), 1):
        ask(proxy, **fields)
        stored(proxy, count)
        assert is_hit(ask(proxy, **fields)[1]), fields


def test_one_field_that_differs_is_another_request(front):
    proxy = front()
    given = {"user": "a", "model": "m", "max_tokens": 6}
    ask(proxy, **given)
    stored(proxy)
    for fields in ({"prompt": "hellp"}, {"max_tokens": 3}, {"user": "b"}, {"model": "n"}, {"stop": "x"}):
        assert not is_hit(ask(proxy, **given | fields)[1]), fields
    assert is_hit(ask(proxy, **given)[1])


def test_cache_control_says_what_is_looked_up_and_kept(front, decode):
    proxy = front()
    ask(proxy, headers={"Cache_Control": "no-store"})
    assert proxy.metric('passed_by_total{reason="no_store"}', "kvstore_responses_") == 1
    ask(proxy)
    stored(proxy)
    assert not is_hit(ask(proxy, headers={"Cache_Control": "no-cache"})[1])
    stored(proxy, 2)
    assert not is_hit(ask(proxy, headers={"Cache_Control": "no-store"})[1])
    assert not is_hit(ask(proxy, headers={"Cache_Control": "max-age=0"})[1])
    assert is_hit(ask(proxy, headers={"Cache_Control": "max-age=600"})[1])
    assert len(decode.seen()) == 5
    ask(proxy, temperature=1, headers={"Cache_Control": "max-age=600"})
    wait_until(lambda: is_hit(ask(proxy, temperature=1, headers={"Cache_Control": "max-age=600"})[1]))
    assert not is_hit(ask(proxy, temperature=1)[1])


def test_keys_share_nothing_unless_their_tenant_is_told(front, decode, tmp_path):
    tenants = tmp_path / "tenants"
    keys = [f"key-number-{number}-of-them" for number in range(5)]
    tenants.write_text(f"{keys[0]} tenant=a\n{keys[1]} tenant=a\n{keys[2]} tenant=b\n{keys[3]}\n")
    tenants.chmod(0o600)
    proxy = front(responses_tenants=tenants)

    def hit(key: str, **more: str) -> bool:
        return is_hit(ask(proxy, headers={"Authorization": f"Bearer {key}"} | more)[1])

    assert not hit(keys[0])
    stored(proxy)
    assert hit(keys[1])  # of the same tenant
    for number, key in enumerate((keys[2], keys[3], keys[4], "a"), 2):
        assert not hit(key), key
        stored(proxy, number)
        assert hit(key), key
    assert not is_hit(ask(proxy)[1])  # without a key
    stored(proxy, 6)
    assert not hit(keys[4], OpenAI_Organization="other")
    assert not hit(keys[4], Cookie="a=b")
    tenants.write_text(f"{keys[0]} tenant=a\n{keys[1]} tenant=c\n")
    proxy.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "SIGHUP" in proxy.log.read_text())
    assert hit(keys[0])
    assert not hit(keys[1])


def test_a_page_in_a_browser_and_a_query_are_computed(front, decode):
    proxy = front()
    for count in (1, 2):
        assert not is_hit(ask(proxy, headers={"Origin": "https://page"})[1])
        assert not is_hit(ask(proxy, COMPLETIONS + "?of=now")[1])
        assert len(decode.seen()) == 2 * count


def test_what_is_not_finished_is_not_kept(front, decode):
    """``ok`` ends streams without saying why."""
    proxy = front()
    for number, mode in enumerate(("ok", "status:400", "status:500", "no-json", "cut", "error-after:3", "end-after:3")):
        decode.behave(mode)
        ask(proxy, stream=mode not in ("no-json", "cut"), seed=number)
        decode.behave("finished")
        assert not is_hit(ask(proxy, seed=number)[1]), mode


def test_a_stream_that_ends_without_a_finish_reason_is_not_kept(front, decode):
    """A body of it could not be told for another reason: it has no usage."""
    proxy = front()
    decode.behave("ok")
    ask(proxy, stream=True)
    wait_until(lambda: proxy.metric('kept_total{outcome="unfinished"}', "kvstore_responses_") == 1)
    assert proxy.metric('kept_total{outcome="stored"}', "kvstore_responses_") == 0
    assert not is_hit(ask(proxy, stream=True)[1])


def test_a_stream_whose_instance_dies_is_not_kept(front, decode):
    proxy = front()
    decode.behave("die-after:3")
    assert b"error" in ask(proxy, stream=True)[2]
    assert proxy.metric('kept_total{outcome="unfinished"}', "kvstore_responses_") == 1
    decode.kill()
    decode.start()
    decode.behave("finished")
    assert not is_hit(ask(proxy)[1])


def test_a_stream_that_its_client_cuts_keeps_nothing_and_stops_the_instance(front, decode):
    proxy = front()
    decode.behave("finished-hang-after:3")
    connection = proxy.open("POST", COMPLETIONS, {"prompt": "hello", "stream": True} | DETERMINED)
    response = connection.getresponse()
    assert response.read1(10)
    response.close()
    connection.close()
    wait_until(lambda: decode.hung_up() == 1)
    decode.behave("finished")
    assert not is_hit(ask(proxy)[1])
    assert len(decode.seen()) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_ten_equal_requests_at_once_are_computed_once(front, decode, stream):
    proxy = front()
    decode.behave("finished-hang-after:3" if stream else "hang")
    options = {"stream_options": {"include_usage": True}}
    with concurrent.futures.ThreadPoolExecutor(10) as threads:
        answers = [threads.submit(ask, proxy, stream=stream, **options)]
        wait_until(lambda: len(decode.seen()) == 1)
        answers += [threads.submit(ask, proxy, stream=number % 2 == 0, **options) for number in range(9)]
        wait_until(lambda: proxy.metric("followers", "kvstore_responses_") == 9)
        decode.behave("finished")
        told = [answer.result(PATIENCE) for answer in answers]
    assert {status for status, _, _ in told} == {200}
    assert len(decode.seen()) == 1
    assert [is_hit(headers) for _, headers, _ in told] == [False] + 9 * [True]
    assert proxy.metric("shared_total", "kvstore_responses_") == 9


@pytest.mark.parametrize("stream", [False, True])
def test_when_who_led_goes_the_others_get_their_answer(front, decode, stream):
    proxy = front()
    decode.behave("finished-hang-after:3" if stream else "hang")
    leader = proxy.open("POST", COMPLETIONS, {"prompt": "hello", "stream": stream} | DETERMINED)
    response = leader.getresponse() if stream else None
    wait_until(lambda: len(decode.seen()) == 1)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ask, proxy, stream=True) for _ in range(2)]
        wait_until(lambda: proxy.metric("followers", "kvstore_responses_") == 2)
        if response is not None:
            response.close()
        leader.close()
        wait_until(lambda: proxy.metric('requests_total{outcome="left"}') == 1)
        decode.behave("finished")
        told = [answer.result(PATIENCE) for answer in answers]
    assert all(is_hit(headers) for _, headers, _ in told)
    assert all("".join(e["choices"][0]["text"] for e in events_of(body)) == TEXT for _, _, body in told)
    assert (len(decode.seen()), decode.hung_up()) == (1, 0)
    stored(proxy)


def test_when_the_last_who_waits_goes_the_instance_stops(front, decode):
    proxy = front()
    decode.behave("hang")
    body = {"prompt": "hello"} | DETERMINED
    leader = proxy.open("POST", COMPLETIONS, body)
    wait_until(lambda: len(decode.seen()) == 1)
    follower = proxy.open("POST", COMPLETIONS, body)
    wait_until(lambda: proxy.metric("followers", "kvstore_responses_") == 1)
    leader.close()
    wait_until(lambda: proxy.metric('requests_total{outcome="left"}') == 1)
    assert decode.hung_up() == 0
    follower.close()
    wait_until(lambda: decode.hung_up() == 1)
    decode.behave("finished")
    assert not is_hit(ask(proxy)[1])


def test_an_answer_that_is_not_for_others_is_computed_for_each(front, decode):
    proxy = front()
    decode.behave("hang")
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(ask, proxy) for _ in range(3)]
        wait_until(lambda: proxy.metric("followers", "kvstore_responses_") == 2 and len(decode.seen()) == 1)
        decode.behave("status:400")
        statuses = [answer.result(PATIENCE)[0] for answer in answers]
    assert sorted(statuses) == [200, 400, 400]  # what hung is answered, without a usage: not for the others
    assert len(decode.seen()) == 3


def test_answers_outlive_the_proxy_and_end_with_the_instance(front, decode):
    proxy = front()
    ask(proxy)
    stored(proxy)
    proxy.kill()
    again = front()
    assert is_hit(ask(again)[1])
    decode.kill()
    wait_until(lambda: b'"role": "decode", "in_service": false' in again.ask("GET", "/health")[1])
    decode.start()
    decode.behave("finished")
    wait_until(lambda: again.ask("GET", "/health")[1].count(b'"in_service": true') == 2)
    assert not is_hit(ask(again)[1])
    assert again.metric('lookups_total{outcome="old"}', "kvstore_responses_") == 1


def test_two_proxies_share_a_redis_and_a_delete_reaches_both(front, decode, redis, key_file):
    first, second = front(responses=redis.url), front(responses=redis.url)
    ask(first)
    stored(first)
    assert is_hit(ask(second)[1])
    assert command("delete", "--all", store=redis.url, key_file=key_file) == "1 deleted\n"
    assert not is_hit(ask(second)[1])
    stored(second)
    assert is_hit(ask(first)[1])
    text = b"".join(redis.client.hgetall(key)[b"sealed"] for key in redis.client.keys("*:entry:*"))
    assert text
    assert TEXT.split()[0].encode() not in text
    assert b"hello" not in text


def test_another_key_finds_nothing_and_fails_nothing(front, decode, redis, tmp_path):
    first = front(responses=redis.url)
    ask(first)
    stored(first)
    plain = front(responses=redis.url, responses_plain=True)
    assert not is_hit(ask(plain)[1])
    (name,) = (key for key in redis.client.keys("*:entry:*") if key.endswith(entry_of(first)))
    sealed = redis.client.hget(name, "sealed")
    redis.client.hset(name, "sealed", sealed[:-1] + bytes([sealed[-1] ^ 1]))
    assert not is_hit(ask(first)[1])
    assert first.metric('lookups_total{outcome="unreadable"}', "kvstore_responses_") == 1
    stored(first, 2)
    assert is_hit(ask(first)[1])


def entry_of(proxy: ProxyProcess) -> bytes:
    _, headers, _ = ask(proxy)
    assert is_hit(headers)
    return headers["X-KVStore-Cache"].rpartition("=")[2].encode()


def test_a_redis_that_has_gone_fails_nothing(front, decode, redis):
    proxy = front(responses=redis.url)
    ask(proxy)
    stored(proxy)
    redis.kill()
    for count in range(2, 9):
        status, headers, _ = ask(proxy)
        assert (status, is_hit(headers), len(decode.seen())) == (200, False, count)
    assert proxy.metric('lookups_total{outcome="skipped"}', "kvstore_responses_") > 0
    redis.start()
    wait_until(lambda: is_hit(ask(proxy)[1]))


def test_a_redis_that_hangs_holds_a_request_for_the_deadline_alone(front, decode, redis):
    proxy = front(responses=redis.url, responses_deadline=1)
    redis.pause()
    status, headers, _ = ask(proxy)
    assert (status, is_hit(headers)) == (200, False)
    assert proxy.metric('lookups_total{outcome="late"}', "kvstore_responses_") == 1
    redis.resume()


def command(*words: str, store: object, key_file: object, code: int = 0) -> str:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        needs_key = "explain" in words or "--api-key-file" in words
        key = ["--key-file", str(key_file)] if needs_key else []
        ended = main(["responses", *words, "--store", str(store), *key])
    assert ended == code, errors.getvalue()
    return out.getvalue() + errors.getvalue()


def test_the_command_tells_lists_explains_and_deletes(front, decode, tmp_path, key_file):
    store = tmp_path / "cache" / "r.sqlite"
    api_key = tmp_path / "api.key"
    api_key.write_text("secret-api-key\n")
    proxy = front()
    ask(proxy, model="m\x1b[31m", headers={"Authorization": "Bearer secret-api-key"})
    ask(proxy)
    stored(proxy, 2)
    given = {"store": store, "key_file": key_file}
    assert command("status", **given).startswith("2 responses, ")
    assert json.loads(command("status", "--json", **given))["entries"] == 2
    table = command("list", **given)
    assert "m\N{REPLACEMENT CHARACTER}[31m" in table
    labels = [json.loads(line) for line in command("list", "--json", **given).splitlines()]
    assert [label["model"] for label in labels] == ["m\x1b[31m", ""]
    assert "secret" not in json.dumps(labels)
    request = json.dumps({"prompt": "hello"} | DETERMINED)
    assert "one is kept" in command("explain", request, **given)
    assert json.loads(command("explain", "--json", request, **given))["entry"] == labels[1]["entry"]
    assert "no such response" in command("explain", request, "--api-key-file", str(api_key), **given)
    assert "neither temperature 0 nor a seed" in command("explain", '{"prompt": "hello"}', **given)
    assert "the field 'x' is not known" in command("explain", '{"prompt": "hello", "x": 1}', **given)
    assert "not JSON" in command("explain", "hello", code=2, **given)
    assert "say which" in command("delete", code=2, **given)
    assert command("delete", "--api-key-file", str(api_key), **given) == "1 deleted\n"
    assert command("delete", "--entry", labels[1]["entry"], **given) == "1 deleted\n"
    assert not is_hit(ask(proxy)[1])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--responses", "x.sqlite"], "give the key that encrypts them"),
        (["--responses", "http://x", "--responses-plain"], "not in http://"),
        (["--responses", "x.sqlite", "--responses-plain", "--responses-ttl", "0"], "--responses-ttl must be above 0"),
        (["--responses", "x.sqlite", "--responses-plain", "--responses-size", "x"], "--responses-size: not a size"),
        (["--responses-plain"], "give --responses WHERE as well"),
    ],
)
def test_a_mistake_is_told_before_anything_is_served(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["proxy", "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", *flags]) == 2
    assert said in capsys.readouterr().err
