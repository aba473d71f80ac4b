"""One client's request on its way: what instances are sent for it, and what is told to the client."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web
from multidict import CIMultiDict

from kvstore.connector.proxy.instances import Instance
from kvstore.responses.answer import StreamRecorder, finished_body

_REQUEST_ID = "X-Request-Id"
_MOST_LOGGED = 128
"""Characters of an id, which a client chooses."""
HOP_BY_HOP = {
    name.lower()
    for name in (
        hdrs.CONNECTION,
        hdrs.KEEP_ALIVE,
        hdrs.PROXY_AUTHENTICATE,
        hdrs.PROXY_AUTHORIZATION,
        hdrs.TE,
        hdrs.TRAILER,
        hdrs.TRANSFER_ENCODING,
        hdrs.UPGRADE,
    )
}
"""Headers of a connection, which are not passed on."""
_OURS = HOP_BY_HOP | {
    name.lower()
    for name in (
        hdrs.HOST,
        hdrs.CONTENT_LENGTH,
        hdrs.CONTENT_ENCODING,
        hdrs.CONTENT_TYPE,
        hdrs.ACCEPT_ENCODING,
        hdrs.EXPECT,
        _REQUEST_ID,
    )
}


class Exchange:
    """The request, whose answer may go on being computed when its client has gone."""

    def __init__(self, request: web.Request, asked: dict[str, Any]) -> None:
        self.request = request
        self.asked = asked
        self.request_id = request.headers.get(_REQUEST_ID) or uuid.uuid4().hex
        self.named = self.request_id[:_MOST_LOGGED]
        """In the log."""
        self.began = time.monotonic()
        self.outcome = "answered"
        self.made_by: list[Instance] = []
        """Of the answer: who computed the prompt, where that was somebody else, and who answered."""
        self._client_has_gone = False
        self._goes_on: Callable[[], bool] = lambda: False
        self._new_recorder: Callable[[], StreamRecorder] | None = None
        self._recorder: StreamRecorder | None = None
        self._body: bytes | None = None

    def headers(self, suffix: str) -> CIMultiDict[str]:
        """What an instance is sent: the client's headers but for those of its connection, and an id for each attempt,
        since engines take each id once."""
        named = {name.strip().lower() for name in self.request.headers.get(hdrs.CONNECTION, "").split(",")}
        headers = CIMultiDict(
            (name, value) for name, value in self.request.headers.items() if name.lower() not in _OURS | named
        )
        headers[_REQUEST_ID] = self.request_id + suffix
        headers[hdrs.CONTENT_TYPE] = "application/json"
        headers[hdrs.ACCEPT_ENCODING] = "identity"
        return headers

    def keep_answer(self, new_recorder: Callable[[], StreamRecorder], goes_on: Callable[[], bool]) -> None:
        """Record the answer.

        Args:
            new_recorder: for the events of each attempt, of which the last counts.
            goes_on: whether somebody else waits for the answer when the client has gone.
        """
        self._new_recorder = new_recorder
        self._goes_on = goes_on

    def record_stream(self) -> None:
        """An attempt answers with a stream."""
        self._recorder = None if self._new_recorder is None else self._new_recorder()

    def record_event(self, event: bytes) -> None:
        """It said this."""
        if self._recorder is not None:
            self._recorder.add(event)

    def record_body(self, body: bytes) -> None:
        """An attempt answered with this."""
        self._body = body if self._new_recorder is not None else None

    def recorded(self, most_bytes: int) -> dict[str, Any] | None:
        """The answer, as a body; None: it is not finished, or longer than this."""
        if self.outcome != "answered":
            return None
        if self._body is not None:
            return finished_body(self._body) if len(self._body) <= most_bytes else None
        return None if self._recorder is None else self._recorder.finished()

    def without_client(self) -> Exchange:
        """The same request once more, whose answer is recorded and told to nobody."""
        again = Exchange(self.request, self.asked)
        again._client_has_gone = True
        return again

    async def prepare(self, response: web.StreamResponse) -> None:
        """Begin a stream to the client."""
        await self._tell(lambda: response.prepare(self.request))

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        """Tell the client more of it."""
        await self._tell(lambda: response.write(data))

    async def end(self, response: web.StreamResponse) -> None:
        """Tell the client that this is all."""
        await self._tell(response.write_eof)

    async def _tell(self, step: Callable[[], Awaitable[object]]) -> None:
        """Do something for the client. When it has gone, that is the end of an answer that nobody else waits for."""
        if self._client_has_gone:
            return
        try:
            await step()
        except ConnectionError:
            if not self._goes_on():
                raise
            self._client_has_gone = True
