"""The read-only HTTP server of metrics, health and console: a few dozen connections, each with a thread.

It answers GET, HEAD (the same without the page) and OPTIONS, and says so to whoever asks for anything else.

Where all threads are taken, the oldest connection is closed for a new one: a probe or a scraper asks at once and is
gone in a moment, so those that stay are others. None lasts long, whatever it says or does not say. A few pages are made
at once.
"""

from __future__ import annotations

import base64
import binascii
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BufferedIOBase
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvstore.errors import ResourceError
from kvstore.security.grants import EVERYTHING, Grant
from kvstore.service.access.gate import Tls


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a page."""

    query: str
    """What stands behind the question mark."""
    accept: str
    """The ``Accept`` header."""
    caller: Grant
    """Who asks."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A page."""

    kind: str
    """The content's type."""
    content: bytes
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()


Page = Callable[[Ask], Answer]
_PAGES_AT_ONCE = 4
_LONGEST_SECONDS = 10.0
"""From the moment when a connection is accepted."""
_MOST_CONNECTIONS = 64
"""One more, and the oldest is closed."""
_MOST_HEAD_BYTES = 64 << 10
"""Of a request's line and headers together: a hundred headers may have as many each otherwise."""
_REST_SECONDS = 0.05
"""Before another connection is accepted when there is no descriptor for it."""
_BACKLOG = 16
_METHODS = (("Allow", "GET, HEAD, OPTIONS"),)
_log = logging.getLogger(__name__)


class WebServer:
    """Serves until ``stop``.

    Args:
        address: host and port; port 0 is any free one.
        pages: content by path.
        healthy: whether the node serves.
        troubles: a line for each lower tier that does not, for callers who see the pages.
        tls: the node's TLS; None: plain HTTP.
        accepts: who shows an ``Authorization`` header, None for nobody; they see the pages, all but ``/health``.
            None: whoever connects sees them.

    Raises:
        ResourceError: the address can't be listened on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        pages: Mapping[str, Page],
        healthy: Callable[[], bool],
        troubles: Callable[[], Sequence[str]],
        tls: Tls | None,
        accepts: Callable[[str], Grant | None] | None,
    ) -> None:
        host, port = address
        handler = partial(_Handler, pages, healthy, troubles, accepts, threading.Semaphore(_PAGES_AT_ONCE))
        try:
            self._server = _PooledServer((host, port), handler, tls)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise ResourceError(f"can't listen on {where} for metrics: {error.strerror or error}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvstore-web", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port. Answers under way are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Open(NamedTuple):
    """A connection that is answered, or waits for a thread."""

    until: float
    """When it ends at the latest."""
    request: socket.socket
    answer: Future[None]


class _PooledServer(HTTPServer):
    request_queue_size = _BACKLOG

    def __init__(self, address: tuple[str, int], handler: Any, tls: Tls | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._tls = tls
        self._pool = ThreadPoolExecutor(_MOST_CONNECTIONS, "kvstore-web")
        self._open: dict[socket.socket, _Open] = {}
        """By a second descriptor of each connection; the oldest first."""
        self._guard = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is left: it would be asked again at once
            time.sleep(_REST_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            connection = request.dup()
        except OSError:
            self.shutdown_request(request)
            return
        with self._guard:
            if len(self._open) >= _MOST_CONNECTIONS:
                self._end_oldest()
            try:
                answer = self._pool.submit(self._answer, request, client_address, connection)
            except RuntimeError:  # no more threads
                connection.close()
                raise
            self._open[connection] = _Open(time.monotonic() + _LONGEST_SECONDS, request, answer)

    def _end_oldest(self) -> None:
        """The caller has the guard."""
        oldest = next(iter(self._open))
        each = self._open.pop(oldest)
        self._end([oldest])
        if each.answer.cancel():  # no thread has it: while they all make pages, it would wait with its descriptors
            each.request.close()
            oldest.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("web: %s can't be answered", client_address)

    def service_actions(self) -> None:
        """Between connections, and twice a second: end those that last too long."""
        now = time.monotonic()
        with self._guard:
            self._end([connection for connection, each in self._open.items() if each.until <= now])

    def _answer(self, request: socket.socket, client_address: Any, connection: socket.socket) -> None:
        try:
            request.settimeout(_LONGEST_SECONDS)
            if self._tls is not None:
                request = self._tls.context.wrap_socket(request, server_side=True)
            self.finish_request(request, client_address)
        except OSError as error:  # a peer that went away, spoke no TLS, or was too slow
            _log.debug("web: %s: %s", client_address, error)
        except Exception:  # noqa: BLE001 - the thread answers others
            _log.exception("web: a request failed")
        finally:
            self.shutdown_request(request)
            with self._guard:
                self._open.pop(connection, None)
                connection.close()

    def _end(self, connections: list[socket.socket]) -> None:
        """Whoever reads from these, or writes to them, is told that the peer has gone. The caller has the guard."""
        for connection in connections:
            with suppress(OSError):  # it has
                connection.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        super().server_close()
        with self._guard:
            self._end(list(self._open))  # the process ends behind its threads only
        self._pool.shutdown(wait=False)


class _Head:
    """Reads the lines of a request's head, as many as it may have."""

    def __init__(self, lines: BufferedIOBase) -> None:
        self._lines = lines
        self._rest = _MOST_HEAD_BYTES

    def readline(self, limit: int) -> bytes:
        """The next line. ``http.server`` answers a line that is longer than it asked for, and this error."""
        if self._rest < 0:
            raise LineTooLong("head")
        line = self._lines.readline(limit)
        self._rest -= len(line)
        return line

    def close(self) -> None:
        """With its connection."""
        self._lines.close()


class _Handler(BaseHTTPRequestHandler):
    server_version = "kvstore"
    sys_version = ""

    def __init__(
        self,
        pages: Mapping[str, Page],
        healthy: Callable[[], bool],
        troubles: Callable[[], Sequence[str]],
        accepts: Callable[[str], Grant | None] | None,
        making: threading.Semaphore,
        *request: Any,
    ) -> None:
        self._pages = pages
        self._healthy = healthy
        self._troubles = troubles
        self._accepts = accepts
        self._making = making
        super().__init__(*request)  # answers

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]  # bodies are not read

    def do_HEAD(self) -> None:
        self.do_GET()  # what is said has no body then

    def do_OPTIONS(self) -> None:
        path, _, _ = self.path.partition("?")
        if path not in ("*", "/health", *self._pages):
            self._say_not_found()
            return
        self.send_response(HTTPStatus.NO_CONTENT)
        for name, value in _METHODS:
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """``http.server`` has no handler for the method: it is one that nothing here has, not one that nobody knows."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            text = b"everything here is only read: GET, HEAD or OPTIONS\n"
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, text, headers=_METHODS)
        else:
            super().send_error(code, message, explain)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/health":
            self._say_health()
        elif path not in self._pages:
            self._say_not_found()
        elif self._accepts is None and not self._is_asked_here():
            self._say(
                HTTPStatus.MISDIRECTED_REQUEST,
                b"without tokens a loopback address answers only by its number and as localhost\n",
            )
        elif (caller := self._caller()) is None:
            self._say(
                HTTPStatus.UNAUTHORIZED,
                b"a token is needed: Authorization: Bearer TOKEN; a browser gives it as the password of any user\n",
                headers=(("WWW-Authenticate", "Bearer"), ("WWW-Authenticate", 'Basic realm="kvstore"')),
            )
        else:
            with self._making:
                answer = self._pages[path](Ask(query, self.headers.get("Accept", ""), caller))
            self._say(answer.status, answer.content, answer.kind, answer.headers)

    def _say_health(self) -> None:
        """Whether the node serves, to everybody; how its tiers are, to who may see all of them. A tier that is down is
        no reason to end a node that serves: the status says so of the node alone."""
        if not self._healthy():
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, b"stopping\n")
            return
        caller = self._caller() if self._accepts is not None or self._is_asked_here() else None
        troubles = self._troubles() if caller is not None and caller.every else ()
        self._say(HTTPStatus.OK, "".join(f"{line}\n" for line in ("ok", *troubles)).encode())

    def _say_not_found(self) -> None:
        served = ", ".join(["/health", *self._pages])
        self._say(HTTPStatus.NOT_FOUND, f"not found; there are {served}\n".encode())

    def _is_asked_here(self) -> bool:
        """Whether no other name led to a loopback address: a page of somebody else's, in a browser of this host, may
        have a name that it lets point here, and would be shown all (DNS rebinding)."""
        if not ip_address(self.request.getsockname()[0]).is_loopback:
            return True
        try:
            name = urlsplit(f"//{self.headers.get('Host') or 'localhost'}").hostname
            return name == "localhost" or ip_address(name or "").is_loopback
        except ValueError:
            return False

    def _caller(self) -> Grant | None:
        if self._accepts is None:
            return EVERYTHING
        return self._accepts(as_bearer(self.headers.get("Authorization", "")))

    def _say(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str = "text/plain; charset=utf-8",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - http.server's name
        """Requests are not logged: a scraper comes every few seconds."""


def as_bearer(authorization: str) -> str:
    """An ``Authorization`` header as one with a bearer token: the password of ``Basic``, which browsers ask for."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        user_and_password = base64.b64decode(credentials, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return f"Bearer {user_and_password.partition(':')[2]}"
