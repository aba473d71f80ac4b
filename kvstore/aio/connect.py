"""From a connection string to an awaited client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.aio.client import AsyncClient
from kvstore.aio.entering import Entering
from kvstore.aio.operations import Operations
from kvstore.client import connect as blocking
from kvstore.limits import LONGEST_TIMEOUT

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def connect(
    url: str,
    *,
    timeout: float = blocking.TIMEOUT,
    ca: Path | str | None = None,
    cert: Path | str | None = None,
    key: Path | str | None = None,
    token_file: Path | str | None = None,
    traces: TracerProvider | None = None,
    name: str = "",
) -> Entering[AsyncClient]:
    """A client of the node at ``url``, to be awaited or entered (``async with``); it is closed where that ends.

    Arguments and errors are those of :func:`kvstore.connect`. In a forked child that runs a loop of its own the client
    connects for itself.
    """

    async def made() -> AsyncClient:
        operations = Operations(url)
        try:
            client = await operations.run(
                lambda: blocking.connect(
                    url, timeout=timeout, ca=ca, cert=cert, key=key, token_file=token_file, traces=traces, name=name
                ),
                LONGEST_TIMEOUT,  # a folder of a terabyte is read when it is opened
            )
        except BaseException:
            operations.is_closed = True
            raise
        return AsyncClient(client, operations)

    return Entering(made())
