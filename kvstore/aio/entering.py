"""What may be awaited or entered: ``x = await connect(url)`` and ``async with connect(url) as x`` are both right."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Exiting(Protocol):
    """Something that an ``async with`` ends."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        ...


Entered = TypeVar("Entered", bound=Exiting)


class Entering(Generic[Entered]):
    """An operation that makes something which an ``async with`` ends."""

    def __init__(self, made: Coroutine[Any, Any, Entered]) -> None:
        self._made = made
        self._entered: Entered | None = None

    def __await__(self) -> Generator[Any, Any, Entered]:
        return self._made.__await__()

    async def __aenter__(self) -> Entered:
        self._entered = await self._made
        return self._entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._entered is not None, "it was entered"
        await self._entered.__aexit__(kind, error, trace)
