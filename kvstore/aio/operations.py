"""A client's operations: done by threads of its own, and awaited on one loop.

When the ``await`` of an operation has ended, whichever way, nothing of it is under way any more: no thread reads or
writes the caller's memory, and what it would have returned to hold pages is given up. So a cancelled one is waited for.
Most end by themselves within a millisecond; one that waits for the node is cut short a moment later.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Generic, TypeVar, cast

from kvstore.errors import DeadlineError, InvalidRequestError, KVStoreError, ResourceError, UnavailableError
from kvstore.host.cutting import Work, doing
from kvstore.host.forking import register_forked

Answer = TypeVar("Answer")
MOST_BEGUN = 8
"""Most operations under way at once: as many as there are connections that are kept for later."""
MOST_ENDING = 4
"""Most that end what others began: those who have room must not wait behind those who wait for room."""
PATIENCE_SECONDS = 0.25
"""How long a cancelled operation may go on before it is cut short. A cut costs its connection and, where that is to a
mapped arena, the attachment; and what the node has just reserved for it stays so until its deadline."""
ENDING_SECONDS = 0.5
"""The same of one that ends another: without it, too, the node keeps what it holds until the deadline."""


class Operations:
    """The threads of one client, and the order in which operations come to them. For one loop at a time.

    ``name`` is what people call the node.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin_afresh()
        self.is_closed = False
        register_forked(self)

    def forked(self) -> None:
        """In a child: the loop and the threads are its parent's."""
        self._loop = None
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_BEGUN + MOST_ENDING + 1, "kvstore-aio")  # one closes
        self._under_way: set[_Operation[object]] = set()
        self._kept = 0
        """What was begun and did not end yet: for that a closed client's threads stay."""

    async def run(self, do: Callable[[], Answer], seconds: float, *, ending: bool = False) -> Answer:
        """What ``do`` returns or raises, done by a thread when its turn has come.

        Args:
            do: the operation. A context manager that it returns is exited when nobody awaits it any more.
            seconds: how long it may take, the wait for its turn included.
            ending: whether it ends what another one began.

        Raises:
            InvalidRequestError: the client belongs to another loop.
            UnavailableError: the client is closed.
            DeadlineError: its turn did not come in time.
            ResourceError: no thread is to be had.
        """
        loop = self._bind()
        deadline = time.monotonic() + seconds
        turns = self._endings if ending else self._beginnings
        if turns.locked():
            try:
                async with asyncio.timeout(seconds):
                    await turns.acquire()
            except TimeoutError as error:
                raise DeadlineError(f"{MOST_BEGUN} operations were under way at {self._name} all the time") from error
        else:
            await turns.acquire()
        try:
            if self.is_closed and not ending:
                raise UnavailableError(f"the client of {self._name} is closed")
            return await self._run(do, deadline, ENDING_SECONDS if ending else PATIENCE_SECONDS)
        finally:
            if not loop.is_closed():
                turns.release()

    def leave(self, do: Callable[[], object], seconds: float) -> None:
        """Have a thread do what ends something and whose turn did not come. Nobody waits for it."""
        operation: _Operation[object] = _Operation(do, time.monotonic() + seconds)
        if not self._start(operation):
            return
        self._under_way.add(operation)

        def ended(over: asyncio.Future[None]) -> None:
            self._under_way.discard(operation)
            self._end_threads()
            with suppress(KVStoreError):  # what it was to end ends with its lease
                operation.outcome()

        operation.over.add_done_callback(ended)

    async def close(self, do: Callable[[], None], seconds: float) -> None:
        """Do what closes the client, and return when nothing is under way any more.

        Raises:
            Exception: what ``do`` raised.
        """
        self._bind()
        first, self.is_closed = not self.is_closed, True
        cancelled = False
        try:
            if first:
                await self._run(do, time.monotonic() + seconds, ENDING_SECONDS)
        finally:
            for operation in tuple(self._under_way):
                operation.work.cut()
                cancelled |= await operation.stop(ENDING_SECONDS)
            self._end_threads()
        if cancelled:
            raise asyncio.CancelledError

    def begun(self) -> None:
        """Something was begun that ends later."""
        self._kept += 1

    def ended(self) -> None:
        """It did."""
        self._kept -= 1
        self._end_threads()

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The loop that runs this, which is this client's own from now on."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise InvalidRequestError(f"the client of {self._name} is another event loop's: connect one in each")
            self._loop = loop
            self._beginnings = asyncio.Semaphore(MOST_BEGUN)
            self._endings = asyncio.Semaphore(MOST_ENDING)
        return loop

    async def _run(self, do: Callable[[], Answer], deadline: float, patience: float) -> Answer:
        operation = _Operation(do, deadline)
        if not self._start(operation):
            raise ResourceError(f"no thread is to be had for an operation of the client of {self._name}")
        self._under_way.add(cast("_Operation[object]", operation))
        try:
            await asyncio.shield(operation.over)
        except asyncio.CancelledError:
            await operation.stop(patience)
            if isinstance(operation.answer, AbstractContextManager):
                undone = _Operation(partial(operation.answer.__exit__, None, None, None), deadline)
                if not self._start(undone):
                    undone.do()
                await undone.stop(ENDING_SECONDS)
            raise
        except BaseException as error:  # no loop runs this any more
            operation.work.cut()
            operation.ended.wait()
            if isinstance(operation.answer, AbstractContextManager):
                with suppress(KVStoreError):
                    operation.answer.__exit__(type(error), error, None)
            raise
        finally:
            self._under_way.discard(cast("_Operation[object]", operation))
            self._end_threads()
        return operation.outcome()

    def _start(self, operation: _Operation[Answer]) -> bool:
        """Have it done. False: it never is, since no thread could be started."""
        try:
            self._threads.submit(operation.do)
        except RuntimeError:  # it may lie in the queue all the same
            return not operation.claim.acquire(blocking=False)
        return True

    def _end_threads(self) -> None:
        if self.is_closed and not self._kept and not self._under_way:
            self._threads.shutdown(wait=False)


class _Operation(Generic[Answer]):
    """One operation, and what came of it. ``over`` is done behind its end, and ``ended`` set for who has no loop."""

    def __init__(self, do: Callable[[], Answer], deadline: float) -> None:
        self.work = Work(deadline)
        self.claim = threading.Lock()
        """Taken by the thread that does it, or by whoever takes it back."""
        self.ended = threading.Event()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer: Answer | None = None
        self._error: BaseException | None = None
        self._do: Callable[[], Answer] | None = do
        self._context = contextvars.copy_context()  # traces go on

    def do(self) -> None:
        """On a thread."""
        if not self.claim.acquire(blocking=False):
            return
        assert self._do is not None
        try:
            with doing(self.work):
                self.answer = self._context.run(self._do)
        except BaseException as error:  # noqa: BLE001 - raised by whoever awaits it
            self._error = error
        finally:
            self._do = None  # nothing of the caller's is kept
            self.ended.set()
            with suppress(RuntimeError):  # the loop is closed
                self.over.get_loop().call_soon_threadsafe(self.over.set_result, None)

    async def stop(self, patience: float) -> bool:
        """Return behind its end, which is brought about when it takes longer than ``patience`` seconds. Returns whether
        this was cancelled meanwhile: whoever calls it raises that."""
        loop, cancelled = asyncio.get_running_loop(), False
        cut = loop.call_later(patience, self.work.cut)
        while not self.over.done():
            try:
                await asyncio.wait([self.over])
            except asyncio.CancelledError:
                cancelled = True
        cut.cancel()
        return cancelled

    def outcome(self) -> Answer:
        """What it returned or raised. To be called once."""
        answer, self.answer = self.answer, None
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it and this frame would keep each other, and the caller's memory
        return cast("Answer", answer)
