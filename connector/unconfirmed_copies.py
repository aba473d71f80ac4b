"""Finished copies that are not confirmed yet: for engines that may overwrite a block before they tell of it.

Such a copy is right if its block was the request's own until it had ended, and that is known when the engine tells of a
step for the first time behind it: a step that had begun to touch the block by then is that one, or an earlier one, and
says so. Until then the copy waits here, with its place in the node's arena. It need not where its request is over, and
holds its blocks: no step touches these before the request is reported. Guarded by its queue's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic

from kvstore.connector.transfers import Plan, Transfer

MOST_BYTES = 256 << 20
"""Of copies that wait, and for which the node keeps slots meanwhile. With more, no further one is begun."""


@dataclass(slots=True, eq=False)
class Copy(Generic[Plan]):
    """One batch of a transfer's pages."""

    transfer: Transfer[Plan]
    block_ids: frozenset[int]
    size: int
    """Bytes."""
    finish: Callable[[bool], bool]
    """Publishes it (True) or gives it up. Returns whether there is a point in going on with its transfer."""
    confirmed: bool = False
    """Nothing has touched its blocks before it ended, if its transfer is not over."""


class UnconfirmedCopies(Generic[Plan]):
    """In the order in which they ended."""

    def __init__(self) -> None:
        self._copies: list[Copy[Plan]] = []
        self._held: dict[str, frozenset[int]] = {}

    @property
    def is_full(self) -> bool:
        """Whether those that are here have to go first."""
        return self.is_full_with(0)

    def is_full_with(self, size: int) -> bool:
        """Whether they have to go first when a copy of so many bytes, which is under way, has come here, too."""
        return sum(copy.size for copy in self._copies) + size >= MOST_BYTES

    def add(self, copy: Copy[Plan]) -> None:
        """A copy has ended."""
        self._copies.append(copy)
        self._confirm_held(copy)

    def confirm(self) -> None:
        """The engine has told of a step, and transfers whose blocks that has touched are over."""
        for copy in self._copies:
            copy.confirmed = True

    def hold(self, held: Mapping[str, Collection[int]]) -> None:
        """These requests are over, and nobody gets these blocks of theirs before :meth:`release`."""
        self._held.update({request_id: frozenset(block_ids) for request_id, block_ids in held.items()})
        for copy in self._copies:
            self._confirm_held(copy)

    def release(self, request_ids: Collection[str]) -> None:
        """They are held no longer."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def take(self) -> Copy[Plan] | None:
        """The next one that is confirmed, or that nobody wants any more."""
        for index, copy in enumerate(self._copies):
            if copy.confirmed or copy.transfer.over:
                return self._copies.pop(index)
        return None

    def of(self, transfer: Transfer[Plan]) -> list[Copy[Plan]]:
        """A transfer's."""
        return [copy for copy in self._copies if copy.transfer is transfer]

    def _confirm_held(self, copy: Copy[Plan]) -> None:
        request_id = copy.transfer.plan.request_id
        copy.confirmed = copy.confirmed or copy.block_ids <= self._held.get(request_id, frozenset())
