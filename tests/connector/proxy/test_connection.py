"""A client's connection to ``kvstore proxy``: what nobody can read, what is too long or too slow, and its end."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
from contextlib import suppress

import pytest
from openai_instance import words_of
from proxy_process import COMPLETIONS, PATIENCE

from kvstore.connector.proxy.instances import Instances

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode()
UNREADABLE = {
    "no HTTP": b"\x00\xff\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no HTTP of ours": b"GET /health HTTP/3.7\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "no URL": b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    "no header": HEAD + b"X-A: a\x00b\r\n\r\n",
    "no length": HEAD + b"Content-Length: -1\r\n\r\n{}",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "no chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "no gzip": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 7\r\n\r\nno gzip",
    "no encoding that it knows": HEAD + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
    "too many headers": HEAD + b"X: y\r\n" * 1000 + b"\r\n",
}


def answer_to(port: int, *parts: bytes) -> tuple[int, bytes]:
    """What these bytes get; behind each part but the last one something is waited for."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection, connection.makefile("rb") as reader:
        for part in parts[:-1]:
            connection.sendall(part)
            assert reader.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert reader.readline() == b"\r\n"
        connection.sendall(parts[-1])
        head, _, body = reader.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_what_nobody_can_read_is_refused_in_json_and_is_no_error_of_the_proxys(instance, proxy):
    decode = instance("d")
    front = proxy([instance("p")], [decode])
    for name, sent in UNREADABLE.items():
        status, body = answer_to(front.port, sent)
        assert (name, status, json.loads(body)["error"]["code"]) == (name, 400, 400)
    assert decode.seen() == []
    assert front.log.read_text() == ""


def test_a_body_that_turns_out_to_be_malformed_is_refused_at_once(instance, proxy):
    front = proxy([instance("p")], [instance("d")])
    status, body = answer_to(
        front.port, HEAD + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n", b"zz\r\n{}\r\n"
    )
    assert (status, json.loads(body)["error"]["code"]) == (400, 400)
    assert "chunk size" in json.loads(body)["error"]["message"]
    unasked = b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    assert answer_to(front.port, unasked, b"zz\r\n")[0] == 200
    assert front.metric('requests_total{outcome="refused"}') == 1
    assert front.log.read_text() == ""


def test_headers_may_be_long_and_have_a_limit(instance, proxy):
    decode = instance("d")
    front = proxy([instance("p")], [decode])
    assert front.ask("POST", COMPLETIONS, {"prompt": "hello"}, X_Long="a" * 60_000)[0] == 200
    assert decode.seen()[0]["headers"]["x-long"] == "a" * 60_000
    for path, headers in (("/health", {"X_Long": "a" * 70_000}), ("/health?" + "a" * 70_000, {})):
        status, body = front.ask("GET", path, **headers)
        assert (status, json.loads(body)["error"]["code"]) == (431, 431)
    assert front.log.read_text() == ""


def test_a_head_that_comes_bit_by_bit_has_a_limit(instance, proxy):
    front = proxy([instance("p")], [instance("d")])
    with socket.create_connection(("127.0.0.1", front.port), PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        sent = 0
        with suppress(ConnectionError):  # it does not read on
            while sent < 1 << 20 and not select.select([connection], [], [], 0.01)[0]:
                sent += connection.send(b"X-Long-%d: %s\r\n" % (sent, b"a" * 16_000))
        assert sent < 1 << 18
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert (head.split()[1], json.loads(body)["error"]["code"]) == (b"431", 431)
    assert front.log.read_text() == ""


def test_what_comes_between_two_heads_is_not_a_long_head(instance, proxy):
    front = proxy([instance("p")], [instance("d")])
    with socket.create_connection(("127.0.0.1", front.port), PATIENCE) as connection, connection.makefile("rb") as told:
        for number in range(3):
            body = json.dumps({"prompt": f"{number}" + " " * 300_000}).encode()
            connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
            assert told.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert told.readline() == b"\r\n"
            for start in range(0, len(body), 20_000):
                connection.sendall(body[start : start + 20_000])
            assert told.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while line := told.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split()[1])
            told.read(length)


def test_a_long_body_behind_an_upgrade_that_is_declined_is_no_long_head(instance, proxy):
    front = proxy([instance("p")], [instance("d")])
    body = json.dumps({"prompt": "hello" + " " * 300_000}).encode()
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    ask = HEAD + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", front.port), PATIENCE) as connection, connection.makefile("rb") as told:
        connection.sendall(upgrade + ask)
        while not (line := told.readline()).endswith(b"HTTP/1.1 100 Continue\r\n"):
            assert line  # not the end
        for start in range(0, len(body), 20_000):
            connection.sendall(body[start : start + 20_000])
        assert told.read().removeprefix(b"\r\n").startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.asyncio
async def test_a_connection_that_asks_for_nothing_is_closed_and_a_stream_is_not(instance, monkeypatch):
    import kvstore.connector.proxy.connection
    import kvstore.connector.proxy.server

    monkeypatch.setattr(kvstore.connector.proxy.connection, "QUIET_SECONDS", 1.0)
    decode = instance("d", "hang-after:3")
    front = kvstore.connector.proxy.server.Proxy(
        Instances([instance("p").url], [decode.url]), kvstore.connector.proxy.server.Deadlines()
    )
    async with front, asyncio.timeout(PATIENCE):
        port = await front.start("127.0.0.1", 0)
        streaming, asks = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "hello", "stream": true}'
        asks.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await streaming.readuntil(words_of("hello")[2].encode())

        silent, says_nothing = await asyncio.open_connection("127.0.0.1", port)
        slow, says_little = await asyncio.open_connection("127.0.0.1", port)
        kept, has_asked = await asyncio.open_connection("127.0.0.1", port)
        has_asked.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        says_little.write(b"GET /metrics HTTP/1.1\r\nX-A: ")
        trickling = asyncio.create_task(_trickle(says_little))
        assert await silent.read() == b""
        assert await slow.read() == b""
        assert (await kept.read()).startswith(b"HTTP/1.1 200 OK\r\n")

        await asyncio.to_thread(decode.behave, "ok")
        rest = await streaming.readuntil(b"data: [DONE]")
        assert words_of("hello")[-1].encode() in rest
        trickling.cancel()
        for writer in (asks, says_nothing, says_little, has_asked):
            writer.close()


async def _trickle(writer: asyncio.StreamWriter) -> None:
    """Of a head that never ends."""
    while True:
        writer.write(b"a")
        await asyncio.sleep(0.1)


def refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_stop_waits_for_the_requests_under_way(instance, proxy, eventually):
    decode = instance("d", "hang")
    front = proxy([instance("p")], [decode])
    waiting = front.open("POST", COMPLETIONS, {"prompt": "long"})
    eventually(decode.seen)
    front.process.send_signal(signal.SIGTERM)
    eventually(lambda: refuses(front.port))
    decode.behave("ok")
    assert json.loads(waiting.getresponse().read())["choices"][0]["text"] == "".join(words_of("long"))
    waiting.close()
    assert front.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(instance, proxy, eventually, number):
    decode = instance("d", "hang")
    front = proxy([instance("p")], [decode])
    waiting = front.open("POST", COMPLETIONS, {"prompt": "long"})
    eventually(decode.seen)
    front.process.send_signal(number)
    eventually(lambda: "a second signal" in front.log.read_text())
    front.process.send_signal(number)
    assert front.process.wait(PATIENCE) == (130 if number == signal.SIGINT else -number)
    assert "Traceback" not in front.log.read_text()
    waiting.close()


def test_a_stop_waits_for_a_body_that_is_arriving(instance, proxy, eventually):
    front = proxy([instance("p")], [instance("d")])
    body = json.dumps({"prompt": "long"}).encode()
    with socket.create_connection(("127.0.0.1", front.port), PATIENCE) as idle:
        with socket.create_connection(("127.0.0.1", front.port), PATIENCE) as connection:
            connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5])
            reader = connection.makefile("rb")
            assert reader.readline() == b"HTTP/1.1 100 Continue\r\n"
            front.process.send_signal(signal.SIGTERM)
            eventually(lambda: refuses(front.port))
            assert idle.recv(1) == b""
            connection.sendall(body[5:])
            head, _, answer = reader.read().removeprefix(b"\r\n").partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert json.loads(answer)["choices"][0]["text"] == "".join(words_of("long"))
        assert front.process.wait(PATIENCE) == 0


@pytest.mark.asyncio
async def test_a_stop_gives_up_requests_that_take_too_long(instance, monkeypatch):
    import kvstore.connector.proxy.server

    monkeypatch.setattr(kvstore.connector.proxy.server, "DRAIN_SECONDS", 4.0)
    decode = instance("d", "hang")
    front = kvstore.connector.proxy.server.Proxy(
        Instances([instance("p").url], [decode.url]), kvstore.connector.proxy.server.Deadlines()
    )
    port = await front.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b'Content-Length: 18\r\n\r\n{"prompt": "long"}')
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(decode.seen):
            await asyncio.sleep(0.05)
    began = asyncio.get_running_loop().time()
    await front.stop()
    assert asyncio.get_running_loop().time() - began < 7
    assert await reader.read() == b""
    writer.close()
