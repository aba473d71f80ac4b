"""Embeddings behind an API, over real sockets: whatever the server does, the request is computed, in time."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from similar_asking import FIRST, SIMILAR, Asking, run

from kvstore.responses.embedding.api import MOST_REPLY_BYTES, ApiEmbedder
from kvstore.responses.embedding.failure import EmbeddingError
from kvstore.responses.semantic import lexical

PATIENT = 60.0


class EmbeddingServer:
    """Answers with what ``says`` gives for a text: a vector, or the bytes of a body."""

    def __init__(self) -> None:
        self.says: Callable[[str], Any] = lambda text: lexical.embed(text).tolist()
        self.status = 200
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.connections = 0
        self.embedders: list[ApiEmbedder] = []
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                server.connections += 1
                super().setup()

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(asked | {"path": self.path})
                server.keys.append(self.headers["Authorization"])
                said = server.says(asked["input"][0])
                body = said if isinstance(said, bytes) else json.dumps({"data": [{"embedding": said}]}).encode()
                try:
                    self.send_response(server.status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:
                    pass  # who asked is gone

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def hang(self, text: str) -> list[float]:
        """For ``says``: until it is released."""
        self.released.wait(PATIENT)
        return [1.0]

    def embedder(self, deadline: float = PATIENT, api_key: str = "", **more: Any) -> ApiEmbedder:
        self.embedders.append(ApiEmbedder(self.url, "e5", deadline, api_key, **more))
        return self.embedders[-1]

    def close(self) -> None:
        for each in self.embedders:
            each.close()
        self.released.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    serving = EmbeddingServer()
    yield serving
    serving.close()


def test_a_text_is_embedded_on_a_connection_that_is_kept(server: EmbeddingServer) -> None:
    embed = server.embedder(api_key="secret")
    for text in ("one", "two", "zwölf"):
        assert np.array_equal(embed(text), lexical.embed(text))
    assert server.asked[0] == {"model": "e5", "input": ["one"], "encoding_format": "float", "path": "/v1/embeddings"}
    assert server.keys == ["Bearer secret"] * 3
    assert server.connections == 1
    assert embed.name == "api e5"


def test_a_connection_that_the_server_has_closed_is_made_anew(server: EmbeddingServer) -> None:
    embed = server.embedder()
    embed("one")
    (kept,) = embed._idle
    kept.sock.shutdown(socket.SHUT_RDWR)
    assert np.array_equal(embed("two"), lexical.embed("two"))
    assert server.keys == [None, None]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ([1.0, float("nan")], "has the length nan"),
        ([1e300, 1.0], "has the length inf"),
        ([0.0, 0.0], "has the length 0"),
        ([], "has the shape"),
        ([[1.0]], "has the shape"),
        (["a"], "answered no embedding: ValueError"),
        (None, "has the shape"),
        (b"[]", "answered no embedding: TypeError"),
        (b"no JSON", "answered no embedding: JSONDecodeError"),
        (b'{"data": []}', "answered no embedding: ValueError"),
        (b"[" * 100_000, "answered no embedding: RecursionError"),
        (b" " * (MOST_REPLY_BYTES + 1), f"answered more than {MOST_REPLY_BYTES} bytes"),
    ],
)
def test_what_can_not_be_used_is_refused(server: EmbeddingServer, says: Any, words: str) -> None:
    server.says = lambda text: says
    with pytest.raises(EmbeddingError, match=words) as failure:
        server.embedder()("text")
    assert failure.value.why == "failed"


def test_another_status_and_nobody_there_are_failures(server: EmbeddingServer) -> None:
    server.status = 500
    embed = server.embedder(api_key="secret")
    with pytest.raises(EmbeddingError, match="status 500"):
        embed("text")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(EmbeddingError, match="refused") as failure:
        ApiEmbedder(f"http://127.0.0.1:{port}/v1", "e5", PATIENT, "secret")("text")
    assert "secret" not in str(failure.value)


def test_a_server_that_hangs_or_drips_is_late() -> None:
    """It is a socket that nobody answers, and one on which a body comes byte by byte."""
    ended = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not ended.wait(0.005):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as dripping:
        thread = threading.Thread(target=drip, args=(dripping,))
        thread.start()
        for each in (silent, dripping):
            with pytest.raises(EmbeddingError) as failure:
                ApiEmbedder(f"http://127.0.0.1:{each.getsockname()[1]}/v1", "e5", 0.05)("text")
            assert failure.value.why == "late"
        ended.set()
        thread.join()


def test_one_that_fails_is_left_alone_for_a_while(server: EmbeddingServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = [0.0]
    server.status = 503
    embed = server.embedder(api_key="secret", clock=lambda: clock[0])
    whys = []
    for _ in range(5):
        with pytest.raises(EmbeddingError) as failure:
            embed("text")
        whys.append(failure.value.why)
    assert whys == ["failed"] * 3 + ["skipped"] * 2
    assert len(server.asked) == 3
    server.status = 200
    clock[0] += 1.5
    assert len(embed("text")) == lexical.DIMENSIONS
    assert "without an embedding" in caplog.text
    assert "answers again" in caplog.text
    assert "secret" not in caplog.text


def test_prompts_are_found_by_it_and_computed_while_it_hangs(server: EmbeddingServer, tmp_path: Path) -> None:
    """Equal requests are answered meanwhile, and what is asked while there is no embedding is found by none."""

    def how(deadline: float) -> dict[str, Any]:
        embed = server.embedder(deadline)
        return {"vector": embed, "vectors": embed.name, "deadline": deadline, "bound": 0.5, "shadow": 0.0}

    server.says = lambda text: [0.0, 1.0]

    async def teach(asking: Asking) -> None:
        """A new embedding is believed once outcomes prove it."""
        for number in range(8):
            for text in (FIRST, SIMILAR):
                await asking.ask(text, system=f"place {number}")
        assert await asking.ask(FIRST) is None
        assert await asking.ask(SIMILAR) is not None
        assert asking.metric('embeddings_total{outcome="made"}') == len(server.asked)
        computed = asking.metric('lookups_total{outcome="miss"}') - asking.metric("similar_hits_total")
        assert asking.metric("embedding_seconds_count") == computed

    async def late(asking: Asking) -> None:
        began = time.monotonic()
        server.says = server.hang
        assert await asking.ask("What may I do to reset my password?") is None
        assert await asking.ask(FIRST) is not None
        assert asking.metric('embeddings_total{outcome="late"}') == 1
        assert time.monotonic() - began < PATIENT  # the server would have hung for longer
        assert asking.metric("embedding_seconds_count") == 1
        assert asking.metric("embedding_seconds_sum") >= 0.05

    run(teach, tmp_path / "r.sqlite", **how(PATIENT))
    run(late, tmp_path / "r.sqlite", **how(0.05))


def test_a_model_with_other_dimensions_begins_anew(server: EmbeddingServer, tmp_path: Path) -> None:
    """It has the same name. One that changes under way is refused; after a start it finds nothing of the old one."""

    def same(text: str) -> list[float]:
        return [0.0, 1.0]

    def how() -> dict[str, Any]:
        embed = server.embedder()
        return {"vector": embed, "vectors": embed.name, "deadline": PATIENT, "bound": 0.9, "shadow": 0.0}

    async def first(asking: Asking) -> None:
        for number in range(8):
            for text in (FIRST, SIMILAR):
                await asking.ask(text, system=f"place {number}")
        await asking.ask(FIRST)
        assert await asking.ask(SIMILAR) is not None
        server.says = lambda text: [0.0, 1.0, 0.0]
        assert await asking.ask("How may I reset my password?") is None
        assert asking.metric('embeddings_total{outcome="failed"}') == 1

    async def second(asking: Asking) -> None:
        assert await asking.ask(SIMILAR, no="way") is None
        assert await asking.ask(SIMILAR) is None
        assert asking.metric('embeddings_total{outcome="failed"}') == 0
        assert asking.metric('similar_outcomes_total{outcome="right"}') == 0  # nothing was near it

    server.says = same
    run(first, tmp_path / "r.sqlite", **how())
    run(second, tmp_path / "r.sqlite", **how())
