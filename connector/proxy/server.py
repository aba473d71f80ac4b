"""A small OpenAI-compatible proxy in front of engines that divide the work: some prefill, others decode.

::

    client ──► proxy ──1──► prefill    the prompt, one token: the answer has a ticket for what was computed
                 │
                 └────2───► decode     the client's request, with the ticket: its answer goes to the client

An attempt that fails before the client has a byte of the answer is made again elsewhere. Where no prefill instance
gives a ticket, decode is asked plainly, and computes the prompt itself; where no decode instance answers, a prefill
instance is asked for all of it. So whatever dies costs time, and no request as long as one instance is left, unless
several in a row fail with the same request in hand.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.connector.proxy.cached_answers import CachedAnswers
from kvstore.connector.proxy.connection import ClientConnection, error_response, fault_of
from kvstore.connector.proxy.console import ProxyConsole
from kvstore.connector.proxy.exchange import HOP_BY_HOP, Exchange
from kvstore.connector.proxy.instances import (
    Instance,
    Instances,
    Role,
    is_busy,
    may_retry,
)
from kvstore.connector.proxy.messages import (
    EventKind,
    EventSplitter,
    decode_request,
    error_events,
    has_several_prompts,
    kind_of,
    parse_request,
    prefill_request,
    ticket_of,
)
from kvstore.connector.proxy.metrics import ProxyMetrics
from kvstore.connector.proxy.runs import Runs
from kvstore.connector.proxy.upstream import InstanceError, Reply, Upstream
from kvstore.errors import FormatError, InvalidRequestError, LimitExceededError, ResourceError
from kvstore.responses import ResponseCache

MOST_BODY_BYTES = 64 << 20
"""Longest request."""
MOST_REQUESTS = 1024
"""Requests under way; one more is told to come again (503)."""
MOST_CONNECTIONS = 2048
"""Of clients, those included whose TLS handshake is not over; one more is closed, before a handshake."""
HANDSHAKE_SECONDS = 10.0
"""For a client's TLS handshake."""
BODY_SECONDS = 60.0
"""For a client to send its whole request."""
MOST_FAILED = 3
"""Instances that may fail with a request in hand, at prefill and at decode each: one that ends engines must not be
handed on until it has ended all of them."""
MOST_HELD_BYTES = 1 << 20
"""Of events without a token that are held back for a retry."""
CLIENT_SECONDS = 120.0
"""For a client to take something of its answer, or to show that its host is there."""
DRAIN_SECONDS = 30.0
"""For requests under way when the proxy is stopped."""
_CANCEL_SECONDS = 0.5
"""For those that are given up to end."""
_BACKLOG = 1024
_REST_SECONDS = 1.0
"""Before another connection is accepted when there is no descriptor for it."""

_PATHS = ("/v1/completions", "/v1/chat/completions")
_MODELS = "/v1/models"
_logger = logging.getLogger("kvstore.proxy")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that an instance may say nothing."""

    prefill: float = 120.0
    decode: float = 600.0
    """Before the first byte and between two: of an answer that is no stream, all of it comes at the end."""


class _FailedError(Exception):
    """An attempt failed, and may be made elsewhere; ``answer`` is what the client is told if nobody does better."""

    def __init__(self, words: str, answer: web.Response) -> None:
        super().__init__(words)
        self.answer = answer


class Proxy:
    """Serves from :meth:`start` until :meth:`stop`.

    Args:
        instances: whom it asks.
        deadlines: how long it waits for them.
        tls: for clients; None: plain HTTP.
        upstream_tls: for instances with ``https://``; None: as the system trusts them.
        responses: answers that were given before; None: all are computed.
        tenants: whose keys share them: by API key.
    """

    def __init__(
        self,
        instances: Instances,
        deadlines: Deadlines,
        tls: ssl.SSLContext | None = None,
        upstream_tls: ssl.SSLContext | None = None,
        responses: ResponseCache | None = None,
        tenants: Mapping[str, str] | None = None,
    ) -> None:
        self._instances = instances
        self._deadlines = deadlines
        self._tls = tls
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        """For each listener one."""
        self._arriving: set[asyncio.Task[None]] = set()
        """Connections that are here, but not yet for HTTP's server, which counts those whose handshake is over."""
        self._upstream = Upstream(instances, upstream_tls)
        self._metrics = ProxyMetrics()
        self._cached = (
            None if responses is None else CachedAnswers(responses, tenants or {}, Runs(instances, self._upstream))
        )
        self._under_way = 0
        application = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[_errors_as_json])
        for path in _PATHS:
            application.router.add_post(path, self._complete)
        application.router.add_get(_MODELS, self._pass_on)
        for path in (*_PATHS, _MODELS):
            application.router.add_options(path, self._pass_on)
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._show_metrics)
        ProxyConsole(instances, None if self._cached is None else self._cached.report).add_to(application)
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            shutdown_timeout=_CANCEL_SECONDS,
        )

    async def start(self, host: str, port: int) -> int:
        """Begin to serve. Returns the port.

        Raises:
            ResourceError: the address can't be used.
        """
        await self._runner.setup()
        try:
            self._listeners = _listen(host, port)
        except OSError as error:
            await self._runner.cleanup()
            raise ResourceError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
        await self._upstream.__aenter__()
        if self._cached is not None:
            await self._cached.start()
        self._accepting = [asyncio.create_task(self._accept(each)) for each in self._listeners]
        return int(self._listeners[0].getsockname()[1])

    def use(
        self,
        tls: ssl.SSLContext | None,
        upstream_tls: ssl.SSLContext | None,
        tenants: Mapping[str, str] | None = None,
    ) -> None:
        """What new connections have from now on: those of clients, and those to instances. Open ones go on. Of the
        tenants, what the next requests have."""
        self._tls = tls
        self._upstream.use(upstream_tls)
        if self._cached is not None:
            self._cached.use(tenants or {})

    async def stop(self) -> None:
        """End, behind the requests under way, :data:`DRAIN_SECONDS` at most."""
        ending = [*self._accepting, *self._arriving]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        await self._finish_requests()
        await self._runner.cleanup()
        if self._cached is not None:
            await self._cached.stop()
        await self._upstream.__aexit__()

    async def _finish_requests(self) -> None:
        """Wait for those under way. HTTP's server itself would hear no more of those whose body is still arriving."""
        assert self._runner.server is not None, "set up before it is stopped"
        connections = [each for each in self._runner.server.connections if isinstance(each, ClientConnection)]
        ending = [task for task in (each.finish() for each in connections) if task is not None]
        if ending:
            await asyncio.wait(ending, timeout=DRAIN_SECONDS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def _accept(self, listener: socket.socket) -> None:
        """Take clients in. Of those that are too many none keeps a descriptor for as long as a handshake may take."""
        server = self._runner.server
        assert server is not None, "set up before it listens"
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except ConnectionError:  # who came has gone
                continue
            except OSError as error:  # no descriptor is left: it would be asked again at once
                _logger.warning("a client's connection can't be accepted: %s", error.strerror or error)
                await asyncio.sleep(_REST_SECONDS)
                continue
            if len(server.connections) + len(self._arriving) >= MOST_CONNECTIONS:
                connection.close()
                self._metrics.count("connections_turned_away")
            else:
                arriving = asyncio.create_task(self._take_in(connection, server))
                self._arriving.add(arriving)
                arriving.add_done_callback(self._arriving.discard)
            await asyncio.sleep(0)  # while many come, those that are here have their turn, too

    async def _take_in(self, connection: socket.socket, server: web.Server) -> None:
        """Give a connection to HTTP's server, behind its handshake."""
        _end_when_deaf(connection)
        timeout = HANDSHAKE_SECONDS if self._tls is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: ClientConnection(server), connection, ssl=self._tls, ssl_handshake_timeout=timeout
            )
        except OSError as error:  # it speaks no TLS, shows no good certificate, was too slow, or went away
            _logger.debug("a client's connection ended: %s", error)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """A completion, from its arrival to its end."""
        began = time.monotonic()
        if self._under_way >= MOST_REQUESTS:
            self._metrics.count("requests", outcome="turned_away")
            return error_response(f"{MOST_REQUESTS} requests are under way", 503, {hdrs.RETRY_AFTER: "1"})
        self._under_way += 1
        outcome = "left"
        try:
            body = await _read(request)
            try:
                asked = parse_request(body)
            except InvalidRequestError as error:
                outcome = "refused"
                return error_response(str(error), 400)
            exchange = Exchange(request, asked)
            if self._cached is None:
                response = await self._compute(exchange)
            else:
                response = await self._cached.answer(exchange, self._compute)
            outcome = exchange.outcome
        except web.HTTPException:
            outcome = "refused"
            raise
        else:
            return response
        finally:
            self._under_way -= 1
            self._metrics.count("requests", outcome=outcome)
            self._metrics.observe("request", time.monotonic() - began)

    async def _compute(self, exchange: Exchange) -> web.StreamResponse:
        return await self._decode(exchange, await self._prefill(exchange))

    async def _prefill(self, exchange: Exchange) -> dict[str, Any] | None:
        """A ticket from one of the prefill instances; None: none of them gave one, or there is none for the request."""
        if has_several_prompts(exchange.asked):
            self._metrics.count("prefills", outcome="several_prompts")
            return None
        body = json.dumps(prefill_request(exchange.asked)).encode()
        tried: list[Instance] = []
        failed = 0
        began = time.monotonic()
        while failed < MOST_FAILED and (instance := self._instances.choose(Role.PREFILL, tried)) is not None:
            tried.append(instance)
            headers = exchange.headers(f"-prefill{len(tried)}")
            try:
                async with self._upstream.ask(
                    instance, hdrs.METH_POST, exchange.request.path_qs, headers, body, self._deadlines.prefill
                ) as reply:
                    answer = await reply.read_all()
            except InstanceError as error:
                self._retry(exchange, error, Role.PREFILL, error.reason)
                failed += error.reason != "connect"
                continue
            if may_retry(reply.status):
                failed += not is_busy(reply.status)
                self._retry(exchange, f"{instance.url} answers {reply.status}", Role.PREFILL, "status")
                continue
            self._metrics.observe("prefill", time.monotonic() - began)
            try:
                if reply.status != 200:
                    raise FormatError(f"the answer is {reply.status}")  # noqa: TRY301 - what follows is said once
                ticket = ticket_of(answer)
            except FormatError as error:
                # Another instance would say the same; what is wrong with the request, decode says as well.
                _logger.info("%s: no ticket from %s: %s", exchange.named, instance.url, error)
                self._metrics.count("prefills", outcome="no_ticket")
                return None
            self._metrics.count("prefills", outcome="ticket")
            exchange.made_by.append(instance)
            return ticket
        self._metrics.count("prefills", outcome="failed")
        return None

    async def _decode(self, exchange: Exchange, ticket: Mapping[str, Any] | None) -> web.StreamResponse:
        """The answer, from whoever gives one."""
        body = json.dumps(decode_request(exchange.asked, ticket)).encode()
        plain = json.dumps(decode_request(exchange.asked, None)).encode()
        tried: list[Instance] = []
        failed = 0
        answer = error_response("no instance is there", 503, {hdrs.RETRY_AFTER: "1"})
        while failed < MOST_FAILED and (instance := self._instances.choose(Role.DECODE, tried)) is not None:
            tried.append(instance)
            headers = exchange.headers("" if len(tried) == 1 else f"-retry{len(tried) - 1}")
            try:
                async with self._upstream.ask(
                    instance,
                    hdrs.METH_POST,
                    exchange.request.path_qs,
                    headers,
                    body if instance.role is Role.DECODE else plain,
                    self._deadlines.decode,
                ) as reply:
                    if reply.status == 200 and _is_stream(reply):
                        response = await self._hand_on(exchange, reply)
                    else:
                        response = await _whole(exchange, reply)
            except InstanceError as error:
                late = error.reason == "deadline"
                answer = error_response(str(error), 504 if late else 502)
                failed += error.reason != "connect"
                self._retry(exchange, error, Role.DECODE, error.reason)
            except _FailedError as error:
                answer = error.answer
                failed += not is_busy(answer.status)
                self._retry(exchange, f"{instance.url} {error}", Role.DECODE, "status")
            else:
                exchange.made_by.append(instance)
                if instance.role is Role.PREFILL:
                    self._metrics.count("answered_plainly")
                return response
        exchange.outcome = "failed"
        return answer

    async def _hand_on(self, exchange: Exchange, reply: Reply) -> web.StreamResponse:
        """A stream, event by event. Up to its first token it can fail and be asked for again; then it is the client's.

        Raises:
            InstanceError: it was lost before its first token.
            _FailedError: it said so itself.
        """
        splitter = EventSplitter()
        response = web.StreamResponse(status=reply.status, headers=_answer_headers(reply.headers))
        held = bytearray()
        started = done = False
        exchange.record_stream()
        try:
            while not done:
                data = await reply.read()
                if not data:
                    raise reply.broke("the stream ended without its end")
                for event in splitter.feed(data):
                    kind = kind_of(event)
                    exchange.record_event(event)
                    if not started:
                        if kind is EventKind.FAILED:
                            raise _FailedError("gave it up", error_response("the instance gave the request up", 502))
                        held += event
                        if kind is EventKind.EMPTY and len(held) < MOST_HELD_BYTES:
                            continue
                        event = bytes(held)
                        started = True
                        await exchange.prepare(response)
                        self._metrics.observe("first_token", time.monotonic() - exchange.began)
                    await exchange.write(response, event)
                    done = done or kind is EventKind.DONE
        except (InstanceError, LimitExceededError) as error:
            if not started:
                raise error if isinstance(error, InstanceError) else reply.broke(str(error)) from None
            _logger.warning("%s: lost behind its first token: %s", exchange.named, error)
            exchange.outcome = "broken"
            await exchange.write(response, error_events(f"the answer broke off: {error}"))
        await exchange.end(response)
        return response

    def _retry(self, exchange: Exchange, words: object, stage: Role, reason: str) -> None:
        _logger.info("%s: %s failed: %s", exchange.named, stage, words)
        self._metrics.count("retries", stage=stage.value, reason=reason)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """What the instances serve, and whether they let a browser ask (OPTIONS), as one of them says it."""
        tried: list[Instance] = []
        answer = error_response("no instance is there", 503)
        exchange = Exchange(request, {})
        method = hdrs.METH_OPTIONS if request.method == hdrs.METH_OPTIONS else hdrs.METH_GET  # for HEAD, too
        while (instance := self._instances.choose(Role.DECODE, tried)) is not None:
            tried.append(instance)
            try:
                async with self._upstream.ask(
                    instance, method, request.path_qs, exchange.headers(""), None, self._deadlines.prefill
                ) as reply:
                    return await _whole(exchange, reply)
            except InstanceError as error:
                answer = error_response(str(error), 502)
            except _FailedError as error:
                answer = error.answer
        return answer

    async def _health(self, request: web.Request) -> web.Response:
        """200 as long as a request can be answered; each instance's state."""
        return web.json_response(
            {"instances": self._instances.states()}, status=200 if self._instances.serving else 503
        )

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = self._metrics.text(self._instances)
        if self._cached is not None:
            text += self._cached.metrics_text()
        return web.Response(text=text, headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4"})


def _listen(host: str, port: int) -> list[socket.socket]:
    """A listener on each address of a host, without those that this machine can't have: ``localhost`` may have one of
    IPv6 where there is none.

    Raises:
        OSError: one of them can't be used, or none can be had.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, where in dict.fromkeys((family, where) for family, _, _, _, where in found):
            try:
                listeners.append(socket.create_server(where, family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                missing = missing or error
            else:
                listeners[-1].setblocking(False)
        if missing is not None and not listeners:
            raise missing
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _end_when_deaf(connection: socket.socket) -> None:
    """Have the system end it when the client takes nothing any more, or its host has gone: else it would keep its
    place, and an instance at work, for as long as somebody likes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(CLIENT_SECONDS / 4) or 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(CLIENT_SECONDS / 4) or 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * CLIENT_SECONDS))


async def _read(request: web.Request) -> bytes:
    """A client's body.

    Raises:
        web.HTTPException: it is too long, too slow, or not what its headers say.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_SECONDS:g} s") from None
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text=f"the body can't be read: {fault_of(error)}") from None


async def _whole(exchange: Exchange, reply: Reply) -> web.Response:
    """An answer that is no stream.

    Raises:
        InstanceError: it did not come whole.
        _FailedError: another instance may do better.
    """
    body = await reply.read_all()
    response = web.Response(status=reply.status, headers=_answer_headers(reply.headers), body=body)
    if may_retry(reply.status):
        raise _FailedError(f"answers {reply.status}", response)
    if reply.status == 200 and exchange.request.method != hdrs.METH_OPTIONS:
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            raise reply.broke("its answer is not JSON") from None
        exchange.record_body(body)
    else:
        exchange.outcome = "refused"
    return response


def _is_stream(reply: Reply) -> bool:
    return reply.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower() == "text/event-stream"


def _answer_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    left_out = HOP_BY_HOP | {"content-length", "date", "server"}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        served = ", ".join((*_PATHS, _MODELS, "/health", "/metrics", "/console"))
        return error_response(f"nothing is at {request.path}; the proxy serves {served}", 404)
    except web.HTTPException as error:
        allowed = {name: value for name, value in error.headers.items() if name == hdrs.ALLOW}
        return error_response(error.text or error.reason, error.status, allowed)
