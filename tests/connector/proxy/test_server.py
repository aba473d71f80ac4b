"""``kvstore proxy`` as a process, before instances that behave badly, die and come back."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import sys
import threading
from dataclasses import dataclass

import pytest
from openai_instance import words_of
from proxy_process import CHAT, COMPLETIONS, PATIENCE

from kvstore.cli import main as cli
from kvstore.connector.proxy import server as proxy_module
from kvstore.connector.proxy.instances import Instances


def expected(prompt: object = "hello") -> str:
    return "".join(words_of(prompt))


def test_prefill_computes_the_prompt_and_decode_gets_its_ticket(instance, proxy):
    prefill, decode = instance("p"), instance("d")
    front = proxy([prefill], [decode])
    asked = {"prompt": [7, 8], "max_tokens": 6, "seed": 1, "of_tomorrow": {"x": [1.5, None]}, "min_tokens": 2}
    status, body = front.ask(
        "POST", COMPLETIONS + "?of=now", asked, Authorization="Bearer secret", X_Request_Id="mine", X_Other="kept"
    )
    assert (status, json.loads(body)["unknown"]) == (200, {"kept": True})
    assert json.loads(body)["choices"][0]["text"] == expected([7, 8])
    (at_prefill,), (at_decode,) = prefill.seen(), decode.seen()
    assert at_prefill["body"] == {
        "prompt": [7, 8],
        "max_tokens": 1,
        "stream": False,
        "seed": 1,
        "of_tomorrow": {"x": [1.5, None]},
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert at_decode["body"] == asked | {"kv_transfer_params": {"do_remote_prefill": True, "ticket": {"by": "p"}}}
    for seen, request_id in ((at_prefill, "mine-prefill1"), (at_decode, "mine")):
        assert seen["path"] == COMPLETIONS + "?of=now"
        assert seen["headers"]["authorization"] == "Bearer secret"
        assert seen["headers"]["x-other"] == "kept"
        assert seen["headers"]["x-request-id"] == request_id
    assert front.metric('prefills_total{outcome="ticket"}') == 1
    assert front.metric('requests_total{outcome="answered"}') == 1


def test_several_prompts_go_to_decode_alone(instance, proxy):
    prefill, decode = instance("p"), instance("d")
    front = proxy([prefill], [decode])
    asked = {"prompt": ["one", "two"], "max_tokens": 6}
    assert front.ask("POST", COMPLETIONS, asked)[0] == 200
    assert prefill.seen() == []
    assert [seen["body"] for seen in decode.seen()] == [asked]
    assert front.metric('prefills_total{outcome="several_prompts"}') == 1


def test_a_stream_is_handed_on_as_it_comes(instance, proxy):
    decode = instance("d", "hang-after:3")
    connection = proxy([instance("p")], [decode]).open("POST", CHAT, {"messages": [1], "stream": True})
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    early = b""
    while early.count(b"\n\n") < 3:
        early += response.read1(1)
    decode.behave("ok")
    events = (early + response.read()).split(b"\n\n")
    connection.close()
    assert events.pop() == b""
    assert events.pop() == b"data: [DONE]"
    deltas = [json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": word} for word in words_of([1]))]


@pytest.mark.parametrize(
    "mode", ["hang", "die", "status:500", "status:400", "garbage", "no-json", "cut", "no-ticket", "sick"]
)
def test_a_prefill_that_gives_no_ticket_costs_no_request(instance, proxy, eventually, mode):
    prefill, decode = instance("p", mode), instance("d")
    front = proxy([prefill], [decode], prefill_deadline=1)
    if mode == "sick":  # it would give a ticket before its first check
        eventually(lambda: front.metric(f'in_service{{role="prefill",url="{prefill.url}"}}') == 0)
    assert front.text() == expected()
    assert "kv_transfer_params" not in decode.seen()[0]["body"]
    assert front.metric('prefills_total{outcome="ticket"}') == 0


def noticed_by(mode: str) -> float:
    """A deadline: what hangs costs all of it, and who is well must answer in it on a busy machine."""
    return 3 if mode.startswith("hang") else PATIENCE


@pytest.mark.parametrize("mode", ["hang", "die", "status:503", "garbage", "cut"])
def test_another_prefill_gives_the_ticket(instance, proxy, mode):
    bad, good, decode = instance("bad", mode), instance("good"), instance("d")
    front = proxy([bad, good], [decode], prefill_deadline=noticed_by(mode))
    assert front.text() == expected()
    assert decode.seen()[0]["body"]["kv_transfer_params"]["ticket"] == {"by": "good"}
    assert good.seen()[0]["headers"]["x-request-id"].endswith("-prefill2")


@pytest.mark.parametrize("mode", ["hang", "die", "status:500", "status:429", "garbage", "no-json", "cut"])
def test_another_decode_answers_with_the_same_ticket(instance, proxy, mode):
    bad, good = instance("bad", mode), instance("good")
    front = proxy([instance("p")], [bad, good], decode_deadline=noticed_by(mode))
    assert front.text() == expected()
    assert good.seen()[0]["body"]["kv_transfer_params"]["ticket"] == {"by": "p"}
    assert good.seen()[0]["headers"]["x-request-id"].endswith("-retry1")


@pytest.mark.parametrize(
    ("at", "mode"),
    [
        *(("prefill", mode) for mode in ("die", "status:500", "cut")),
        *(("decode", mode) for mode in ("die", "status:500", "cut", "die-after:0", "error-after:0")),
    ],
)
def test_a_request_that_instances_fail_at_is_not_handed_on_to_all_of_them(instance, proxy, at, mode):
    bad = [instance(f"bad {number}", mode) for number in range(3)]
    spared, other = instance("spared"), instance("other")
    front = proxy([*bad, spared], [other]) if at == "prefill" else proxy([other], [*bad, spared])
    status, body = front.complete(stream="after" in mode)
    assert spared.seen() == []
    if at == "prefill":
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, expected())
        assert front.metric('prefills_total{outcome="failed"}') == 1
    else:
        assert status in (500, 502)
        assert front.metric('requests_total{outcome="failed"}') == 1


def test_instances_that_are_busy_or_not_there_are_no_failures(instance, proxy):
    busy = [instance(f"busy {number}", mode) for number, mode in enumerate(("status:503", "status:429", "status:503"))]
    gone = [instance(f"gone {number}") for number in range(2)]
    front = proxy([instance("p")], [*busy, *gone, instance("good")])
    for each in gone:
        each.kill()
    assert front.text() == expected()


@pytest.mark.parametrize("mode", ["hang", "die", "die-after:1", "error-after:1", "end-after:1", "hang-after:1"])
def test_a_stream_that_is_lost_before_its_first_token_comes_from_elsewhere(instance, proxy, mode):
    front = proxy([instance("p")], [instance("bad", mode), instance("good")], decode_deadline=noticed_by(mode))
    status, body = front.complete([3], CHAT, stream=True)
    assert status == 200
    assert body.count(b'"role"') == 1
    assert re.findall(rb'"content": "(.{5})"', body) == [word.encode() for word in words_of([3])]
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("mode", ["die-after:3", "end-after:3", "hang-after:3"])
def test_a_stream_that_is_lost_behind_its_first_token_says_so(instance, proxy, mode):
    good = instance("good")
    front = proxy([instance("p")], [instance("bad", mode), good], decode_deadline=noticed_by(mode))
    status, body = front.complete(stream=True)
    events = body.decode().split("\n\n")
    assert status == 200
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:3]] == words_of(
        "hello"
    )[:3]
    assert "broke off" in json.loads(events[3].removeprefix("data: "))["error"]["message"]
    assert events[4:] == ["data: [DONE]", ""]
    assert good.seen() == []
    assert front.metric('requests_total{outcome="broken"}') == 1


def test_without_decode_prefill_answers_and_without_both_there_is_an_error(instance, proxy):
    prefill, decode = instance("p"), instance("d")
    front = proxy([prefill], [decode])
    decode.kill()
    assert front.text() == expected()
    assert "kv_transfer_params" not in prefill.seen()[-1]["body"]
    assert front.metric("answered_plainly_total") == 1
    prefill.kill()
    status, body = front.complete()
    assert status == 502
    assert json.loads(body)["error"]["code"] == 502
    assert front.ask("GET", "/health")[0] == 503
    decode.start()
    assert front.text() == expected()


def test_the_log_says_who_failed_at_which_request_and_how(instance, proxy):
    busy = instance("busy", "status:503")
    front = proxy([instance("p")], [busy, instance("good")])
    assert front.ask("POST", COMPLETIONS, {"prompt": "hello"}, X_Request_Id="mine")[0] == 200
    assert f"mine: decode failed: {busy.url} answers 503\n" in front.log.read_text()
    front.ask("POST", COMPLETIONS, {"prompt": "hello"}, X_Request_Id="long" * 1000)
    assert "long" * 33 not in front.log.read_text()


def test_what_is_wrong_with_a_request_is_said_once_and_as_it_came(instance, proxy):
    decode, other = instance("d", "status:422"), instance("other")
    front = proxy([instance("p")], [decode, other])
    status, body = front.complete()
    assert status == 422
    assert json.loads(body) == {"error": {"message": "told to say 422"}, "extra": 1}
    assert other.seen() == []


def test_when_all_fail_the_last_answer_is_handed_on(instance, proxy):
    front = proxy([instance("p", "status:503")], [instance("d", "status:500")])
    status, body = front.complete()
    assert (status, json.loads(body)["error"]["message"]) == (503, "told to say 503")


def test_a_decode_that_works_is_not_given_more_while_another_is_idle(instance, proxy, eventually):
    busy, idle = instance("busy", "hang"), instance("idle")
    front = proxy([instance("p")], [busy, idle])
    waiting = front.open("POST", COMPLETIONS, {"prompt": "long"})
    eventually(busy.seen)
    for _ in range(3):
        assert front.text() == expected()
    assert (len(busy.seen()), len(idle.seen())) == (1, 3)
    busy.behave("ok")
    assert json.loads(waiting.getresponse().read())["choices"][0]["text"] == expected("long")
    waiting.close()


def test_an_instance_that_is_stopped_loses_its_requests_to_another_one(instance, proxy, eventually):
    stopped, other = instance("stopped", "hang"), instance("other")
    front = proxy([instance("p")], [stopped, other])
    waiting = front.open("POST", COMPLETIONS, {"prompt": "long"})
    eventually(stopped.seen)
    stopped.pause()
    assert json.loads(waiting.getresponse().read())["choices"][0]["text"] == expected("long")
    waiting.close()
    assert front.metric('retries_total{reason="lost",stage="decode"}') == 1
    health = json.loads(front.ask("GET", "/health")[1])
    assert [each["in_service"] for each in health["instances"]] == [True, False, True]


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_client_that_hangs_up_ends_the_work(instance, proxy, eventually, at):
    prefill, decode = instance("p", "hang" if at == "prefill" else "ok"), instance("d", "hang")
    front = proxy([prefill], [decode])
    waiting = prefill if at == "prefill" else decode
    connection = front.open("POST", COMPLETIONS, {"prompt": "long", "stream": True})
    eventually(waiting.seen)
    connection.close()
    eventually(lambda: waiting.hung_up() == 1)
    eventually(lambda: front.metric('requests_total{outcome="left"}') == 1)
    health = json.loads(front.ask("GET", "/health")[1])
    assert [each["in_flight"] for each in health["instances"]] == [0, 0]
    assert (at == "prefill") == (decode.seen() == [])


def test_instances_killed_and_restarted_in_turn_under_load_lose_no_request(instance, proxy, eventually):
    prefill, decode = instance("p"), instance("d")
    front = proxy([prefill], [decode])
    stop = threading.Event()
    wrong: list[object] = []
    answered = [0] * 4

    def load(client: int) -> None:
        while not stop.is_set():
            prompt = [client, answered[client]]
            status, body = front.complete(prompt)
            if status != 200 or json.loads(body)["choices"][0]["text"] != expected(prompt):
                wrong.append((status, body))
            answered[client] += 1

    def wait_for_more() -> None:
        ends = [count + 5 for count in answered]
        eventually(lambda: all(count >= end for count, end in zip(answered, ends, strict=True)))

    def all_in_service() -> bool:
        return all(each["in_service"] for each in json.loads(front.ask("GET", "/health")[1])["instances"])

    clients = [threading.Thread(target=load, args=(client,)) for client in range(4)]
    for client in clients:
        client.start()
    try:
        for victim in (decode, prefill) * 3:
            wait_for_more()
            victim.kill()
            wait_for_more()
            victim.start()
            eventually(all_in_service)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert wrong == []
    assert front.metric("answered_plainly_total") > 0
    assert front.metric('prefills_total{outcome="ticket"}') > 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", COMPLETIONS, b"no json", 400),
        ("POST", CHAT, [1], 400),
        ("POST", COMPLETIONS, b"x" * ((64 << 20) + 1), 413),
        ("GET", COMPLETIONS, None, 405),
        ("GET", "/v1/elsewhere", None, 404),
    ],
)
def test_what_is_no_request_gets_an_error_in_json(instance, proxy, method, path, body, status):
    decode = instance("d")
    front = proxy([instance("p")], [decode])
    told, answer = front.ask(method, path, body)
    assert (told, json.loads(answer)["error"]["code"]) == (status, status)
    assert decode.seen() == []
    assert front.text() == expected()


def test_whether_a_browser_may_ask_the_instances_say(instance, proxy):
    front = proxy([instance("p", "status:500")], [instance("d")])
    asks = {"Origin": "http://page", "Access_Control_Request_Method": "POST"}
    for path in (COMPLETIONS, CHAT, "/v1/models"):
        connection = front.open("OPTIONS", path, **asks)
        response = connection.getresponse()
        assert (response.status, response.getheader("Access-Control-Allow-Origin")) == (200, "*")
        assert response.read() == b"OK"
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "OPTIONS,POST"),
        ("PUT", "/v1/models", "GET,HEAD,OPTIONS"),
        ("OPTIONS", "/health", "GET,HEAD"),
    ],
)
def test_who_asks_in_the_wrong_way_is_told_the_right_one(instance, proxy, method, path, allowed):
    connection = proxy([instance("p")], [instance("d")]).open(method, path)
    response = connection.getresponse()
    assert (response.status, response.getheader("Allow")) == (405, allowed)
    assert json.loads(response.read())["error"]["code"] == 405
    connection.close()


def test_where_nothing_is_it_says_what_is(instance, proxy):
    status, body = proxy([instance("p")], [instance("d")]).ask("POST", "/completions", {"prompt": "hello"})
    assert status == 404
    assert "nothing is at /completions; the proxy serves /v1/completions, " in json.loads(body)["error"]["message"]


@pytest.mark.asyncio
async def test_requests_and_connections_have_limits(instance, monkeypatch):
    import aiohttp

    import kvstore.connector.proxy.server

    monkeypatch.setattr(kvstore.connector.proxy.server, "MOST_REQUESTS", 1)
    monkeypatch.setattr(kvstore.connector.proxy.server, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(kvstore.connector.proxy.server, "BODY_SECONDS", 0.2)
    decode = instance("d", "hang")
    front = kvstore.connector.proxy.server.Proxy(
        Instances([instance("p").url], [decode.url]), kvstore.connector.proxy.server.Deadlines()
    )
    async with front, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{await front.start('127.0.0.1', 0)}"
        waiting = asyncio.create_task(session.post(url + COMPLETIONS, json={"prompt": "long"}))
        while not await asyncio.to_thread(decode.seen):
            await asyncio.sleep(0.01)
        async with session.post(url + COMPLETIONS, json={"prompt": "more"}) as turned_away:
            assert (turned_away.status, turned_away.headers["Retry-After"]) == (503, "1")
        # Both connections are kept. A third one is closed.
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as other:
                await other.get(url + "/health")
        async with session.get(url + "/metrics") as metrics:
            assert re.search(r"^kvstore_proxy_connections_turned_away_total [1-9]", await metrics.text(), re.M)
        await asyncio.to_thread(decode.behave, "ok")
        async with await waiting as answer:
            assert answer.status == 200

        async def slow():
            yield b"{"
            await asyncio.sleep(PATIENCE)

        async with session.post(url + COMPLETIONS, data=slow()) as late:
            assert late.status == 408


@pytest.mark.asyncio
async def test_a_client_that_takes_nothing_of_its_answer_loses_its_place(instance, monkeypatch):
    import kvstore.connector.proxy.server

    monkeypatch.setattr(kvstore.connector.proxy.server, "CLIENT_SECONDS", 1.0)
    decode = instance("d", "flood")
    front = kvstore.connector.proxy.server.Proxy(
        Instances([instance("p").url], [decode.url]), kvstore.connector.proxy.server.Deadlines()
    )
    async with front:
        port = await front.start("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        body = b'{"prompt": "long", "stream": true}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(PATIENCE):
            while not await asyncio.to_thread(decode.seen):
                await asyncio.sleep(0.05)
            while any(each.in_flight for each in front._instances.all):
                await asyncio.sleep(0.05)
        writer.close()


@pytest.mark.asyncio
async def test_a_body_that_is_not_what_its_headers_say_is_refused(instance):
    import aiohttp

    import kvstore.connector.proxy.server

    front = kvstore.connector.proxy.server.Proxy(
        Instances([instance("p").url], [instance("d").url]), kvstore.connector.proxy.server.Deadlines()
    )
    async with front, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{await front.start('127.0.0.1', 0)}"
        zipped = {"Content-Encoding": "gzip"}
        async with session.post(url + COMPLETIONS, data=b"no gzip", headers=zipped) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (400, 400)
        async with session.get(url + "/metrics") as metrics:
            assert 'requests_total{outcome="refused"} 1' in await metrics.text()


def test_models_health_and_metrics(instance, proxy):
    prefill, decode = instance("p"), instance("d")
    front = proxy([prefill], [decode])
    status, body = front.ask("GET", "/v1/models")
    assert (status, json.loads(body)["by"]) == (200, "d")
    decode.kill()
    assert json.loads(front.ask("GET", "/v1/models")[1])["by"] == "p"
    status, body = front.ask("GET", "/health")
    assert status == 200
    assert [each["role"] for each in json.loads(body)["instances"]] == ["prefill", "decode"]
    assert front.metric(f'in_service{{role="decode",url="{decode.url}"}}') == 0
    assert front.metric(f'in_service{{role="prefill",url="{prefill.url}"}}') == 1


URLS = ["--prefill", "http://a:1", "--decode", "http://b:1"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefill", "http://a:1"], "--decode"),
        (["--prefill", "http://a:1", "--decode", "b"], "not the URL of an instance"),
        (["--prefill", "http://a:1", "--decode", "http://a:1"], "named twice"),
        ([*URLS, "--listen", "nowhere"], "not an address"),
        ([*URLS, "--prefill-deadline", "0"], "--prefill-deadline must be above 0"),
        ([*URLS, "--decode-deadline", "nan"], "--decode-deadline must be above 0"),
        ([*URLS, "--decode-dead", "3"], "unrecognized"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line_and_exit_code_2(capsys, flags, words):
    try:
        code = cli.main(["proxy", *flags])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert words in said.err.splitlines()[-1]


def test_a_port_that_is_taken_is_one_line_and_exit_code_1(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["proxy", *URLS, "--listen", f"127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_address_that_this_host_does_not_have_is_passed_over_where_it_has_another(monkeypatch):
    """As ::1 of ``localhost`` on a host without IPv6."""
    not_here = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))
    found = [not_here, here]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **named: found)
    [listener] = proxy_module._listen("localhost", 0)
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        found.append((*here[:4], listener.getsockname()))
        with pytest.raises(OSError, match="in use"):
            proxy_module._listen("localhost", 0)
    found[1:] = []
    with pytest.raises(OSError, match=r"assign requested address|not supported"):
        proxy_module._listen("localhost", 0)


@dataclass
class Nobody:
    """An instance that is not there."""

    url: str


def test_it_may_have_more_descriptors_than_the_soft_limit(proxy):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        nobody = [Nobody(f"http://127.0.0.1:{port}") for port in (1, 2)]
        process = proxy(nobody[:1], nobody[1:]).process
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] > 512


def test_a_missing_package_is_named(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("aiohttp", "kvstore.connector.proxy.server"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert cli.main(["proxy", *URLS]) == 1
    assert capsys.readouterr().err == "kvstore proxy: aiohttp is missing; pip install 'kvstore-offload[proxy]'\n"
