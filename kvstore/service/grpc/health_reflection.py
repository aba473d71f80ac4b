"""gRPC's standard services: health checks and server reflection.

Their messages are described here and kept in a pool of their own: the packages that ship them tie the process to one
major version of protobuf, and a node must run beside whatever its environment has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequestError, KVStoreError
from kvstore.service.calls import ConcurrencyLimit, abort

MOST_WATCHES = 16
"""Most health watches at once."""
MOST_REFLECTIONS = 8
"""Most reflection streams at once."""
MOST_CHECKS = 8
"""Most health checks and watches at once whose request has not come."""
_CHECK_SECONDS = 5.0
"""How long it may take to come."""
_MOST_BYTES = 1024
"""Longest request that is read: no service has a longer name."""
_FieldKind = descriptor_pb2.FieldDescriptorProto
_STRING, _BYTES, _INT32, _ENUM, _MESSAGE = (
    _FieldKind.TYPE_STRING,
    _FieldKind.TYPE_BYTES,
    _FieldKind.TYPE_INT32,
    _FieldKind.TYPE_ENUM,
    _FieldKind.TYPE_MESSAGE,
)
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


class Health(grpc.GenericRpcHandler):
    """``grpc.health.v1.Health``: the node as a whole (``""``) and each service by name.

    Args:
        services: full names of the services that this node has.
        watched_by: around each watch, by what gRPC calls its peer.
    """

    def __init__(
        self,
        services: Sequence[str],
        watched_by: Callable[[str], AbstractContextManager[None]] = lambda peer: nullcontext(),
    ) -> None:
        self._services = {"", *services}
        self._watched_by = watched_by
        self._watches = ConcurrencyLimit("health watches", MOST_WATCHES)
        self._checks = ConcurrencyLimit("health checks", MOST_CHECKS)
        self._changed = threading.Condition()
        self._status = SERVING
        self._request, self._reply = (_HEALTH_CLASSES[name] for name in ("HealthCheckRequest", "HealthCheckResponse"))
        reply = self._reply
        self._handlers: dict[str, Any] = {
            # Of streams of requests: such a handler begins before a message is there, and says when one may come.
            "/grpc.health.v1.Health/Check": grpc.stream_unary_rpc_method_handler(
                self._check, None, reply.SerializeToString
            ),
            "/grpc.health.v1.Health/Watch": grpc.stream_stream_rpc_method_handler(
                self._watch, None, reply.SerializeToString
            ),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call by its path."""
        return self._handlers.get(handler_call_details.method)

    @property
    def serving(self) -> bool:
        """Whether the node is not going away."""
        return self._status == SERVING

    def stop(self) -> None:
        """Say from now on that the node is going away, and end all watches."""
        with self._changed:
            self._status = NOT_SERVING
        self._look_again()

    def _check(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        try:
            service = self._asked(requests, context)
        except KVStoreError as error:
            abort(context, error)
        if service not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {service!r} here")
        return self._reply(status=self._status)

    def _watch(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            service = self._asked(requests, context)
            with self._watches.slot(), self._watched_by(context.peer()):
                yield from self._states(service, context)
        except KVStoreError as error:
            abort(context, error)

    def _asked(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> str:
        """The service that a call asks for.

        Raises:
            UnavailableError: too many others' requests are waited for.
            InvalidRequestError: it is no request.
        """
        # Anybody may call this, so nobody's request is waited for in another call's slot, nor for long.
        late = threading.Timer(_CHECK_SECONDS, context.cancel)
        late.daemon = True
        try:
            with self._checks.slot():
                late.start()
                message = next(requests, b"")
                return _read(self._request, message).service  # type: ignore[no-any-return]
        finally:
            late.cancel()

    def _states(self, service: str, context: grpc.ServicerContext) -> Iterator[Any]:
        if service not in self._services:
            yield self._reply(status=SERVICE_UNKNOWN)
            return
        context.add_callback(self._look_again)
        with self._changed:
            seen = self._status
        yield self._reply(status=seen)
        if seen == SERVING:
            with self._changed:
                self._changed.wait_for(lambda: self._status != SERVING or not context.is_active())
            yield self._reply(status=self._status)

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Reflection(grpc.GenericRpcHandler):
    """``grpc.reflection.v1.ServerReflection`` (and its ``v1alpha`` name) over the files given.

    Args:
        files: serialized ``FileDescriptorProto`` of every file that the services need, dependencies included.
    """

    def __init__(self, files: Sequence[bytes]) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self._limit = ConcurrencyLimit("reflection streams", MOST_REFLECTIONS)
        self._services: list[str] = []
        for data in files:
            described = descriptor_pb2.FileDescriptorProto.FromString(data)
            self._pool.Add(described)
            self._services += [f"{described.package}.{service.name}" for service in described.service]
        self._request, self._reply = (
            _REFLECTION_CLASSES["ServerReflectionRequest"],
            _REFLECTION_CLASSES["ServerReflectionResponse"],
        )
        handler: Any = grpc.stream_stream_rpc_method_handler(self._info, None, self._reply.SerializeToString)
        self._handlers = {
            f"/grpc.reflection.{name}.ServerReflection/ServerReflectionInfo": handler for name in ("v1", "v1alpha")
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call by its path."""
        return self._handlers.get(handler_call_details.method)

    def _info(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            with self._limit.slot():
                for message in requests:
                    yield self._answer(_read(self._request, message))
        except KVStoreError as error:
            abort(context, error)

    def _answer(self, request: Any) -> Any:
        reply = self._reply(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._services:
                reply.list_services_response.service.add(name=name)
        else:
            self._describe(request, kind, reply)
        return reply

    def _describe(self, request: Any, kind: str | None, reply: Any) -> None:
        try:
            if kind == "file_by_filename":
                found = self._pool.FindFileByName(request.file_by_filename)
            elif kind == "file_containing_symbol":
                found = self._file_of(request.file_containing_symbol)
            else:
                reply.error_response.error_code = grpc.StatusCode.UNIMPLEMENTED.value[0]
                reply.error_response.error_message = "there are no extensions here"
                return
        except KeyError as error:
            reply.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            reply.error_response.error_message = str(error)
            return
        reply.file_descriptor_response.file_descriptor_proto.append(found.serialized_pb)

    def _file_of(self, symbol: str) -> Any:
        """The file of a message, an enum, a service or, which the pool does not find by itself, a service's method."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            name, _, method = symbol.rpartition(".")
            service = self._pool.FindServiceByName(name)
            if method not in service.methods_by_name:
                raise
            return service.file


def _read(kind: Any, message: bytes) -> Any:
    """A request.

    Raises:
        InvalidRequestError: it is none.
    """
    if len(message) > _MOST_BYTES:
        raise InvalidRequestError(f"a request of {len(message)} bytes, the limit is {_MOST_BYTES}")
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequestError("the request can't be read") from error


def _field(
    name: str, number: int, kind: Any, *, type_name: str = "", repeated: bool = False, oneof: bool = False
) -> Any:
    field = _FieldKind(name=name, number=number, type=kind)
    field.label = _FieldKind.LABEL_REPEATED if repeated else _FieldKind.LABEL_OPTIONAL
    if type_name:
        field.type_name = type_name
    if oneof:
        field.oneof_index = 0
    return field


def _describe_file(name: str, package: str, messages: dict[str, tuple[str, list[Any]]]) -> Any:
    """A proto3 file; each message with the name of its only oneof (or none) and its fields."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    for message, (oneof, fields) in messages.items():
        described = file.message_type.add(name=message)
        described.field.extend(fields)
        if oneof:
            described.oneof_decl.add(name=oneof)
    return file


def _add_service(file: Any, name: str, methods: Sequence[tuple[str, str, str, bool, bool]]) -> None:
    service = file.service.add(name=name)
    for method, request, reply, client_streams, server_streams in methods:
        service.method.add(
            name=method,
            input_type=f".{file.package}.{request}",
            output_type=f".{file.package}.{reply}",
            client_streaming=client_streams,
            server_streaming=server_streams,
        )


def _classes(file: Any) -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
        for message in file.message_type
    }


def _health_file() -> Any:
    """https://github.com/grpc/grpc/blob/master/doc/health-checking.md, as a descriptor."""
    file = _describe_file(
        "grpc/health/v1/health.proto",
        "grpc.health.v1",
        {
            "HealthCheckRequest": ("", [_field("service", 1, _STRING)]),
            "HealthCheckResponse": (
                "",
                [_field("status", 1, _ENUM, type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus")],
            ),
        },
    )
    statuses = file.message_type[1].enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        statuses.value.add(name=name, number=number)
    request, reply = "HealthCheckRequest", "HealthCheckResponse"
    _add_service(file, "Health", [("Check", request, reply, False, False), ("Watch", request, reply, False, True)])
    return file


def _reflection_file() -> Any:
    """https://github.com/grpc/grpc/blob/master/doc/server-reflection.md, as a descriptor."""
    package = "grpc.reflection.v1"

    def nested(name: str, number: int, message: str) -> Any:
        return _field(name, number, _MESSAGE, type_name=f".{package}.{message}", oneof=True)

    file = _describe_file(
        "grpc/reflection/v1/reflection.proto",
        package,
        {
            "ServerReflectionRequest": (
                "message_request",
                [
                    _field("host", 1, _STRING),
                    _field("file_by_filename", 3, _STRING, oneof=True),
                    _field("file_containing_symbol", 4, _STRING, oneof=True),
                    nested("file_containing_extension", 5, "ExtensionRequest"),
                    _field("all_extension_numbers_of_type", 6, _STRING, oneof=True),
                    _field("list_services", 7, _STRING, oneof=True),
                ],
            ),
            "ExtensionRequest": (
                "",
                [_field("containing_type", 1, _STRING), _field("extension_number", 2, _INT32)],
            ),
            "ServerReflectionResponse": (
                "message_response",
                [
                    _field("valid_host", 1, _STRING),
                    _field("original_request", 2, _MESSAGE, type_name=f".{package}.ServerReflectionRequest"),
                    nested("file_descriptor_response", 4, "FileDescriptorResponse"),
                    nested("all_extension_numbers_response", 5, "ExtensionNumberResponse"),
                    nested("list_services_response", 6, "ListServiceResponse"),
                    nested("error_response", 7, "ErrorResponse"),
                ],
            ),
            "FileDescriptorResponse": ("", [_field("file_descriptor_proto", 1, _BYTES, repeated=True)]),
            "ExtensionNumberResponse": (
                "",
                [_field("base_type_name", 1, _STRING), _field("extension_number", 2, _INT32, repeated=True)],
            ),
            "ListServiceResponse": (
                "",
                [_field("service", 1, _MESSAGE, type_name=f".{package}.ServiceResponse", repeated=True)],
            ),
            "ServiceResponse": ("", [_field("name", 1, _STRING)]),
            "ErrorResponse": ("", [_field("error_code", 1, _INT32), _field("error_message", 2, _STRING)]),
        },
    )
    _add_service(
        file,
        "ServerReflection",
        [("ServerReflectionInfo", "ServerReflectionRequest", "ServerReflectionResponse", True, True)],
    )
    return file


_HEALTH_FILE, _REFLECTION_FILE = _health_file(), _reflection_file()
_HEALTH_CLASSES, _REFLECTION_CLASSES = _classes(_HEALTH_FILE), _classes(_REFLECTION_FILE)
STANDARD_FILES: tuple[bytes, ...] = (_HEALTH_FILE.SerializeToString(), _REFLECTION_FILE.SerializeToString())
"""The descriptors of both services, for reflection itself."""
