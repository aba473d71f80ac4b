"""Clients of the command line: their files come from the environment."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.client.client import Client, connect
from kvstore.config import CONNECT_PREFIX


def connect_by_environment(url: str, environment: Mapping[str, str]) -> Client:
    """A client with the files that ``KVSTORE_CONNECT_CA``, ``_CERT``, ``_KEY`` and ``_TOKEN_FILE`` name, as far as the
    URL has a use for them. Errors as :func:`kvstore.connect`.
    """

    def file(name: str, *schemes: str) -> str | None:
        return environment.get(CONNECT_PREFIX + name) or None if url.partition(":")[0] in schemes else None

    return connect(
        url,
        ca=file("CA", "kvs"),
        cert=file("CERT", "kvs"),
        key=file("KEY", "kvs"),
        token_file=file("TOKEN_FILE", "kvs", "kv"),
    )
