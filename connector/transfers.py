"""The states of transfers between an engine's blocks and the node: which one is next, and who may touch its blocks.

::

    queued ◄──► calling ◄──► copying      the queue's thread has taken it up: it calls the node, or copies
      │          │    │         │
      │          │    ▼         │
      │          │ unconfirmed  │         copied, and not known to be right yet (connector/unconfirmed_copies.py)
      ▼          ▼    ▼         ▼
     over: nothing of it reads from or writes to the engine's blocks any more

From every state but *copying* anyone can end a transfer, however long the node takes to answer: the thread finds it
over when it wants to touch the blocks, and leaves them alone. While the thread is *copying*, only
:meth:`TransferTable.revoke` and :meth:`TransferTable.withdraw` end a transfer, and only one that merely reads. A copy
is short and depends on no one; a call may hang. A transfer whose pages are not there yet goes back from *calling* to
*queued*, and others pass it.

Pure: no thread, no lock and no clock of its own. :mod:`kvstore.connector.transfer_queue` has these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.connector.plan import LoadPlan, StorePlan

if TYPE_CHECKING:
    from kvstore.gpu.cuda import Event

Plan = TypeVar("Plan", LoadPlan, StorePlan)


class State(Enum):
    """Of a transfer."""

    QUEUED = auto()
    CALLING = auto()
    COPYING = auto()
    UNCONFIRMED = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class Transfer(Generic[Plan]):
    """One plan on its way. Times are in seconds, by the queue's clock."""

    plan: Plan
    began: float
    """When it was submitted."""
    deadline: float
    """When it is given up."""
    after: Event | None = None
    """What the engine had queued on its device when it was submitted: nothing touches its blocks before."""
    state: State = State.QUEUED
    pages_done: int = 0
    """How many leading pages are dealt with: loaded, or offered to the node."""
    advanced: float = 0.0
    """When that was last so of one more."""
    not_before: float = 0.0
    """When it may be taken up."""
    layers_done: int = 0
    """How many layers of all its pages are in their blocks, while they are loaded layer by layer."""
    given_up: bool = False
    """It ends with the copy under way."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state is State.OVER


class TransferTable(Generic[Plan]):
    """The transfers of one queue that are not over, in their order, and those that are and were not reported.

    Args:
        capacity: most transfers that are queued.
        on_end: called whenever a transfer ends.
    """

    def __init__(self, capacity: int, on_end: Callable[[], None]) -> None:
        self._capacity = capacity
        self._on_end = on_end
        self._live: list[Transfer[Plan]] = []
        self._ended: list[Transfer[Plan]] = []
        self.is_copying = False
        """The thread is at some blocks: a transfer's that is copying, or was until it was revoked."""
        self.is_resting = False
        """New transfers are over at once."""
        self.is_stopped = False
        """As well, and those under way end with the copy."""
        self.late = 0
        """Transfers given up at their deadline."""

    def live(self) -> list[Transfer[Plan]]:
        """The transfers that are not over."""
        return list(self._live)

    def in_state(self, state: State) -> list[Transfer[Plan]]:
        """Those in one state, which is not *over*."""
        return [transfer for transfer in self._live if transfer.state is state]

    def submit(self, transfer: Transfer[Plan]) -> bool:
        """A new one is queued. False: it is over at once, since the table is full, rests or is stopped."""
        if self.is_stopped or self.is_resting or len(self.in_state(State.QUEUED)) >= self._capacity:
            transfer.state = State.OVER
            self._ended.append(transfer)
            return False
        self._live.append(transfer)
        return True

    def take_up(self, now: float) -> Transfer[Plan] | None:
        """The next one for the thread, which is calling now."""
        transfer = next((each for each in self.in_state(State.QUEUED) if each.not_before <= now), None)
        if transfer is not None:
            transfer.state = State.CALLING
        return transfer

    def begin_copy(self, transfer: Transfer[Plan]) -> bool:
        """The thread wants to touch its blocks. False: it is over, and must not."""
        if transfer.over:
            return False
        transfer.state, self.is_copying = State.COPYING, True
        return True

    def end_copy(self, transfer: Transfer[Plan]) -> None:
        """The thread touches them no longer."""
        self.is_copying = False
        if transfer.state is State.COPYING:
            transfer.state = State.CALLING
            if self.is_stopped or transfer.given_up:
                self.end(transfer)

    def advance(self, transfer: Transfer[Plan], pages: int, now: float) -> bool:
        """Counts pages as dealt with, unless the transfer is over (False): then they no longer matter."""
        if not transfer.over and pages:
            transfer.advanced = now
            transfer.pages_done += pages
            assert transfer.pages_done <= len(transfer.plan.hashes), "pages were counted twice"
        return not transfer.over

    def postpone(self, transfer: Transfer[Plan], until: float) -> None:
        """The thread lets go of it, and takes it up again then, behind the others."""
        if not transfer.over and not self.is_stopped:  # stopped: it ends with this turn
            transfer.state, transfer.not_before = State.QUEUED, until
            self._live.remove(transfer)
            self._live.append(transfer)

    def put_down(self, transfer: Transfer[Plan], unconfirmed: bool) -> None:
        """The thread has done with it what there is to do, unless it was postponed or is over.

        Args:
            transfer: which it had taken up.
            unconfirmed: some of its copies are not known to be right yet.
        """
        if transfer.state is not State.CALLING:
            return
        if unconfirmed:
            transfer.state = State.UNCONFIRMED
        else:
            self.end(transfer)

    def give_up(self, transfer: Transfer[Plan]) -> None:
        """It is late: it ends now, or with the copy under way."""
        self.late += 1
        transfer.given_up = True
        if transfer.state is not State.COPYING:
            self.end(transfer)

    def give_up_late(self, now: float) -> None:
        """Ends all that are past their deadline, but for one that is copying."""
        for transfer in self.live():
            if now >= transfer.deadline and transfer.state is not State.COPYING:
                self.give_up(transfer)

    def revoke(self, request_ids: Collection[str]) -> None:
        """Ends the transfers of these requests at once, also one that is copying.

        For transfers that only read: a copy under way may see other bytes from now on, and whoever made it finds the
        transfer over and throws it away.
        """
        for transfer in self.live():
            if transfer.plan.request_id in request_ids:
                self.end(transfer)

    def withdraw(self, block_ids: Collection[int]) -> int:
        """Takes these blocks' pages out of every transfer, at once, as :meth:`revoke` does; the others go on.

        Returns:
            How many pages were taken out of transfers that go on. A transfer of which nothing is left ends.
        """
        withdrawn = set(block_ids)
        pages = 0
        for transfer in self.live():
            plan, done = transfer.plan, transfer.pages_done
            if withdrawn.isdisjoint(plan.block_ids[done:]):
                continue
            kept = [index for index in range(done, len(plan.hashes)) if plan.block_ids[index] not in withdrawn]
            if self.is_stopped or not kept:
                self.end(transfer)
                continue
            pages += len(plan.hashes) - done - len(kept)
            rest = replace(
                plan,
                hashes=tuple(plan.hashes[index] for index in kept),
                block_ids=tuple(plan.block_ids[index] for index in kept),
            )
            # The thread must not go on with a batch that has such a page: another transfer takes over, unreported.
            transfer.state = State.OVER
            successor = Transfer(rest, transfer.began, transfer.deadline, transfer.after)
            self._live[self._live.index(transfer)] = successor
        return pages

    def stop(self) -> None:
        """Ends everything; a transfer that is copying with its copy."""
        self.is_stopped = True
        for transfer in self.live():
            if transfer.state is not State.COPYING:
                self.end(transfer)

    def end(self, transfer: Transfer[Plan]) -> None:
        """It is over, whatever the thread goes on to do. A second call changes nothing."""
        if not transfer.over:
            transfer.state = State.OVER
            self._live.remove(transfer)
            self._ended.append(transfer)
            self._on_end()

    def take_ended(self) -> list[Transfer[Plan]]:
        """Those that are over and were not returned before."""
        ended, self._ended = self._ended, []
        return ended
