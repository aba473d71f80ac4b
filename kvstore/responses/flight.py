"""Equal requests at once are computed once: one leads, the others follow and get its answer.

When who leads goes away, its computation goes on for as long as somebody follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

FOLLOW_SECONDS = 60.0
"""That an answer is waited for: who leads reads it at the speed of its own client."""

Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Flight(Generic[Answer]):
    """One computation, and how many wait for its answer. Made by :class:`Flights`."""

    def __init__(self, flights: Flights[Answer], name: str) -> None:
        self._flights = flights
        self._name = name
        self._task: asyncio.Task[Any] | None = None
        self._leader_has_gone = False
        self._answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._followers = 0

    @property
    def followed(self) -> bool:
        """Whether somebody waits besides who leads."""
        return self._followers > 0

    async def lead(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work, which calls :meth:`finish`. When this is cancelled, it goes on while somebody follows."""
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(self._ended)
        self._flights.under_way.add(self._task)
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._leader_has_gone = True
            if not self._followers and not self._task.done():
                self.finish(None)  # who comes now leads anew
                self._task.cancel()
                await asyncio.wait([self._task])
            raise

    async def follow(self) -> Answer | None:
        """The answer; None: there is none that others can use, or none within :data:`FOLLOW_SECONDS`."""
        self._followers += 1
        self._flights.followers += 1
        try:
            return await asyncio.wait_for(asyncio.shield(self._answer), FOLLOW_SECONDS)
        except TimeoutError:
            return None
        finally:
            self._followers -= 1
            self._flights.followers -= 1
            if self._leader_has_gone and not self._followers and self._task is not None:
                self.finish(None)
                self._task.cancel()

    def finish(self, answer: Answer | None) -> None:
        """Tell those who follow; who comes from now on leads anew. Only the first call counts."""
        self._flights.forget(self._name, self)
        if not self._answer.done():
            self._answer.set_result(answer)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._flights.under_way.discard(task)
        self.finish(None)
        if not task.cancelled():
            task.exception()  # who leads has it, if it is there


class Flights(Generic[Answer]):
    """All of them, by the name of the answer. For one event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, Flight[Answer]] = {}
        self.under_way: set[asyncio.Task[Any]] = set()
        self.followers = 0
        """Who waits for an answer that another one leads."""

    def join(self, name: str) -> tuple[Flight[Answer], bool]:
        """The computation of this answer, and whether the caller is the one to lead it."""
        if (flight := self._by_name.get(name)) is not None:
            return flight, False
        flight = self._by_name[name] = Flight(self, name)
        return flight, True

    def forget(self, name: str, flight: Flight[Answer]) -> None:
        """Let the next one lead."""
        if self._by_name.get(name) is flight:
            del self._by_name[name]

    async def close(self) -> None:
        """End what goes on without the one who led it."""
        tasks = list(self.under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
