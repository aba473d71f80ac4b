"""The access gate of gRPC calls: TLS, bearer tokens, what these grant, and the interceptor that checks each call."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvstore.config.node import NodeConfig
from kvstore.errors import (
    ConfigError,
    InvalidRequestError,
    KVStoreError,
    NotAttachedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownNamespaceError,
)
from kvstore.layout import Layout
from kvstore.namespaces.registry import KnownNamespace
from kvstore.security.certificate import validity_of
from kvstore.security.grants import EVERYTHING, WRITE, Grant
from kvstore.security.secret_files import read_file
from kvstore.security.tls import server_context
from kvstore.service.access.message_memory import MessageMemory
from kvstore.service.access.methods import REPORT_USE, most_parts, needs_of
from kvstore.service.access.rate_limits import TenantLimits
from kvstore.service.calls import abort
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.messages import (
    LOAD_STREAM,
    STORE_STREAM,
    TOKEN_KEY,
    TOKEN_SCHEME,
)

Parse = Callable[[bytes], Any]
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""What needs no token: a probe has none, and learns nothing but that the node serves."""


class Tls:
    """A node's certificate, for all of its TCP ports: each connection gets the latest. Safe for threads.

    Args:
        cert: PEM file of the certificate, the chain behind it.
        key: PEM file of its private key.
        client_ca: PEM file of the authorities whose clients may connect; None: clients need no certificate.

    Raises:
        ConfigError: a file can't be read or used, or others can read the private key.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        def read() -> tuple[bytes, bytes, bytes | None]:
            authorities = read_file(client_ca, "client_ca") if client_ca is not None else None
            return read_file(cert, "tls_cert"), read_file(key, "tls_key"), authorities

        chain, private, authorities = before = read()
        self.context = server_context(cert, key, client_ca)
        """For a connection that comes now."""
        if read() != before:  # gRPC would have other files than the rest, or a key that is not the certificate's
            raise ConfigError(f"tls_cert {cert}, its key or client_ca changed while they were read: reload again")
        self.validity = validity_of(chain)
        """Of the certificate; None: that can't be read."""
        self._asks = client_ca is not None
        self._lock = threading.Lock()
        self._for_grpc: grpc.ServerCertificateConfiguration | None = grpc.ssl_server_certificate_configuration(
            [(private, chain)], root_certificates=authorities
        )

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks with each connection whether there is another certificate. Once."""
        take = self._take_for_grpc  # grpc's stubs don't know of None
        return grpc.dynamic_ssl_server_credentials(take(), take, self._asks)  # type: ignore[arg-type]

    def replace(self, other: Tls) -> None:
        """Use another's certificate and authorities from now on; connections that are open go on as they are."""
        with self._lock:
            self.context, self._for_grpc = other.context, other._for_grpc
            self.validity = other.validity

    def _take_for_grpc(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC does not have yet; None: it has the latest. It takes each of them once, so it is not kept."""
        with self._lock:
            latest, self._for_grpc = self._for_grpc, None
        return latest


def tls_of(config: NodeConfig) -> Tls | None:
    """The TLS that a node is told to have."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(config.tls_cert, config.tls_key, config.client_ca)


NO_TOKEN = b""
"""The pass of whoever is let in without a token."""


class Access:
    """The tokens that a node knows, and what whoever shows one of them may do. Safe for threads.

    Args:
        tokens: for each token what it grants; None: the node asks for none, and whoever reaches it may do everything.
        namespace: the namespace with a fingerprint, if the node knows one.
    """

    def __init__(self, tokens: Mapping[str, Grant] | None, namespace: Callable[[bytes], KnownNamespace | None]) -> None:
        self.asks = tokens is not None
        """Whether tokens are asked for."""
        self._grants = _by_pass(tokens or {})
        self._namespace = namespace

    def replace(self, tokens: Mapping[str, Grant]) -> None:
        """Know these from now on, and no others."""
        self._grants = _by_pass(tokens)

    # -- who calls ---------------------------------------------------------------------------------------------------

    def grant_of(self, shown: bytes) -> Grant | None:
        """What a pass grants now: that of a connection that outlives its token's removal grants nothing any more."""
        return EVERYTHING if shown == NO_TOKEN else self._grants.get(shown)

    def pass_of_header(self, authorization: str) -> bytes | None:
        """The pass for an authorization, ``Bearer TOKEN``; None: it is not good."""
        scheme, _, token = authorization.partition(" ")
        # By its digest, which nobody can choose: how long finding it takes says nothing of the tokens.
        shown = _pass_of(token)
        return shown if shown in self._grants and scheme.lower() == TOKEN_SCHEME else None

    def accept(self, authorization: str) -> Grant | None:
        """What an ``Authorization`` header grants; None: nothing."""
        shown = self.pass_of_header(authorization)
        return self._grants.get(shown) if shown is not None else None

    def pass_of_call(self, context: grpc.ServicerContext) -> bytes:
        """The pass of whoever makes a call.

        Raises:
            UnauthenticatedError: a token that the node does not know; none, and it is not the Unix socket.
        """
        if not self.asks:
            return NO_TOKEN
        shown = [str(value) for key, value in context.invocation_metadata() or () if key == TOKEN_KEY]
        if not shown:
            if context.peer().startswith("unix:"):  # which is its user's alone
                return NO_TOKEN
            raise UnauthenticatedError("no token; this node wants one")
        found = self.pass_of_header(shown[0]) if len(shown) == 1 else None
        if found is None:
            raise UnauthenticatedError("a token that this node does not know")
        return found

    def caller(self, context: grpc.ServicerContext) -> Grant:
        """What whoever makes a call may do. Errors as :meth:`pass_of_call`."""
        return self.holder(self.pass_of_call(context))

    def holder(self, shown: bytes) -> Grant:
        """What whoever showed a pass may do now.

        Raises:
            UnauthenticatedError: nothing any more.
        """
        grant = self.grant_of(shown)
        if grant is None:
            raise UnauthenticatedError("a token that this node no longer knows")
        return grant

    # -- what they may do --------------------------------------------------------------------------------------------

    def sees(self, grant: Grant, fingerprint: bytes) -> bool:
        """Whether a namespace is there for a caller."""
        known = self._namespace(fingerprint)
        return known is not None and grant.sees(known.layout.tenant)

    def check_pages(self, grant: Grant, fingerprint: bytes, right: str) -> None:
        """Whether a caller may do that to pages of a namespace.

        Raises:
            PermissionDeniedError: the caller's token does not have the right.
            UnknownNamespaceError: no such namespace, or another tenant's: nobody can tell which.
        """
        if right not in grant.rights:
            raise PermissionDeniedError(f"the token {grant.name} does not have the right {right!r}")
        if not grant.every and not self.sees(grant, fingerprint):
            raise UnknownNamespaceError(f"unknown namespace {fingerprint.hex()[:16] or '(empty)'}: open it first")

    def check_right(self, grant: Grant, method: str) -> None:
        """Whether a caller may make a call at all.

        Raises:
            PermissionDeniedError: it is not the caller's to make.
        """
        needs = needs_of(method)
        if not needs.met_by(grant):
            name = method.rpartition("/")[2]
            wanted = f"the right {needs.right!r}" if needs.right not in grant.rights else "a token of every tenant"
            raise PermissionDeniedError(f"{name} needs {wanted}, which the token {grant.name} does not grant")

    def check_request(self, grant: Grant, method: str, request: Any) -> None:
        """Whether a caller may ask for this. What it says of others' namespaces beside is taken out of it.

        Raises:
            PermissionDeniedError: it is not the caller's to ask for.
            UnknownNamespaceError: the request names a namespace that is not there for the caller.
            NotAttachedError: it names a client that maps the arena, which the caller is not.
        """
        if isinstance(request, pb.OpenNamespaceRequest):
            self._check_layout(grant, request)
        if grant.every:
            return
        needs = needs_of(method)
        for fingerprint in needs.fingerprints(request):
            self.check_pages(grant, fingerprint, needs.right)
        if getattr(request, "client", 0):
            raise NotAttachedError("this client is not attached to the node's arena")
        reported = request if isinstance(request, pb.UseReport) else getattr(request, "used", None)
        told: Any
        for told in (reported.uses, reported.lookups) if reported is not None else ():
            own = [each for each in told if self.sees(grant, each.fingerprint)]
            del told[:]
            told.extend(own)

    def _check_layout(self, grant: Grant, request: pb.OpenNamespaceRequest) -> None:
        if request.durability and WRITE not in grant.rights:
            raise PermissionDeniedError(
                f"durability needs the right {WRITE!r}, which the token {grant.name} does not have"
            )
        layout = Layout.from_json(request.layout)
        tenant = layout.tenant
        if not grant.sees(tenant):
            whose = f"tenant {grant.tenant!r}" if grant.tenant else "layouts without a tenant"
            raise PermissionDeniedError(
                f"the token {grant.name} is for {whose}, and this layout's tenant is {tenant!r}: open it with the"
                " token's own tenant"
            )
        if WRITE not in grant.rights:
            request.label = ""  # it may bring another rule
        if WRITE not in grant.rights and self._namespace(layout.fingerprint) is None:
            raise PermissionDeniedError(
                f"nobody has opened this namespace yet: a new one needs the right {WRITE!r}, which the token"
                f" {grant.name} does not have"
            )


class Gate(grpc.ServerInterceptor):
    """Lets calls in that may be made, as many as tenants' limits and this process's memory allow.

    Args:
        access: who may do what.
        limits: of tenants.
        note: told of each call that is let in: the peer, as gRPC names it, and its pass.
    """

    def __init__(self, access: Access, limits: TenantLimits, note: Callable[[str, bytes], None]) -> None:
        self._access = access
        self._limits = limits
        self._note = note
        self._messages = MessageMemory()
        self._parsing = threading.Lock()
        """Held while a message is parsed and its parts are counted: millions of empty ones take 30 times its size."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The call's handler, or one that says why not.

        It is one of a stream of requests, of one for most calls: such a handler begins before the first one is there,
        so that an unauthenticated peer who never sends one is not waited for.
        """
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        whole = handler.request_streaming
        # The only message of other calls is parsed here, where it is known whose it is, and how large.
        parse = None if whole else handler.request_deserializer
        coders = {
            "request_deserializer": handler.request_deserializer if whole else None,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            streamed = handler.unary_stream or handler.stream_stream
            return grpc.stream_stream_rpc_method_handler(self._guarded_stream(streamed, method, parse), **coders)
        behavior = handler.unary_unary or handler.stream_unary
        return grpc.stream_unary_rpc_method_handler(self._guarded(behavior, method, parse), **coders)

    def _guarded(self, behavior: Any, method: str, parse: Parse | None) -> Callable[[Iterator[Any], Any], Any]:
        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            try:
                with self._admitted(method, context, "" if parse else "payload streams") as grant:
                    if parse is None:
                        return behavior(self._stream(grant, method, requests), context)
                    with self._messages.receiving(grant, requests, context) as message:
                        answer = behavior(self._request(grant, method, message, parse), context)
                    self._messages.answering(grant, answer.ByteSize(), context)
                    return answer
            except KVStoreError as error:
                abort(context, error)

        return call

    def _guarded_stream(self, behavior: Any, method: str, parse: Parse | None) -> Callable[[Iterator[Any], Any], Any]:
        stream = "payload streams" if method == LOAD_STREAM else "other streams"

        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with self._admitted(method, context, stream) as grant:
                    if parse is None:
                        yield from behavior(self._stream(grant, method, requests), context)
                        return
                    with self._messages.receiving(grant, requests, context) as message:
                        request = self._request(grant, method, message, parse)
                    del message
                    answers = behavior(request, context)
                    del request
                    yield from self._counted(grant, answers) if method == LOAD_STREAM else answers
            except KVStoreError as error:
                abort(context, error)

        return call

    @contextmanager
    def _admitted(self, method: str, context: grpc.ServicerContext, stream: str) -> Iterator[Grant]:
        """Whoever may make a call, as one of those that are under way.

        Raises:
            KVStoreError: they may not, or not now.
        """
        shown = self._access.pass_of_call(context)
        grant = self._access.holder(shown)
        self._note(context.peer(), shown)
        self._access.check_right(grant, method)
        with self._limits.call(grant, stream, reports=method == REPORT_USE):
            yield grant

    def _stream(self, grant: Grant, method: str, requests: Iterator[Any]) -> Iterator[Any]:
        """The messages of a stream of requests."""
        return self._counted(grant, requests) if method == STORE_STREAM else requests

    def _request(self, grant: Grant, method: str, message: bytes | None, parse: Parse) -> Any:
        """A call's only request.

        Raises:
            KVStoreError: there is none, it can't be read, or it names what is not the caller's.
        """
        if message is None:
            raise InvalidRequestError("the call carries no message")
        with self._parsing:
            try:
                request = parse(message)
            except DecodeError as error:
                raise InvalidRequestError("the call's message can't be read") from error
            most_parts(request)
        self._access.check_request(grant, method, request)
        return request

    def _counted(self, grant: Grant, messages: Iterator[bytes]) -> Iterator[bytes]:
        for message in messages:
            self._limits.spend(grant, len(message))
            yield message


def _pass_of(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _by_pass(tokens: Mapping[str, Grant]) -> dict[bytes, Grant]:
    return {_pass_of(token): grant for token, grant in tokens.items()}
