"""The awaited namespace: pages of one layout at one node, stored and loaded by their block hashes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvstore.aio.entering import Entering
from kvstore.aio.operations import Operations
from kvstore.aio.pending import AsyncPendingLoad, AsyncPendingStore
from kvstore.client.arguments import checked_timeout
from kvstore.client.client import Client
from kvstore.client.namespace import Namespace
from kvstore.client.paths.buffers import Pages
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.results import Lookup, NamespaceStatistics, StoreResult

Answer = TypeVar("Answer")

_AT_ONCE = 1e-9
"""Seconds that are left of a deadline that has passed."""


class AsyncNamespace:
    """As :class:`kvstore.Namespace`, awaited. Made by :meth:`kvstore.aio.AsyncClient.namespace`.

    Block hashes and buffers that a method was given stay as they are until its ``await`` has ended, cancelled or not;
    from then on they are the caller's alone.
    """

    def __init__(self, client: Client, namespace: Namespace, operations: Operations) -> None:
        self.layout = namespace.layout
        self.durability = namespace.durability
        """What it was asked for with."""
        self.fingerprint = namespace.fingerprint
        self.blocking = namespace
        """The namespace of the synchronous client under this one."""
        self._client = client
        self._operations = operations

    async def batch_pages(self) -> int:
        """As :attr:`kvstore.Namespace.batch_pages`; a method here, since a namespace that was opened lazily asks the
        node."""
        return await self._run(lambda: self.blocking.batch_pages)

    async def lookup(self, hashes: Sequence[bytes], *, counts: bool = True) -> Lookup:
        """As :meth:`kvstore.Namespace.lookup`."""
        return await self._run(lambda: self.blocking.lookup(hashes, counts=counts))

    async def store(self, hashes: Sequence[bytes], pages: Pages, *, parent: bytes = b"") -> StoreResult:
        """As :meth:`kvstore.Namespace.store`. Behind a cancellation some of the pages may have been stored, all of them
        right."""
        return await self._run(lambda: self.blocking.store(hashes, pages, parent=parent))

    def count_lookup(self, asked: int, found: Mapping[str, int]) -> None:
        """As :meth:`kvstore.Namespace.count_lookup`, which waits for nothing."""
        self.blocking.count_lookup(asked, found)

    async def load(self, hashes: Sequence[bytes], into: Pages, *, counts: bool = True) -> int:
        """As :meth:`kvstore.Namespace.load`. Behind a cancellation the content of ``into`` is undefined, and nothing
        more is written there."""
        return await self._run(lambda: self.blocking.load(hashes, into, counts=counts))

    def prepare_store(self, hashes: Sequence[bytes], *, parent: bytes = b"") -> Entering[AsyncPendingStore]:
        """As :meth:`kvstore.Namespace.prepare_store`, to be awaited or entered."""
        return Entering(self._prepare_store(lambda: self.blocking.prepare_store(hashes, parent=parent)))

    def prepare_load(self, hashes: Sequence[bytes], *, counts: bool = True) -> Entering[AsyncPendingLoad]:
        """As :meth:`kvstore.Namespace.prepare_load`, to be awaited or entered."""
        return Entering(self._prepare_load(lambda: self.blocking.prepare_load(hashes, counts=counts)))

    def borrow(self, hashes: Sequence[bytes], *, counts: bool = True) -> Entering[AsyncPendingLoad]:
        """As :meth:`kvstore.Namespace.borrow`, to be awaited or entered."""
        return Entering(self._prepare_load(lambda: self.blocking.borrow(hashes, counts=counts)))

    async def touch(self, hashes: Sequence[bytes]) -> int:
        """As :meth:`kvstore.Namespace.touch`."""
        return await self._run(lambda: self.blocking.touch(hashes))

    async def evict(self, hashes: Sequence[bytes], *, pinned: bool = False) -> int:
        """As :meth:`kvstore.Namespace.evict`."""
        return await self._run(lambda: self.blocking.evict(hashes, pinned=pinned))

    async def prefetch(self, hashes: Sequence[bytes]) -> int:
        """As :meth:`kvstore.Namespace.prefetch`."""
        return await self._run(lambda: self.blocking.prefetch(hashes))

    async def pin(self, hashes: Sequence[bytes], seconds: int) -> int:
        """As :meth:`kvstore.Namespace.pin`."""
        return await self._run(lambda: self.blocking.pin(hashes, seconds))

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        """As :meth:`kvstore.Namespace.unpin`."""
        return await self._run(lambda: self.blocking.unpin(hashes))

    async def clear(self, timeout: float | None = None) -> int:
        """As :meth:`kvstore.Namespace.clear`."""
        seconds = self._client.timeout if timeout is None else checked_timeout(timeout)
        end = time.monotonic() + seconds
        return await self._operations.run(lambda: self.blocking.clear(max(_AT_ONCE, end - time.monotonic())), seconds)

    def statistics(self) -> NamespaceStatistics:
        """As :meth:`kvstore.Namespace.statistics`; waits for nothing."""
        return self.blocking.statistics()

    async def _run(self, do: Callable[[], Answer]) -> Answer:
        return await self._operations.run(do, self._client.timeout)

    async def _prepare_store(self, do: Callable[[], PendingStore]) -> AsyncPendingStore:
        return AsyncPendingStore(self._operations, await self._run(do), self._client.timeout)

    async def _prepare_load(self, do: Callable[[], PendingLoad]) -> AsyncPendingLoad:
        return AsyncPendingLoad(self._operations, await self._run(do), self._client.timeout)
