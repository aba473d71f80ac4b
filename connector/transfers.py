"""The states of transfers between an engine's blocks and the node: which one is next, and who may touch its blocks.

::

    queued ◄──► calling ◄──► copying      the queue's thread has taken it up: it calls the node, or a copy is under way
      │          │    │         │
      │          │    ▼         │
      │          │ unconfirmed  │         copied, and not known to be right yet (connector/unconfirmed_copies.py)
      ▼          ▼    ▼         ▼
     over: nothing of it reads from or writes to the engine's blocks any more

From every state but *copying* anyone can end a transfer, however long the node takes to answer: the thread finds it
over when it wants to touch the blocks, and leaves them alone. While it is *copying*, only
:meth:`TransferTable.revoke` and :meth:`TransferTable.withdraw` end a transfer, and only one that merely reads. A copy
is short and depends on no one; a call may hang. A transfer whose pages are not there yet goes back from *calling* to
*queued*, and others pass it.

On a device copies go on by themselves: the thread begins one, calls the node for the next batch meanwhile, begins that
one's copy, and then waits for the first. So a transfer is *copying* while the thread is at its blocks, to begin a copy
or to wait for one, and as long as a copy that has begun is under way, also while the thread hangs in a call: whoever
looks at the table finds out when the device is done, and then the transfer is *calling*.

Pure: no thread, no lock and no clock of its own. :mod:`kvstore.connector.transfer_queue` has these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.connector.plan import LoadPlan, StorePlan

if TYPE_CHECKING:
    from kvstore.gpu.begun import BegunCopy
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
    done: set[int] = field(default_factory=set)
    """Places of the pages that are dealt with: loaded, which goes from the first one on, or offered to the node, which
    does not where some copies wait longer to be confirmed than those behind them."""
    advanced: float = 0.0
    """When that was last so of one more."""
    not_before: float = 0.0
    """When it may be taken up."""
    layers_done: int = 0
    """How many layers of all its pages are in their blocks, while they are loaded layer by layer."""
    given_up: bool = False
    """It ends with the copies under way."""

    @property
    def pages_done(self) -> int:
        """How many pages are dealt with."""
        return len(self.done)

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
        self.is_at_blocks = False
        """The thread is at some blocks: a transfer's that is copying, or was until it was revoked."""
        self._begun: list[BegunCopy] = []
        self.is_resting = False
        """New transfers are over at once."""
        self.is_stopped = False
        """As well, and those under way end with the copy."""
        self.late = 0
        """Transfers given up at their deadline."""

    @property
    def is_copying(self) -> bool:
        """Something may touch blocks: of a transfer that is copying, or was until it was revoked."""
        return self.is_at_blocks or self.copies_by_itself

    @property
    def copies_by_itself(self) -> bool:
        """A copy is under way while the thread is elsewhere, and nobody tells when it is done."""
        return not self.is_at_blocks and not all(copy.is_done for copy in self._begun)

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

    def wants(self, transfer: Transfer[Plan]) -> bool:
        """Whether there is a point in going on with it: it is not over, and does not end with the copies under way."""
        return not (transfer.over or transfer.given_up or self.is_stopped)

    def begin_copy(self, transfer: Transfer[Plan]) -> bool:
        """The thread wants to touch its blocks. False: it is not wanted any more, and must not."""
        if not self.wants(transfer):
            return False
        transfer.state, self.is_at_blocks = State.COPYING, True
        return True

    def add_copy(self, copy: BegunCopy) -> None:
        """The thread has begun a copy, and is still at the blocks."""
        self._begun.append(copy)

    def remove_copy(self, copy: BegunCopy) -> None:
        """The thread has waited for it. A second call changes nothing."""
        self._begun = [each for each in self._begun if each is not copy]

    def end_copy(self) -> None:
        """The thread touches blocks no longer; copies that it has begun may."""
        self.is_at_blocks = False
        self.look()

    def look(self) -> None:
        """Whether the copies under way are done, and so the transfer touches its blocks no longer."""
        if self.is_copying:
            return
        for transfer in self.in_state(State.COPYING):
            transfer.state = State.CALLING
            if not self.wants(transfer):
                self.end(transfer)

    def advance(self, transfer: Transfer[Plan], places: Collection[int], now: float) -> bool:
        """Counts the pages at these places as dealt with, unless the transfer is not wanted any more (False): then they
        do not matter."""
        wanted = self.wants(transfer)
        if wanted and places:
            transfer.advanced = now
            assert transfer.done.isdisjoint(places), "pages were counted twice"
            transfer.done.update(places)
        return wanted

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
        """It is late: it ends now, or with the copies under way."""
        self.look()
        self.late += 1
        transfer.given_up = True
        if transfer.state is not State.COPYING:
            self.end(transfer)

    def give_up_late(self, now: float) -> None:
        """Ends all that are past their deadline, but for one that is copying."""
        self.look()
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
            plan = transfer.plan
            left = [index for index in range(len(plan.hashes)) if index not in transfer.done]
            kept = [index for index in left if plan.block_ids[index] not in withdrawn]
            if len(kept) == len(left):
                continue
            if self.is_stopped or not kept:
                self.end(transfer)
                continue
            pages += len(left) - len(kept)
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
        """Ends everything; a transfer that is copying with its copies."""
        self.look()
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
