"""Latencies and failures of calls by method, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from kvstore.errors import KVStoreError
from kvstore.wire.messages import code_of

CALL_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets in seconds; one more bucket has the rest."""


class CallTimes(grpc.ServerInterceptor):
    """How long calls take, and how they fail, by method. For streams, all of it counts.

    Around gRPC's calls by itself; those that come another way are told of.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "kvstore_call_seconds",
            "Calls of clients, streams as a whole.",
            ["method"],
            buckets=CALL_BOUNDS,
            registry=registry,
        )
        self._failures = Counter(
            "kvstore_call_failures", "Calls that were answered with an error.", ["method", "code"], registry=registry
        )

    def counts(self) -> dict[str, list[int]]:
        """By method the calls in each bucket."""
        counts: dict[str, list[int]] = {}
        for metric in self._seconds.collect():
            below = 0  # samples come by method, the smallest bound first, and each has those before it
            for sample in metric.samples:
                if sample.name.endswith("_bucket"):
                    of_method = counts.setdefault(sample.labels["method"], [])
                    below = below if of_method else 0
                    of_method.append(int(sample.value) - below)
                    below = int(sample.value)
        return counts

    def took(self, method: str, seconds: float) -> None:
        """A call that did not come by gRPC is over."""
        self._seconds.labels(method).observe(seconds)

    def failed(self, method: str, error: KVStoreError) -> None:
        """It was answered with an error."""
        self._failures.labels(method, code_of(error).name).inc()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The call's handler, timed."""
        handler = continuation(handler_call_details)
        if handler is None:  # unknown methods are not counted: they would be labels of anybody's choice
            return None
        method = handler_call_details.method.rpartition(".")[2]
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._timed(handler.unary_unary, method), **coders)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._timed(handler.stream_unary, method), **coders)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._timed_stream(handler.unary_stream, method), **coders)
        assert handler.stream_stream is not None, "there is no fifth kind"
        return grpc.stream_stream_rpc_method_handler(self._timed_stream(handler.stream_stream, method), **coders)

    def _timed(self, behavior: Callable[[Any, Any], Any], method: str) -> Callable[[Any, Any], Any]:
        seconds = self._seconds.labels(method)

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            started = time.perf_counter()
            try:
                return behavior(request, context)
            except Exception:
                self._failed(method, context)
                raise
            finally:
                seconds.observe(time.perf_counter() - started)

        return call

    def _timed_stream(
        self, behavior: Callable[[Any, Any], Iterator[Any]], method: str
    ) -> Callable[[Any, Any], Iterator[Any]]:
        seconds = self._seconds.labels(method)

        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            started = time.perf_counter()
            try:
                yield from behavior(request, context)
            except Exception:
                self._failed(method, context)
                raise
            finally:
                seconds.observe(time.perf_counter() - started)

        return call

    def _failed(self, method: str, context: grpc.ServicerContext) -> None:
        code = context.code()  # type: ignore[attr-defined]  # the types don't have it
        self._failures.labels(method, code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN").inc()
