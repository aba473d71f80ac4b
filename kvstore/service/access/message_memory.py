"""Limits on the memory of gRPC messages: requests that arrive or are worked on, and answers that nobody reads.

gRPC reads a message as a whole before anything of it can be looked at, and it keeps an answer until its caller has
taken it. Nothing of a message is in this process before somebody here waits for it, but what HTTP/2's smallest window
lets come. So whoever waits for one takes a slot first; and of large ones, of which their calls make several times
their size, only a few are worked on at once. That costs no time: these calls compute, one at a time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from kvstore.errors import LimitExceededError
from kvstore.security.grants import Grant
from kvstore.service.access.rate_limits import TENANT_SHARE

MOST_COMING = 16
"""Most messages at once that are on their way in."""
MOST_LARGE = 4
"""Most large messages at once that are worked on."""
MOST_WAITING = 16
"""Most large messages at once that wait for that."""
LARGE_BYTES = 64 << 10
"""Smaller messages are worked on at once: 2,048 pages."""
COME_SECONDS = 5.0
"""How long a message may take to come while others wait for its slot."""
MOST_UNREAD_BYTES = 64 << 20
"""Most bytes of answers that nobody has taken."""
_WAIT_SECONDS = 30.0
"""How long a message waits for its slot, or for being worked on."""
_LOOK_SECONDS = 0.25
_SLOW_SHARE = 4
"""One tenant has at most one in so many slots of messages on their way: it says itself how long they take."""
_CALL_BYTES = 16 << 10
"""What a call takes beside its answer."""
Caller = str | None
"""A tenant; None: all callers who are of every tenant."""


class _Slots:
    """A limit on what is in use at once, in all and by one caller, so that the rest is left to others."""

    def __init__(self, most: int, of_tenant: int = TENANT_SHARE) -> None:
        self.most = most
        self.taken: Counter[Caller] = Counter()
        self._of_tenant = of_tenant

    def allow(self, caller: Caller, size: int = 1) -> bool:
        part = TENANT_SHARE if caller is None else self._of_tenant
        return self.taken.total() + size <= self.most and self.taken[caller] + size <= max(1, self.most // part)

    def refusal(self, what: str) -> LimitExceededError:
        return LimitExceededError(
            f"{self.taken.total()} {what}, the limit is {self.most}, and less of one tenant; try again later"
        )


@dataclass(slots=True, eq=False)
class _Coming:
    context: grpc.ServicerContext
    until: float


class MessageMemory:
    """Counts messages, and makes calls wait or refuses them when there are too many. Safe for threads."""

    def __init__(
        self,
        coming: int = MOST_COMING,
        large: int = MOST_LARGE,
        waiting: int = MOST_WAITING,
        unread: int = MOST_UNREAD_BYTES,
    ) -> None:
        self._changed = threading.Condition()
        self._coming = _Slots(coming, _SLOW_SHARE)
        self._large, self._waiting, self._unread = _Slots(large), _Slots(waiting), _Slots(unread)
        self._awaited: dict[_Coming, None] = {}

    @contextmanager
    def receiving(
        self, grant: Grant, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes | None]:
        """The only message of a call (None: it has none), which is worked on until the context ends.

        Raises:
            LimitExceededError: others are in its way for long.
        """
        caller = None if grant.every else grant.tenant
        with self._awaiting(caller, context):
            message = next(requests, None)
        if message is None or len(message) <= LARGE_BYTES:
            yield message
            return
        with self._working(caller, context):
            yield message

    def answering(self, grant: Grant, size: int, context: grpc.ServicerContext) -> None:
        """An answer of so many bytes is on its way out. It counts until its caller has taken it.

        Raises:
            LimitExceededError: too much waits for being taken.
        """
        caller, size = None if grant.every else grant.tenant, size + _CALL_BYTES
        with self._changed:
            if not self._unread.allow(caller, size):
                raise self._unread.refusal("bytes of answers wait for being read")
            self._unread.taken[caller] += size

        def taken() -> None:
            with self._changed:
                self._unread.taken[caller] -= size

        if not context.add_callback(taken):  # the call is over
            taken()

    @contextmanager
    def _awaiting(self, caller: Caller, context: grpc.ServicerContext) -> Iterator[None]:
        with self._changed:
            self._wait(self._coming, caller, context, "messages are on their way")
            self._coming.taken[caller] += 1
            coming = _Coming(context, time.monotonic() + COME_SECONDS)
            self._awaited[coming] = None
        try:
            yield
        finally:
            with self._changed:
                del self._awaited[coming]
                self._coming.taken[caller] -= 1
                self._changed.notify_all()

    @contextmanager
    def _working(self, caller: Caller, context: grpc.ServicerContext) -> Iterator[None]:
        with self._changed:
            if not self._waiting.allow(caller):
                raise self._waiting.refusal("large messages wait for being worked on")
            self._waiting.taken[caller] += 1
            try:
                self._wait(self._large, caller, context, "large messages are being worked on")
            finally:
                self._waiting.taken[caller] -= 1
            self._large.taken[caller] += 1
        try:
            yield
        finally:
            with self._changed:
                self._large.taken[caller] -= 1
                self._changed.notify_all()

    def _wait(self, slots: _Slots, caller: Caller, context: grpc.ServicerContext, what: str) -> None:
        """Wait until a slot is free. The caller has the lock."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not slots.allow(caller):
            self._end_overdue()
            if time.monotonic() > deadline or not context.is_active():
                raise slots.refusal(what)
            self._changed.wait(_LOOK_SECONDS)

    def _end_overdue(self) -> None:
        """Whoever sends nothing gives way to whoever waits: its call ends, and with it what came of its message."""
        now = time.monotonic()
        for each in self._awaited:
            if each.until < now:
                each.until = math.inf
                each.context.cancel()
