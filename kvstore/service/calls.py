"""What gRPC handlers share: errors become statuses, and long calls have a concurrency limit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import grpc

from kvstore.errors import KVStoreError, UnavailableError
from kvstore.wire.messages import REASON_KEY, code_of, reason_of

Servicer = TypeVar("Servicer")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


def abort(context: grpc.ServicerContext, error: KVStoreError) -> NoReturn:
    """End a call with the status that stands for an error."""
    context.set_trailing_metadata(((REASON_KEY, reason_of(error)),))
    context.abort(code_of(error), str(error))
    raise AssertionError("abort returned")


def answering(
    method: Callable[[Servicer, Request, grpc.ServicerContext], Reply],
) -> Callable[[Servicer, Request, Any], Reply]:
    """A unary handler that turns the project's errors into statuses."""

    @functools.wraps(method)
    def handler(self: Servicer, request: Request, context: grpc.ServicerContext) -> Reply:
        try:
            return method(self, request, context)
        except KVStoreError as error:
            abort(context, error)

    return handler


class ConcurrencyLimit:
    """At most so many calls of one kind at once. Each keeps a thread as long as its peer likes.

    Errors name the calls by ``kind``.
    """

    def __init__(self, kind: str, limit: int) -> None:
        self._kind = kind
        self._limit = limit
        self._free = threading.Semaphore(limit)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """One of these calls.

        Raises:
            UnavailableError: there are as many as there may be.
        """
        if not self._free.acquire(blocking=False):
            raise UnavailableError(f"{self._limit} {self._kind} are open, the limit is {self._limit}; try again later")
        try:
            yield
        finally:
            self._free.release()
