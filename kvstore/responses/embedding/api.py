"""Embeddings of a model behind an OpenAI-compatible API (``POST /v1/embeddings``), as vLLM serves one. It blocks.

One prompt a call, on connections that are kept, one for each at once: the server makes batches of what comes at once. A
call ends by the deadline, however slowly the body of an answer drips in; its head may take as long for each piece.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from kvstore.breaker import Breaker
from kvstore.responses.embedding.failure import EmbeddingError, checked

MOST_REPLY_BYTES = 1 << 20
_CHUNK = 64 << 10
_FAILURES, _PAUSE, _LONGEST_PAUSE = 3, 1.0, 30.0

_log = logging.getLogger("kvstore.responses")


class ApiEmbedder:
    """Safe for threads.

    Args:
        url: of the API, as ``http://127.0.0.1:8300/v1``.
        model: its name there.
        deadline: seconds that a call takes at most.
        api_key: sent with each call; empty: none. It is in no error and in no log.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        url: str,
        model: str,
        deadline: float,
        api_key: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        self._path = f"{parts.path.rstrip('/')}/embeddings"
        self._model = model
        self._deadline = deadline
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._clock = clock
        self._breaker = Breaker(_FAILURES, _PAUSE, _LONGEST_PAUSE, clock=clock)
        self._idle: deque[http.client.HTTPConnection] = deque()

    @property
    def name(self) -> str:
        """Of its vectors: those of another model are never compared with them."""
        return f"api {self._model}"

    def __call__(self, text: str) -> npt.NDArray[np.float32]:
        """The embedding of a text. [dimensions]

        Raises:
            EmbeddingError: there is none.
        """
        if not self._breaker.allows():
            raise EmbeddingError("skipped", "the embedding failed again and again, and is left alone for a while")
        was = self._breaker.failure
        try:
            vector = self._vector(text)
        except EmbeddingError as error:
            self._breaker.failed(str(error))
            if was is None and self._breaker.failure is not None:
                _log.warning("similar prompts are computed for a while, without an embedding: %s", error)
            raise
        self._breaker.succeeded()
        if was is not None:
            _log.info("the embedding answers again")
        return vector

    def close(self) -> None:
        """Let go of its connections, once nobody asks any more."""
        while self._idle:
            self._idle.pop().close()

    def _vector(self, text: str) -> npt.NDArray[np.float32]:
        asked = {"model": self._model, "input": [text], "encoding_format": "float"}
        ends = self._clock() + self._deadline
        try:
            reply = json.loads(self._reply(json.dumps(asked).encode(), ends))
            (row,) = reply["data"]
            with np.errstate(over="ignore"):  # beyond a float32: it is infinite, and refused
                vector = np.asarray(row["embedding"], np.float32)
        except TimeoutError as error:
            words = f"no embedding from {self._host} within {1000 * self._deadline:g} ms"
            raise EmbeddingError("late", words) from error
        except (OSError, http.client.HTTPException) as error:
            raise EmbeddingError("failed", f"no embedding from {self._host}: {error}") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise EmbeddingError("failed", f"{self._host} answered no embedding: {type(error).__name__}") from error
        return checked(vector, None)

    def _reply(self, body: bytes, ends: float) -> bytes:
        """What the server answers, from a connection that is kept, if there is one and it still stands."""
        with suppress(IndexError):
            connection = self._idle.pop()
            try:
                return self._ask(connection, body, ends)
            except (ConnectionError, http.client.BadStatusLine):  # the server has closed it meanwhile
                connection.close()
            except BaseException:
                connection.close()
                raise
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._left(ends))
        try:
            return self._ask(connection, body, ends)
        except BaseException:
            connection.close()
            raise

    def _ask(self, connection: http.client.HTTPConnection, body: bytes, ends: float) -> bytes:
        connection.timeout = self._left(ends)
        if connection.sock is not None:
            connection.sock.settimeout(self._left(ends))
        connection.request("POST", self._path, body, self._headers)
        sock = connection.sock
        if sock is not None:
            sock.settimeout(self._left(ends))
        with closing(connection.getresponse()) as response:
            content = b""
            while chunk := response.read1(_CHUNK):
                content += chunk
                if len(content) > MOST_REPLY_BYTES:
                    raise EmbeddingError("failed", f"{self._host} answered more than {MOST_REPLY_BYTES} bytes")
                if sock is not None and not response.isclosed():  # it is at the end of the answer
                    sock.settimeout(self._left(ends))
            if response.status != http.HTTPStatus.OK:
                raise EmbeddingError("failed", f"{self._host} answered with status {response.status}")
            if not response.will_close:
                self._idle.append(connection)
        return content

    def _left(self, ends: float) -> float:
        left = ends - self._clock()
        if left <= 0:
            raise TimeoutError
        return left
