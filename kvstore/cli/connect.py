"""Connects a command to its node: that of ``--url``, else of ``KVSTORE_SOCKET``, else the one that is found here."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.client.client import Client
from kvstore.client.default_node import default_node
from kvstore.client.environment import connect_by_environment
from kvstore.client.paths.reachability import listener_of
from kvstore.client.url import RemoteUrl, parse_url
from kvstore.config.load import load_config
from kvstore.config.node import default_socket
from kvstore.errors import InvalidRequestError

_PATIENCE_SECONDS = 1.0
"""For an answer, before somebody is told."""


def add_url_to(command: argparse.ArgumentParser) -> None:
    """The flag that names the node, the same for every command that talks to one."""
    command.add_argument(
        "--url",
        metavar="URL",
        help="the node: unix:///run/kvstore.sock, kv://host:port, or kvs://host:port with TLS (default: the socket in"
        f" KVSTORE_SOCKET, or {default_socket()}; where no node serves there, that of another one of this user or of"
        " the machine). KVSTORE_CONNECT_CA, _CERT, _KEY and _TOKEN_FILE name the files for TLS and tokens",
    )


def default_url() -> str:
    """The URL of the node that nobody named; what there is to say of it goes to stderr, where it is another one than
    that which ``serve`` would start here.

    Raises:
        ConfigError: the environment has a setting that can't be used.
    """
    load_config(environment=os.environ)  # what is wrong there is said by every command
    found = default_node(os.environ)
    if found.listens and found.note:
        print(f"kvstore: {found.note}", file=sys.stderr)
    return found.url


@contextmanager
def connect_to_node(url: str | None, timeout: float | None = None) -> Iterator[Client]:
    """A client of the node at this URL; without one, of the node that :func:`kvstore.client.default_node` finds.

    While the node does not answer, a line on stderr says behind a second whom the command is waiting for.

    Args:
        url: the node's.
        timeout: seconds that any one call may take; None: as long as a client's calls do.

    Raises:
        InvalidRequestError: the URL can't be used, or is an embedded store's: it answers its own process only, and
            to look at it would be to open it.
        ConfigError: the environment has a setting that can't be used.
    """
    url = url or default_url()
    if url.startswith("embedded:"):
        raise InvalidRequestError(f"{url}: an embedded store answers its own process only; give the URL of a node")
    with connect_by_environment(url, os.environ) as client:
        if timeout is not None:
            client.timeout = timeout
        waiting = threading.Timer(_PATIENCE_SECONDS, _say_whom_it_waits_for, (client,))
        waiting.daemon = True
        waiting.start()
        try:
            yield client
        finally:
            waiting.cancel()


def _say_whom_it_waits_for(client: Client) -> None:
    if client.answered:
        return
    who = ""
    where = parse_url(client.url)
    if isinstance(where, RemoteUrl) and where.socket is not None:
        with contextlib.suppress(OSError):
            pid = listener_of(where.socket)
            who = f" (pid {pid})" if pid else ""
    print(
        f"kvstore: waiting for {client.url}{who} to answer, for {client.timeout:g} s at most",
        file=sys.stderr,
        flush=True,
    )
