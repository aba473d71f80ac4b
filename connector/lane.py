"""A background thread that carries out transfers one after the other, and the rule of who may touch their blocks.

A transfer is in one of these states. Everybody changes them under the lane's lock; the copies and the calls to the node
happen outside it.

::

    queued ◄─► calling ◄──► touching      the lane's thread has taken it up: it calls the node, or copies
       │          │             │
       └──────────┴─────► over ◄┘         nothing of it reads from or writes to the engine's blocks any more

From *queued* and *calling* anyone can end a transfer, however long the node takes to answer: the thread finds it over
when it wants to touch the blocks, and leaves them alone. While the thread is *touching* them, only :meth:`Lane.revoke`
and :meth:`Lane.withdraw` end a transfer, and only one that merely reads. A copy is short and depends on no one; a call
may hang. A transfer whose pages are not there yet goes back to the queue (:meth:`Lane.postpone`): others pass it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from connector.plan import LoadPlan, StorePlan

if TYPE_CHECKING:
    from gpu.device import Event

Plan = TypeVar("Plan", LoadPlan, StorePlan)


@dataclass(slots=True, eq=False)
class Transfer(Generic[Plan]):
    """One plan on its way through a lane."""

    plan: Plan
    began: float
    """When it was submitted, by the lane's clock."""
    deadline: float
    """When it is given up."""
    after: Event | None = None
    """What the engine had queued on its device when it was submitted: nothing touches its blocks before."""
    pages_done: int = 0
    """How many leading pages are dealt with: loaded, or offered to the node."""
    advanced: float = 0.0
    """When that was last so of one more."""
    not_before: float = 0.0
    """When the lane's thread may take it up."""
    layers_done: int = 0
    """How many layers of all its pages are in their blocks, while they are loaded layer by layer."""
    touching: bool = False
    given_up: bool = False
    """It ends when the thread no longer touches its blocks."""
    over: bool = False


class Lane(Generic[Plan]):
    """Carries out plans in order, on one thread, each before its deadline or not at all.

    Args:
        name: of the thread.
        capacity: most transfers that wait for the thread.
        deadline: seconds from :meth:`submit` after which a transfer is given up.
        carry_out: called on the thread, one transfer at a time. It must not raise.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        deadline: float,
        carry_out: Callable[[Transfer[Plan]], None],
        clock: Callable[[], float],
    ) -> None:
        self._capacity = capacity
        self._deadline = deadline
        self._carry_out: Callable[[Transfer[Plan]], None] = carry_out
        self._clock = clock
        self._changed = threading.Condition()
        self._queued: list[Transfer[Plan]] = []
        self._current: Transfer[Plan] | None = None  # what the thread has taken up; it may be over meanwhile
        self._ended: list[Transfer[Plan]] = []  # over and not reported
        self._stopped = False
        self._resting = False
        self._late = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def late(self) -> int:
        """Transfers given up at their deadline."""
        return self._late

    def submit(self, plan: Plan, after: Event | None = None) -> None:
        """Takes a plan, to be carried out behind a mark.

        When the queue is full, or the lane rests or is shut down, the transfer is over at once."""
        with self._changed:
            now = self._clock()
            transfer = Transfer(plan, now, now + self._deadline, after, advanced=now)
            if self._stopped or self._resting or len(self._queued) >= self._capacity:
                transfer.over = True
                self._ended.append(transfer)
                return
            self._queued.append(transfer)
            self._changed.notify_all()

    @contextmanager
    def touch(self, transfer: Transfer[Plan]) -> Iterator[bool]:
        """Around a copy from or to the transfer's blocks, on the lane's thread. False: it is over, leave them alone."""
        with self._changed:
            allowed = transfer.touching = not transfer.over
        try:
            yield allowed
        finally:
            with self._changed:
                transfer.touching = False
                if self._stopped or transfer.given_up:
                    self._end(transfer)
                self._changed.notify_all()

    def wanted(self, transfer: Transfer[Plan]) -> bool:
        """Whether the transfer is not over: there is a point in going on."""
        with self._changed:
            return not transfer.over

    def advance(self, transfer: Transfer[Plan], pages: int) -> bool:
        """Counts pages as dealt with, unless the transfer is over (False): then they no longer matter."""
        with self._changed:
            if not transfer.over and pages:
                transfer.advanced = self._clock()
                transfer.pages_done += pages
                assert transfer.pages_done <= len(transfer.plan.hashes), "pages were counted twice"
            return not transfer.over

    def pass_layer(self, transfer: Transfer[Plan], layer: int) -> None:
        """This layer, and those before it, of all of the transfer's pages are in place."""
        with self._changed:
            transfer.layers_done = layer + 1
            self._changed.notify_all()

    def wait_layer(self, layer: int) -> list[Transfer[Plan]]:
        """Waits until this layer of every transfer submitted so far is in place, or the transfer is over.

        Returns:
            Those that are past their deadline. They end now, or when the copy under way does.
        """
        late: list[Transfer[Plan]] = []
        with self._changed:
            pending = self._live()
            while True:
                now = self._clock()
                pending = [
                    each for each in pending if not each.over and not each.given_up and each.layers_done <= layer
                ]
                for transfer in [each for each in pending if now >= each.deadline]:
                    pending.remove(transfer)
                    late.append(transfer)
                    self._late += 1
                    transfer.given_up = True
                    if not transfer.touching:
                        self._end(transfer)
                if not pending:
                    return late
                self._changed.wait(min(each.deadline for each in pending) - now)

    def take_ended(self) -> list[Transfer[Plan]]:
        """The transfers that are over and were not returned before. Gives up what is past its deadline."""
        with self._changed:
            self._give_up_late()
            ended, self._ended = self._ended, []
            return ended

    def revoke(self, request_ids: Collection[str]) -> None:
        """Ends the transfers of these requests at once, also those that read from their blocks in this moment.

        For transfers that only read: a copy under way may see other bytes from now on, and whoever made it finds the
        transfer over and throws it away.
        """
        with self._changed:
            for transfer in self._live():
                if transfer.plan.request_id in request_ids:
                    self._end(transfer)

    def withdraw(self, block_ids: Collection[int]) -> int:
        """Takes these blocks' pages out of every transfer, at once, as :meth:`revoke` does; the others go on.

        Returns:
            How many pages were taken out of transfers that go on. A transfer of which nothing is left ends.
        """
        withdrawn = set(block_ids)
        pages = 0
        with self._changed:
            for transfer in self._live():
                plan, done = transfer.plan, transfer.pages_done
                if withdrawn.isdisjoint(plan.block_ids[done:]):
                    continue
                kept = [index for index in range(done, len(plan.hashes)) if plan.block_ids[index] not in withdrawn]
                if self._stopped or not kept:
                    self._end(transfer)
                    continue
                pages += len(plan.hashes) - done - len(kept)
                # The thread must not go on with a batch that has such a page: another transfer takes over, unreported.
                transfer.over = True
                rest = replace(
                    plan,
                    hashes=tuple(plan.hashes[index] for index in kept),
                    block_ids=tuple(plan.block_ids[index] for index in kept),
                )
                if transfer is self._current:
                    self._queued.insert(0, Transfer(rest, transfer.began, transfer.deadline, transfer.after))
                else:
                    self._queued[self._queued.index(transfer)] = Transfer(
                        rest, transfer.began, transfer.deadline, transfer.after
                    )
        return pages

    def postpone(self, transfer: Transfer[Plan], seconds: float) -> None:
        """The thread lets go of it, and takes it up again behind the others that it has by then."""
        with self._changed:
            if transfer.over or self._stopped:
                return  # it ends with this turn
            transfer.not_before = self._clock() + seconds
            self._current = None
            self._queued.append(transfer)

    def end(self, transfer: Transfer[Plan]) -> None:
        """It is over, whatever the thread, which has taken it up, goes on to do."""
        with self._changed:
            self._end(transfer)
            self._current = None

    def wait_idle(self, most: float = math.inf) -> None:
        """Waits until every transfer submitted so far is over: as long as a deadline and a copy take, or ``most``
        seconds."""
        with self._changed:
            end = self._clock() + most
            pending: list[Transfer[Plan]] = self._live()
            while True:
                self._give_up_late()
                pending = [transfer for transfer in pending if not transfer.over]
                now = self._clock()
                if not pending or now >= end:
                    return
                # One that is past its deadline is touching: until the copy ends.
                times = [end, *(transfer.deadline for transfer in pending)]
                rest = min((each for each in times if now < each < math.inf), default=None)
                self._changed.wait(None if rest is None else rest - now)

    def rest(self) -> None:
        """Waits as :meth:`wait_idle` does, and for a copy of what was revoked: from then on the thread touches no
        block, until :meth:`wake`."""
        with self._changed:
            self._resting = True
        self.wait_idle()
        with self._changed:
            self._changed.wait_for(lambda: self._current is None or not self._current.touching)

    def wake(self) -> None:
        """Transfers are taken again."""
        with self._changed:
            self._resting = False

    def stop(self) -> None:
        """Gives everything up and stops the thread.

        A thread that hangs in a call ends when the call does, and touches no block before.
        """
        with self._changed:
            self._stopped = True
            for transfer in self._live():
                if not transfer.touching:
                    self._end(transfer)
            self._changed.notify_all()

    def join(self, most: float) -> None:
        """Waits for a call or copy under way behind :meth:`stop`, ``most`` seconds at most."""
        self._thread.join(most)

    def _run(self) -> None:
        while True:
            with self._changed:
                while (transfer := self._due()) is None and not self._stopped:
                    now = self._clock()
                    self._changed.wait(min((each.not_before - now for each in self._queued), default=None))
                if transfer is None:
                    return
                self._queued.remove(transfer)
                self._current = transfer
            self._carry_out(transfer)
            with self._changed:
                if transfer is self._current:
                    self._end(transfer)
                    self._current = None
                self._changed.notify_all()

    def _due(self) -> Transfer[Plan] | None:
        """The next one for the thread."""
        now = self._clock()
        return next((transfer for transfer in self._queued if transfer.not_before <= now), None)

    def _live(self) -> list[Transfer[Plan]]:
        """The transfers that are not over."""
        taken_up = [self._current] if self._current is not None and not self._current.over else []
        return taken_up + self._queued

    def _give_up_late(self) -> None:
        now = self._clock()
        for transfer in self._live():
            if now >= transfer.deadline and not transfer.touching:
                self._late += 1
                self._end(transfer)

    def _end(self, transfer: Transfer[Plan]) -> None:
        if transfer.over:
            return
        transfer.over = True
        if transfer in self._queued:
            self._queued.remove(transfer)
        self._ended.append(transfer)
        self._changed.notify_all()
