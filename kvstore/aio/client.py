"""The awaited client: one node, or one embedded store, for programs on asyncio."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.aio.namespace import AsyncNamespace
from kvstore.aio.operations import Operations
from kvstore.client.client import Client
from kvstore.client.namespace import Namespace
from kvstore.client.paths.results import Lookup
from kvstore.layout import Layout
from kvstore.status import Status

Bytes = npt.NDArray[np.uint8]
Answer = TypeVar("Answer")


class AsyncClient:
    """As :class:`kvstore.Client`, awaited; :func:`kvstore.aio.connect` gives it. For the tasks of one event loop, and
    of another one when that is closed; not for threads.

    Eight operations are under way at once, and the others wait for their turn, first come, first served. ``timeout``
    holds from when a method is awaited, that wait included. A task that is cancelled while it waits leaves nothing; an
    operation under way ends before the cancellation is raised: within milliseconds, or about a second where the
    node does not answer.
    """

    def __init__(self, client: Client, operations: Operations) -> None:
        self.url = client.url
        self._client = client
        self._operations = operations
        self._process = os.getpid()

    @property
    def timeout(self) -> float:
        """Seconds that any one method may take."""
        return self._client.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._client.timeout = seconds

    @property
    def answered(self) -> bool:
        """As :attr:`kvstore.Client.answered`."""
        return self._client.answered

    async def namespace(
        self, layout: Layout, *, durability: str = "", label: str = "", lazy: bool = False
    ) -> AsyncNamespace:
        """As :meth:`kvstore.Client.namespace`."""
        namespace = await self._run(
            lambda: self._client.namespace(layout, durability=durability, label=label, lazy=lazy)
        )
        return AsyncNamespace(self._client, namespace, self._operations)

    async def lookup(
        self, queries: Sequence[tuple[AsyncNamespace, Sequence[bytes]]], *, counts: bool = True
    ) -> list[Lookup]:
        """As :meth:`kvstore.Client.lookup`."""
        return await self._run(lambda: self._client.lookup(_blocking(queries), counts=counts))

    def lookup_here(
        self, queries: Sequence[tuple[AsyncNamespace, Sequence[bytes]]], *, counts: bool = True
    ) -> list[Lookup] | None:
        """As :meth:`kvstore.Client.lookup_here`; a read of the mapping, which waits for nothing."""
        return self._client.lookup_here(_blocking(queries), counts=counts)

    async def flush(self) -> int:
        """As :meth:`kvstore.Client.flush`."""
        return await self._run(self._client.flush)

    async def status(self) -> Status:
        """As :meth:`kvstore.Client.status`."""
        return await self._run(self._client.status)

    async def explain(self, fingerprint: bytes, hashes: Sequence[bytes]) -> list[tuple[str | None, bool]]:
        """As :meth:`kvstore.Client.explain`."""
        return await self._run(lambda: self._client.explain(fingerprint, hashes))

    @property
    def arena(self) -> Bytes | None:
        """As :attr:`kvstore.Client.arena`."""
        return self._client.arena

    @property
    def arena_units(self) -> Bytes | None:
        """As :attr:`kvstore.Client.arena_units`."""
        return self._client.arena_units

    async def close(self) -> None:
        """As :meth:`kvstore.Client.close`. Operations under way have ended when it returns; pages that are lent or
        reserved may be given up behind it."""
        await self._operations.close(self._client.close, self.timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if not self._operations.is_closed and os.getpid() == self._process:
            warnings.warn(f"the client of {self.url} was not closed", ResourceWarning, stacklevel=2, source=self)

    async def _run(self, do: Callable[[], Answer]) -> Answer:
        return await self._operations.run(do, self.timeout)


def _blocking(queries: Sequence[tuple[AsyncNamespace, Sequence[bytes]]]) -> list[tuple[Namespace, Sequence[bytes]]]:
    return [(namespace.blocking, hashes) for namespace, hashes in queries]
