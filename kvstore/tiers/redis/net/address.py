"""Where Redis is: the URL forms that are usual, read without any I/O.

======================================================  ========================================
``redis://[user:password@]host[:port][/db]``            one server
``rediss://…``                                          the same over TLS
``unix://[user:password@]/path/to.sock[?db=0]``         one server on a Unix socket
``redis+sentinel://host:port,host:port/service[/db]``   the master that Sentinels name; ``rediss+…``: TLS
``redis+cluster://host:port,host:port``                 a Cluster, found by any of its nodes; ``rediss+…``: TLS
======================================================  ========================================

Options behind ``?`` go to redis-py's connections (``ssl_ca_certs``, ``ssl_certfile``, …). User and password of a
Sentinel URL are the servers'; the Sentinels' own are ``sentinel_username`` and ``sentinel_password`` behind ``?``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.connection import parse_url

from kvstore.errors import ConfigError

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379


class Kind(enum.Enum):
    """How servers are found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. Its representation has no password in it."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    """Servers, Sentinels, or nodes of the Cluster to ask first; empty for a Unix socket."""
    service: str
    """The master's name at the Sentinels."""
    options: Mapping[str, Any]
    """redis-py's keyword arguments of a connection, without host and port."""

    def __repr__(self) -> str:
        where = ",".join(f"{host}:{port}" for host, port in self.hosts) or self.options.get("path", "")
        return f"<Redis {self.kind.value} {where}{'/' + self.service if self.service else ''}>"


def parse_address(url: str) -> Address:
    """Read a URL.

    Raises:
        ConfigError: no such form; the message names what would be right, and no password.
    """
    scheme, separator, _ = url.partition("://")
    base, _, kind_name = scheme.partition("+")
    if not separator or base not in ("redis", "rediss", "unix") or kind_name not in ("", "sentinel", "cluster"):
        raise ConfigError(
            f"redis: unknown scheme {scheme if separator else ''!r}; use redis://, rediss://, unix://,"
            " redis+sentinel:// or redis+cluster:// (rediss+…:// for TLS)"
        )
    if base == "unix" and kind_name:
        raise ConfigError(f"redis: {scheme}:// does not exist: Sentinel and Cluster are reached by host and port")
    kind = Kind(kind_name or "single")
    try:
        parts = urlsplit(url)
        login, at, places = parts.netloc.rpartition("@")
        default = DEFAULT_SENTINEL_PORT if kind is Kind.SENTINEL else DEFAULT_PORT
        hosts = () if base == "unix" else tuple(_host(place, default) for place in places.split(","))
        path, service = parts.path, ""
        if kind is Kind.SENTINEL:
            service, _, database = path.lstrip("/").partition("/")
            path = f"/{database}" if database else ""
        # What is left has one host, as redis-py reads it.
        plain = f"{base}://{login}{at}{'' if base == 'unix' else 'host'}{path}?{parts.query}"
        options = dict(parse_url(plain))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigError(f"redis: the URL can't be read: {error}") from error
    if kind is Kind.SENTINEL and not service:
        raise ConfigError("redis: a Sentinel URL ends with the master's name: redis+sentinel://host:26379/mymaster")
    if kind is Kind.CLUSTER and options.get("db"):
        raise ConfigError(f"redis: a Cluster has database 0 only, got {options['db']}")
    if kind is not Kind.SINGLE:
        options.pop("connection_class", None)
        if base == "rediss":
            options["ssl"] = True
    options.pop("host", None)
    return Address(kind, hosts, service, options)


def _host(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, str(default_port)
    host = host.strip("[]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("it needs HOST:PORT, or several with commas between")  # no part of it: it may hold a password
    return host, int(port)
