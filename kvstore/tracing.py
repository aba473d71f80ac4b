"""OpenTelemetry spans of a node's calls and of a client's, with the trace's context in the calls' metadata. Optional.

A client's span goes over gRPC in the headers ``traceparent`` and ``tracestate`` (W3C Trace Context), and the node's
span of that call becomes its child. Pages that move through shared memory or over bulk connections have no call, and so
the client's span alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from kvstore.errors import ConfigError

try:
    from opentelemetry.propagate import extract, inject
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
except ImportError as _error:
    raise ConfigError("traces need OpenTelemetry: install kvstore-offload[tracing]") from _error

from kvstore.status import kvstore_version

_SECONDS = 5.0
"""How long one export may take; what it could not bring is lost."""


def open_provider(endpoint: str, service: str = "kvstore") -> TracerProvider:
    """What sends spans to a collector, in the background; shut it down in the end.

    Which calls are sampled is what OpenTelemetry's own variables say (``OTEL_TRACES_SAMPLER``): by default those whose
    caller is sampled, and those that come without a trace.

    Args:
        endpoint: of OTLP over gRPC, ``http://127.0.0.1:4317``; ``https://`` for TLS.
        service: as which these spans are shown.

    Raises:
        ConfigError: OpenTelemetry's exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError("traces need OpenTelemetry's exporter: install kvstore-offload[tracing]") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service, "service.version": kvstore_version()}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class ServerSpans(grpc.ServerInterceptor):
    """A span for each call that a node answers; for streams, all of it."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer: Tracer = provider.get_tracer("kvstore", kvstore_version())

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The call's handler, in a span."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.lstrip("/")
        carrier = {key: value for key, value in handler_call_details.invocation_metadata or () if type(value) is str}
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._call(handler.unary_unary, method, carrier), **coders)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._call(handler.stream_unary, method, carrier), **coders)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream, method, carrier), **coders)
        assert handler.stream_stream is not None, "there is no fifth kind"
        return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream, method, carrier), **coders)

    def _call(
        self, behavior: Callable[[Any, Any], Any], method: str, carrier: dict[str, str]
    ) -> Callable[[Any, Any], Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            with self._span(method, carrier, context):
                return behavior(request, context)

        return call

    def _stream(
        self, behavior: Callable[[Any, Any], Iterator[Any]], method: str, carrier: dict[str, str]
    ) -> Callable[[Any, Any], Iterator[Any]]:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._span(method, carrier, context):
                yield from behavior(request, context)

        return call

    @contextlib.contextmanager
    def _span(self, method: str, carrier: dict[str, str], context: grpc.ServicerContext) -> Iterator[None]:
        service, _, name = method.partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        # Not made the current one: a stream's handler may go on in another thread.
        span = self._tracer.start_span(method, extract(carrier), SpanKind.SERVER, attributes)
        try:
            yield
        except Exception:
            code = context.code()  # type: ignore[attr-defined]  # the types don't have it
            code = code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
            span.set_attribute("rpc.grpc.status_code", code.value[0])
            span.set_status(Status(StatusCode.ERROR, code.name))
            raise
        else:
            span.set_attribute("rpc.grpc.status_code", 0)
        finally:
            span.end()


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class ContextInCalls(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
):
    """Adds the current span's context to each call of a channel."""

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """One call."""
        return continuation(_with_context(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """One call."""
        return continuation(_with_context(client_call_details), request)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """One call."""
        return continuation(_with_context(client_call_details), request_iterator)


def _with_context(details: Any) -> _Details:
    carrier: dict[str, str] = {}
    inject(carrier)
    return _Details(
        details.method,
        details.timeout,
        (*(details.metadata or ()), *carrier.items()),
        details.credentials,
        getattr(details, "wait_for_ready", None),
        getattr(details, "compression", None),
    )


class ClientSpans:
    """Spans of what a client does."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer: Tracer = provider.get_tracer("kvstore", kvstore_version())

    @contextlib.contextmanager
    def span(self, name: str, pages: int, request_id: str = "") -> Iterator[Span]:
        """Around a piece of work on so many pages, of an engine's request if it is one's. It is the current one inside,
        and tells of an error."""
        attributes = {"kvstore.pages": pages} | ({"kvstore.request": request_id} if request_id else {})
        with self._tracer.start_as_current_span(name, kind=SpanKind.CLIENT, attributes=attributes) as span:
            yield span
