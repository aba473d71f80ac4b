"""Copies that have ended, of engines that may touch a block before they tell of it.

Such a copy is right if its block was the request's own until it had ended, and that is known when the engine tells of a
step for the first time behind it: a step that had begun to touch the block by then is that one, or an earlier one, and
says so. Until then the copy waits here, with its place in the node's arena. It need not where its request is over, and
holds its blocks: no step touches these before the request is reported. Guarded by its lane's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

MOST_BYTES = 256 << 20
"""Of copies that wait, and for which the node keeps room meanwhile. With more, no further one is begun."""


class Request(Protocol):
    """Whose blocks are copied."""

    @property
    def request_id(self) -> str:
        """The engine's name of it."""
        ...


class Transfer(Protocol):
    """What a copy is part of: one plan on its way through a lane."""

    over: bool

    @property
    def plan(self) -> Request:
        """What is carried out."""
        ...


AnyTransfer = TypeVar("AnyTransfer", bound=Transfer)


@dataclass(slots=True, eq=False)
class Copy(Generic[AnyTransfer]):
    """One batch of a transfer's pages."""

    transfer: AnyTransfer
    block_ids: frozenset[int]
    size: int
    """Bytes."""
    finish: Callable[[bool], bool]
    """Publishes it (True) or gives it up. Returns whether there is a point in going on with its transfer."""
    is_sure: bool = False
    """Nothing has touched its blocks before it ended, if its transfer is not over."""


class Copied(Generic[AnyTransfer]):
    """In the order in which they ended."""

    def __init__(self) -> None:
        self._copies: list[Copy[AnyTransfer]] = []
        self._held: dict[str, frozenset[int]] = {}

    @property
    def is_full(self) -> bool:
        """Whether those that are here have to go first."""
        return sum(copy.size for copy in self._copies) >= MOST_BYTES

    def add(self, copy: Copy[AnyTransfer]) -> None:
        """A copy has ended."""
        self._copies.append(copy)
        self._look_at_held(copy)

    def tell(self) -> None:
        """The engine has told of a step, and transfers whose blocks that has touched are over."""
        for copy in self._copies:
            copy.is_sure = True

    def hold(self, held: Mapping[str, Collection[int]]) -> None:
        """These requests are over, and nobody gets these blocks of theirs before :meth:`release`."""
        self._held.update({request_id: frozenset(block_ids) for request_id, block_ids in held.items()})
        for copy in self._copies:
            self._look_at_held(copy)

    def release(self, request_ids: Collection[str]) -> None:
        """They are held no longer."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def take(self) -> Copy[AnyTransfer] | None:
        """The next one that is sure, or that nobody wants any more."""
        for index, copy in enumerate(self._copies):
            if copy.is_sure or copy.transfer.over:
                return self._copies.pop(index)
        return None

    def of(self, transfer: AnyTransfer) -> list[Copy[AnyTransfer]]:
        """A transfer's."""
        return [copy for copy in self._copies if copy.transfer is transfer]

    def _look_at_held(self, copy: Copy[AnyTransfer]) -> None:
        copy.is_sure = copy.is_sure or copy.block_ids <= self._held.get(copy.transfer.plan.request_id, frozenset())
