"""Who may call over TCP: TLS, and bearer tokens."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import grpc

from kvstore.config import NodeConfig
from kvstore.errors import ConfigError, UnauthenticatedError
from kvstore.secret_files import check_private, read_file
from kvstore.service.calls import abort
from kvstore.wire import TOKEN_KEY, TOKEN_SCHEME

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""What needs no token: a probe has none, and learns nothing but that the node serves."""


class Tls:
    """A node's certificate, for both of its TCP ports.

    Args:
        cert: PEM file of the certificate, the chain behind it.
        key: PEM file of its private key.
        client_ca: PEM file of the authorities whose clients may connect; None: clients need no certificate.

    Raises:
        ConfigError: a file can't be read or used, or others can read the private key.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        check_private(key, "tls_key")
        chain, private = read_file(cert, "tls_cert"), read_file(key, "tls_key")
        authorities = read_file(client_ca, "client_ca") if client_ca is not None else None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.num_tickets = 0  # connections are kept, not resumed
        try:
            self.context.load_cert_chain(cert, key, password=lambda: "")  # or it would ask at the terminal
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"tls_cert {cert} and tls_key {key} can't be used: {error}") from error
        if client_ca is not None:
            try:
                self.context.load_verify_locations(client_ca)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"client_ca {client_ca} can't be used: {error}") from error
            self.context.verify_mode = ssl.CERT_REQUIRED
        self.grpc = grpc.ssl_server_credentials(
            [(private, chain)], root_certificates=authorities, require_client_auth=client_ca is not None
        )


def tls_of(config: NodeConfig) -> Tls | None:
    """The TLS that a node is told to have."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(config.tls_cert, config.tls_key, config.client_ca)


class Tokens:
    """The tokens that a node knows.

    Args:
        tokens: for each token its name.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._digests = [_digest(token) for token in tokens]

    def replace(self, tokens: Mapping[str, str]) -> None:
        """Know these from now on, and no others."""
        self._digests = [_digest(token) for token in tokens]

    def accept(self, shown: str) -> bool:
        """Whether an authorization, ``Bearer TOKEN``, is one of them."""
        scheme, _, token = shown.partition(" ")
        digest = _digest(token)
        # All of them, whichever it is: how long it takes says nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == TOKEN_SCHEME


class TokenGate(grpc.ServerInterceptor):
    """Lets calls in that carry a token, and those over the Unix socket, which is its user's alone."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The call's handler, or one that says why not."""
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_SERVICES):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == TOKEN_KEY]
        if len(shown) == 1 and self._tokens.accept(str(shown[0])):
            return handler
        reason = "a token that this node does not know" if shown else "no token; this node wants one"
        return _only_over_the_unix_socket(handler, reason)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _only_over_the_unix_socket(
    handler: grpc.RpcMethodHandler[Any, Any], reason: str
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that lets the Unix socket's calls through and refuses all others."""

    def guarded(behavior: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            if not context.peer().startswith("unix:"):
                _refuse(context, reason)
            return behavior(request, context)

        return call

    coders = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(guarded(handler.unary_unary), **coders)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(guarded(handler.unary_stream), **coders)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(guarded(handler.stream_unary), **coders)
    assert handler.stream_stream is not None, "there is no fifth kind"
    return grpc.stream_stream_rpc_method_handler(guarded(handler.stream_stream), **coders)


def _refuse(context: grpc.ServicerContext, reason: str) -> NoReturn:
    abort(context, UnauthenticatedError(reason))
