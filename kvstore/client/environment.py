"""Connecting with the files for TLS and tokens that the environment names (``KVSTORE_CONNECT_CA`` and others)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore.client.client import Client
from kvstore.client.connect import TIMEOUT, connect
from kvstore.config.setting import CONNECT_PREFIX

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def connect_by_environment(
    url: str,
    environment: Mapping[str, str],
    traces: TracerProvider | None = None,
    timeout: float = TIMEOUT,
    name: str = "",
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
        name=name,
    )
