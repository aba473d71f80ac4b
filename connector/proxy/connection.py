"""A client's connection to the proxy, as HTTP: how long it may be quiet, how long its headers may be, and what it is
told when nobody can read what it sends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from kvstore.connector.proxy.messages import error_body

QUIET_SECONDS = 75.0
"""For the whole head of a request to come, on a new connection and behind an answer. Load balancers keep theirs for a
minute: they must be the first to close one, or would send into one that is closed."""
MOST_HEAD_LINE_BYTES = 64 << 10
"""Longest header, and longest URL."""
MOST_HEAD_BYTES = 128 << 10
"""Of a head that does not come whole at once. aiohttp keeps up to 128 headers, of whoever sends a bit now and then."""


class ClientConnection(web.RequestHandler):
    """aiohttp's, of which errors are a client's to read: in OpenAI's form, and without a traceback in the log."""

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=QUIET_SECONDS,
            max_line_size=MOST_HEAD_LINE_BYTES,
            max_field_size=MOST_HEAD_LINE_BYTES,
            access_log=None,  # type: ignore[arg-type] # as its own runner says it
        )
        self._messages: _Requests = _Requests()
        self._head_bytes = 0
        """Since anything else than a part of a head has come."""

    def data_received(self, data: bytes) -> None:
        """Parse it, and end what would be waited for to no end: a head without one, and the body of a request behind
        which the parser says that it is malformed."""
        if self._head_bytes > MOST_HEAD_BYTES:
            return  # it is refused: the connection is closed behind the answer
        known, arriving = self._request_count, self._messages.arriving
        super().data_received(data)
        if self._request_count > known or arriving is not None or self._upgraded:
            self._head_bytes = 0
            self._look_at_latest()
            return
        self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(LineTooLong(b"", MOST_HEAD_BYTES))

    def finish(self) -> asyncio.Task[None] | None:
        """End behind the request that is being answered, or of which a part of the body is missing yet; at once where
        there is none.

        Returns:
            What goes on until then; None: it has ended.
        """
        if (arriving := self._messages.arriving) is not None:
            arriving.on_eof(self.close)  # which makes it deaf
        elif self._waiter is not None and not self._waiter.done():
            self.force_close()
        else:
            self.close()
        return self._task_handler

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
            error_response(
                f"a header or the URL is longer than {MOST_HEAD_LINE_BYTES} bytes, or all of the head than"
                f" {MOST_HEAD_BYTES}",
                431,
            )
            if isinstance(exc, LineTooLong)
            else error_response(f"the request can't be read: {fault_of(exc)}", 400)
        )
        response.force_close()
        return response

    def _look_at_latest(self) -> None:
        fault = getattr(self._messages[-1][0], "exc", None) if self._messages else None
        if fault is not None and (arriving := self._messages.arriving) is not None:
            arriving.set_exception(web.RequestPayloadError(fault_of(fault)))

    def _refuse(self, fault: HttpProcessingError) -> None:
        """Answer as if the parser had said it."""
        self._messages.append((_ErrInfo(status=fault.code, exc=fault, message=fault.message), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what is the proxy's fault. What is left of a body that nobody asked for may be malformed, too."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)


class _Requests(deque[Any]):
    """What was parsed and waits for its turn: aiohttp adds to it in several places."""

    _body: StreamReader | None = None

    def append(self, message: Any) -> None:
        super().append(message)
        if getattr(message[0], "exc", None) is None:
            self._body = message[1]

    @property
    def arriving(self) -> StreamReader | None:
        """The body of the latest request, which may be under way already; None: it is whole."""
        return self._body if self._body is not None and not self._body.is_eof() else None


def error_response(message: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as OpenAI's clients understand it."""
    return web.json_response(error_body(message, status), status=status, headers=headers)


def fault_of(error: BaseException) -> str:
    """What is wrong with what a client sent: the first line of it; the others show bytes, and point at one."""
    fault = error.__cause__ or error
    words = fault.message if isinstance(fault, HttpProcessingError) else str(fault)
    return words.partition("\n")[0].rstrip(":")
