"""Stores and loads in two awaited calls: pages reserved and being written, or leased and being read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

from kvstore.aio.operations import Operations
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.results import StoreResult
from kvstore.errors import KVStoreError

Answer = TypeVar("Answer")
Pending = TypeVar("Pending", PendingStore, PendingLoad)


class _AsyncPending(Generic[Pending]):
    """What the two have in common: they end once."""

    def __init__(self, operations: Operations, pending: Pending, timeout: float) -> None:
        self._pending: Pending = pending
        self._operations = operations
        self._timeout = timeout
        self._is_over = False
        self._is_told = False
        operations.begun()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:  # no loop runs this any more
            self._pending.__exit__(kind, error, trace)
            return
        cancelled: asyncio.CancelledError | None = None
        while not self._is_over:
            try:
                await self._end(lambda: self._pending.__exit__(kind, error, trace))
            except asyncio.CancelledError as again:  # pages are given up all the same
                cancelled = again
            except KVStoreError:
                if cancelled is None and not isinstance(error, asyncio.CancelledError):
                    if not self._is_over:  # its turn did not come: the node is not to wait for the lease's end
                        self._give_up_later()
                    raise
        if cancelled is not None:
            raise cancelled

    def _give_up_later(self) -> None:
        self._is_over = self._is_told = True
        self._operations.leave(lambda: self._pending.__exit__(None, None, None), self._timeout)
        self._operations.ended()

    async def _end(self, do: Callable[[], Answer]) -> Answer:
        def end() -> Answer:
            self._is_over = True
            return do()

        try:
            return await self._operations.run(end, self._timeout, ending=True)
        finally:
            if self._is_over and not self._is_told:
                self._is_told = True
                self._operations.ended()


class AsyncPendingStore(_AsyncPending[PendingStore]):
    """As :class:`kvstore.PendingStore`: pages that are reserved to be written. Leaving its context gives up what was
    not completed.

    Attributes:
        pages: for each hash a uint8 array of shape ``(page_bytes,)`` to fill (on the same host straight in the node's
            arena; what is in it before is undefined), or None where there is nothing to write. Large copies belong on a
            thread (``asyncio.to_thread(numpy.copyto, page, source)``), and must end before the context does.
        refused: for how many of them the node had no room.
    """

    def __init__(self, operations: Operations, pending: PendingStore, timeout: float) -> None:
        super().__init__(operations, pending, timeout)
        self.pages = pending.pages
        self.refused = pending.refused

    async def complete(self) -> StoreResult:
        """As :meth:`kvstore.PendingStore.complete`. Behind a cancellation it is not known whether pages are there."""
        return await self._end(self._pending.complete)

    async def abort(self) -> None:
        """As :meth:`kvstore.PendingStore.abort`."""
        await self._end(self._pending.abort)


class AsyncPendingLoad(_AsyncPending[PendingLoad]):
    """As :class:`kvstore.PendingLoad`: the leading pages of a prefix, leased to be copied. Leaving its context ends the
    lease.

    Attributes:
        pages: one read-only uint8 array of shape ``(page_bytes,)`` for each leading page that is here. Large copies
            belong on a thread, and must end before :meth:`complete`.
        tiers: where each one was when it was asked for: ``"arena"``, ``"disk"``, ``"redis"`` or ``"objects"``.
        more: whether pages behind these may be there as well, in a lower tier.
    """

    def __init__(self, operations: Operations, pending: PendingLoad, timeout: float) -> None:
        super().__init__(operations, pending, timeout)
        self.pages = pending.pages
        self.tiers = pending.tiers
        self.more = pending.more

    async def complete(self) -> int:
        """As :meth:`kvstore.PendingLoad.complete`."""
        return await self._end(self._pending.complete)
