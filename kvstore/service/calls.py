"""What every handler does with an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc

from kvstore.errors import KVStoreError
from kvstore.wire import REASON_KEY, code_of

Servicer = TypeVar("Servicer")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


def abort(context: grpc.ServicerContext, error: KVStoreError) -> NoReturn:
    """End a call with the status that stands for an error."""
    context.set_trailing_metadata(((REASON_KEY, type(error).__name__),))
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
