"""Connects a command to its node: that of ``--url``, else of ``KVSTORE_SOCKET``, else on the default socket."""

from __future__ import annotations

import argparse
import os

from kvstore.client.client import Client
from kvstore.client.environment import connect_by_environment
from kvstore.client.url import socket_url
from kvstore.config.load import load_config
from kvstore.config.node import default_socket
from kvstore.errors import InvalidRequestError


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
