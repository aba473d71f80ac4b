"""A client's credentials: its token and certificate, and the authorities that may have signed the node's."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.client.url import RemoteUrl
from kvstore.config.node import is_loopback
from kvstore.errors import InvalidRequestError
from kvstore.security.secret_files import check_private, read_file, read_tokens
from kvstore.security.tls import client_context
from kvstore.wire.messages import TOKEN_KEY, TOKEN_SCHEME


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files for TLS and tokens; see :func:`kvstore.connect`."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    def __bool__(self) -> bool:
        return any((self.ca, self.cert, self.key, self.token_file))

    def check(self, where: RemoteUrl, url: str) -> None:
        """Whether these can be used there.

        Raises:
            InvalidRequestError: they can't; the message says why.
        """
        if where.local and (self.ca or self.cert or self.key):
            raise InvalidRequestError(f"{url}: a Unix socket has no TLS: its user alone can connect")
        if not where.tls and (self.ca or self.cert or self.key):
            raise InvalidRequestError(f"{url}: ca, cert and key are for TLS: write kvs://host:port")
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError(f"{url}: cert and key are given together, or neither")
        if self.token_file and not (where.tls or where.local or is_loopback(where.host)):
            raise InvalidRequestError(f"{url}: a token is not sent to another host without TLS: write kvs://host:port")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries: the first token of the file.

        Raises:
            ConfigError: the file can't be used.
        """
        if self.token_file is None:
            return ()
        token = next(iter(read_tokens(Path(self.token_file))))
        return ((TOKEN_KEY, f"{TOKEN_SCHEME} {token}"),)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For gRPC.

        Raises:
            ConfigError: a file can't be used.
        """
        trusted = self.ca or ssl.get_default_verify_paths().cafile
        roots = read_file(Path(trusted), "ca") if trusted is not None else None
        if self.cert is None or self.key is None:
            return grpc.ssl_channel_credentials(roots)
        check_private(Path(self.key), "key")
        return grpc.ssl_channel_credentials(roots, read_file(Path(self.key), "key"), read_file(Path(self.cert), "cert"))

    def context(self) -> ssl.SSLContext:
        """For bulk connections.

        Raises:
            ConfigError: a file can't be used.
        """
        return client_context(*(Path(each) if each is not None else None for each in (self.ca, self.cert, self.key)))
