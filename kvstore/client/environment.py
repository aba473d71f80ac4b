"""Clients of the command line: without flags, the environment says which node, and which files for TLS and tokens."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore.client.client import Client
from kvstore.client.connecting import TIMEOUT, connect
from kvstore.client.url import socket_url
from kvstore.config import CONNECT_PREFIX, default_socket, load_config
from kvstore.errors import InvalidRequestError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def add_url_to(command: argparse.ArgumentParser) -> None:
    """The flag that names the node, the same for every command that talks to one."""
    command.add_argument(
        "--url",
        metavar="URL",
        help="the node: unix:///run/kvstore.sock, kv://host:port, or kvs://host:port with TLS (default: the socket in"
        f" KVSTORE_SOCKET, or {default_socket()}). KVSTORE_CONNECT_CA, _CERT, _KEY and _TOKEN_FILE name the files for"
        " TLS and tokens",
    )


def connect_to_node(url: str | None) -> Client:
    """A client of the node at this URL; without one, of the node on the socket that ``serve`` would use here.

    Raises:
        InvalidRequestError: the URL can't be used, or is an embedded store's: it answers its own process only, and
            to look at it would be to open it.
        ConfigError: the environment has a setting that can't be used.
    """
    url = url or socket_url(load_config(environment=os.environ).socket)
    if url.startswith("embedded:"):
        raise InvalidRequestError(f"{url}: an embedded store answers its own process only; give the URL of a node")
    return connect_by_environment(url, os.environ)


def connect_by_environment(
    url: str, environment: Mapping[str, str], traces: TracerProvider | None = None, timeout: float = TIMEOUT
) -> Client:
    """A client with the files that ``KVSTORE_CONNECT_CA``, ``_CERT``, ``_KEY`` and ``_TOKEN_FILE`` name, as far as the
    URL has a use for them. Everything else, and errors, as :func:`kvstore.connect`.
    """

    def file(name: str, *schemes: str) -> str | None:
        return environment.get(CONNECT_PREFIX + name) or None if url.partition(":")[0] in schemes else None

    return connect(
        url,
        timeout=timeout,
        ca=file("CA", "kvs"),
        cert=file("CERT", "kvs"),
        key=file("KEY", "kvs"),
        token_file=file("TOKEN_FILE", "kvs", "kv"),
        traces=traces,
    )
