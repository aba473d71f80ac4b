"""A client's connection to the proxy, as HTTP: how long it may be quiet, how long its headers may be, and what it is
told when nobody can read what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from connector.proxy_messages import error_body

QUIET_SECONDS = 75.0
"""For the whole head of a request to come, on a new connection and behind an answer. Load balancers keep theirs for a
minute: they must be the first to close one, or would send into one that is closed."""
MOST_HEAD_LINE_BYTES = 64 << 10
"""Longest header, and longest URL."""


class ClientConnection(web.RequestHandler):
    """aiohttp's, of which errors are a client's to read: in OpenAI's form, and without a traceback in the log.

    Args:
        server: of which it is one.
    """

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=QUIET_SECONDS,
            max_line_size=MOST_HEAD_LINE_BYTES,
            max_field_size=MOST_HEAD_LINE_BYTES,
            access_log=None,  # type: ignore[arg-type] # as its own runner says it
        )
        self._body: StreamReader | None = None
        """Of the latest request."""

    def data_received(self, data: bytes) -> None:
        """Parse it. That a body is malformed, the parser says behind its request, which would wait for the rest of it
        until its time is over."""
        super().data_received(data)
        if not self._messages:
            return
        message, body = self._messages[-1]
        fault = getattr(message, "exc", None)
        if fault is None:
            self._body = body
        elif self._body is not None and not self._body.is_eof():
            self._body.set_exception(web.RequestPayloadError(fault_of(fault)))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what can't be parsed. Anything else is a fault of the proxy's, and told by aiohttp."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = (
            error_response(f"a header or the URL is longer than {MOST_HEAD_LINE_BYTES} bytes", 431)
            if isinstance(exc, LineTooLong)
            else error_response(f"the request can't be read: {fault_of(exc)}", 400)
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what is the proxy's fault. What is left of a body that nobody asked for may be malformed, too."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


def error_response(message: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as OpenAI's clients understand it."""
    return web.json_response(error_body(message, status), status=status, headers=headers)


def fault_of(error: BaseException) -> str:
    """What is wrong with what a client sent: the first line of it; the others show bytes, and point at one."""
    fault = error.__cause__ or error
    words = fault.message if isinstance(fault, HttpProcessingError) else str(fault)
    return words.partition("\n")[0].rstrip(":")
