"""Threads that ask the store for a request, which waits for them until a deadline and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS = 4
_MOST_LOOKUPS = 64
"""That wait for threads; one more is not made."""

Read = TypeVar("Read")


class LookupThreads:
    """For one event loop.

    Args:
        deadline: seconds that a request waits.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(_THREADS, "kvstore-responses")
        self._under_way = 0

    @property
    def busy(self) -> bool:
        """Whether too many wait for them already."""
        return self._under_way >= _MOST_LOOKUPS

    async def ask(self, work: Callable[[], Read], ended: Callable[[BaseException | None], None] | None = None) -> Read:
        """What ``work`` gives.

        Args:
            work: blocks.
            ended: told, on the loop, how it ended, however late that is.

        Raises:
            TimeoutError: nothing by the deadline. The work goes on.
            Exception: what ``work`` raises.
        """

        def done(working: asyncio.Future[Read]) -> None:
            self._under_way -= 1
            error = None if working.cancelled() else working.exception()  # fetched, though nobody may wait any more
            if ended is not None:
                ended(error)

        self._under_way += 1
        working = asyncio.get_running_loop().run_in_executor(self._pool, work)
        working.add_done_callback(done)
        async with asyncio.timeout(self._deadline):
            return await asyncio.shield(working)

    def close(self) -> None:
        """Wait for the work that has begun. It blocks."""
        self._pool.shutdown(cancel_futures=True)
