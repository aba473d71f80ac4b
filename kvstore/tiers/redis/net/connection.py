"""One connection to a server: redis-py opens it, requests and replies then go over its socket by
:mod:`kvstore.tiers.redis.net.resp`.
"""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore.errors import UnavailableError
from kvstore.host.forking import register_forked
from kvstore.tiers.redis.net.resp import Argument, Buffer, Reply, RespSocket, ServerError, encode

_MOST_AHEAD = 4 << 20
"""Bytes of replies that are asked for before they are received: two full chunks."""
_SENT_AT_ONCE = 1 << 20
"""Bytes of payload behind which what was encoded is sent: the server works on it while more is encoded."""


@dataclass(frozen=True, slots=True)
class Request:
    """One command."""

    slot: int
    """The hash slot of its keys."""
    arguments: Sequence[Argument]
    into: Sequence[Buffer] = ()
    """Where a bulk reply goes; see :meth:`kvstore.tiers.redis.net.resp.RespSocket.receive`."""
    then: Callable[[], None] | None = None
    """Called when its reply is here, before the next one is received: while its bytes are still in the caches."""
    payload_bytes: int = 0
    """How many bytes of pages it carries."""


class ServerConnection:
    """One connection of redis-py, used by one caller at a time."""

    def __init__(self, pool: Any, scripts: Sequence[str], timeout: float) -> None:
        self._pool = pool
        self._redis = pool.get_connection()
        self.idle_since = 0.0
        """On the clock of ``time.monotonic``."""
        try:
            self._socket = self._redis._sock  # noqa: SLF001 - redis-py has no public name for it
            register_forked(self)
            self._resp = RespSocket(self._socket)
            self._load(scripts, time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise

    def _load(self, scripts: Sequence[str], deadline: float) -> None:
        """Load those scripts that the server does not have."""
        if not scripts:
            return
        digests = [hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest().encode() for script in scripts]
        [there] = self.roundtrip([Request(0, [b"SCRIPT", b"EXISTS", *digests])], deadline)
        if not isinstance(there, list) or len(there) != len(scripts):
            there = [0] * len(scripts)
        missing = [script for script, found in zip(scripts, there, strict=True) if found != 1]
        loads = [Request(0, [b"SCRIPT", b"LOAD", script.encode()]) for script in missing]
        for reply in self.roundtrip(loads, deadline):
            if isinstance(reply, ServerError):
                raise UnavailableError(f"a script is refused: {reply.message}")

    def roundtrip(self, requests: Sequence[Request], deadline: float) -> list[Reply]:
        """Send all requests, and receive all replies. After an exception the connection is to be closed.

        Requests for large replies are sent only some ahead: the server keeps every reply in memory until it is sent,
        and memory that it used just now costs it half of what fresh memory does.
        """
        replies: list[Reply] = []
        sizes = [sum(map(len, request.into)) for request in requests]
        sent = ahead = 0
        for place, request in enumerate(requests):
            if place == sent:
                sent, ahead = self._ask(requests, sizes, sent, ahead, deadline)
            replies.append(self._resp.receive(deadline, request.into))
            ahead -= sizes[place]
            if sent < len(requests):
                sent, ahead = self._ask(requests, sizes, sent, ahead, deadline)
            if request.then is not None:
                request.then()
        return replies

    def _ask(
        self, requests: Sequence[Request], sizes: Sequence[int], sent: int, ahead: int, deadline: float
    ) -> tuple[int, int]:
        """Send what may be sent now. Returns how many requests are sent, and the bytes of replies that are on their
        way."""
        first = sent
        while sent < len(requests) and (not ahead or ahead + sizes[sent] <= _MOST_AHEAD):
            ahead += sizes[sent]
            sent += 1
        while first < sent:
            end, payload = first, 0
            while end < sent and payload < _SENT_AT_ONCE:
                payload += requests[end].payload_bytes
                end += 1
            self._resp.send(encode([request.arguments for request in requests[first:end]]), deadline)
            first = end
        return sent, ahead

    def is_quiet(self) -> bool:
        """Whether it is open, and nothing came unasked, as the end of a connection does."""
        if self._socket.fileno() < 0:  # redis-py closes connections when a Cluster's servers change
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Disconnect."""
        self._redis.disconnect()
        self._pool.release(self._redis)

    def forked(self) -> None:
        """In a child: the connection is the parent's, and ends with that."""
        with suppress(OSError):
            self._socket.close()
