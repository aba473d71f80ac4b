"""A background thread that carries out transfers one after the other, and the rule of who may touch their blocks.

A transfer is in one of these states. Everybody changes them under the lane's lock; the copies and the calls to the node
happen outside it.

::

    queued ◄─► calling ◄──► touching      the lane's thread has taken it up: it calls the node, or copies
       │          │             │
       └──────────┴─────► over ◄┘         nothing of it reads from or writes to the engine's blocks any more

From *queued* and *calling* anyone can end a transfer, however long the node takes to answer: the thread finds it over
when it wants to touch the blocks, and leaves them alone. While the thread is *touching* them, only
:meth:`TransferQueue.revoke` and :meth:`TransferQueue.withdraw` end a transfer, and only one that merely reads. A copy
is short and depends on no one; a call may hang. A transfer whose pages are not there yet goes back to the queue
(:meth:`TransferQueue.postpone`): others pass it.

A transfer whose copies have to wait for a word of the engine (:mod:`kvstore.connector.copied`) is set *aside* behind
the last one, and is over when they are published. Anyone can end it there, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.connector.copied import Copied, Copy
from kvstore.connector.plan import LoadPlan, StorePlan

if TYPE_CHECKING:
    from kvstore.gpu.cuda import Event

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


class TransferQueue(Generic[Plan]):
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
        self._aside: list[Transfer[Plan]] = []  # the thread is done with them, but for their copies
        self._copied: Copied[Transfer[Plan]] = Copied()
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
        pages = taken_over = 0
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
                successor = Transfer(rest, transfer.began, transfer.deadline, transfer.after)
                if transfer in self._queued:
                    self._queued[self._queued.index(transfer)] = successor
                    continue
                if transfer in self._aside:
                    self._aside.remove(transfer)
                self._queued.insert(taken_over, successor)
                taken_over += 1
            self._changed.notify_all()
        return pages

    def set_aside(
        self, transfer: Transfer[Plan], block_ids: Collection[int], size: int, finish: Callable[[bool], bool]
    ) -> None:
        """On the lane's thread, behind a copy of a batch: it waits for :meth:`tell`, or :meth:`hold`.

        Args:
            transfer: which the thread has taken up, and goes on with.
            block_ids: that were copied.
            size: bytes of the copy.
            finish: called on the lane's thread, once, and must not raise: publish it, or give it up. Whether there is a
                point in going on with the transfer.
        """
        with self._changed:
            self._copied.add(Copy(transfer, frozenset(block_ids), size, finish))

    def tell(self) -> None:
        """The engine has told of a step, and what it gave out there was revoked, or withdrawn. Copies that had ended
        before are right."""
        with self._changed:
            self._copied.tell()
            self._changed.notify_all()

    def hold(self, held: Mapping[str, Collection[int]]) -> None:
        """These requests are over, and nobody gets these blocks of theirs before :meth:`release`: their copies are
        right."""
        with self._changed:
            self._copied.hold(held)
            self._changed.notify_all()

    def release(self, request_ids: Collection[str]) -> None:
        """They are held no longer."""
        with self._changed:
            self._copied.release(request_ids)

    def make_room(self, transfer: Transfer[Plan]) -> bool:
        """On the lane's thread, before it begins a copy: until there is room for one more that waits.

        Returns:
            False: the transfer is over.
        """
        while True:
            with self._changed:
                while (copy := self._copied.take()) is None and self._copied.is_full and not transfer.over:
                    self._changed.wait()
                if copy is None:
                    return not transfer.over
            self._finish(copy)

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
        seconds. Not for copies that wait for :meth:`tell`, which nobody calls meanwhile."""
        with self._changed:
            end = self._clock() + most
            pending: list[Transfer[Plan]] = self._live()
            while True:
                self._give_up_late()
                pending = [transfer for transfer in pending if not transfer.over and not self._is_untold(transfer)]
                now = self._clock()
                if not pending or now >= end:
                    return
                # One that is past its deadline is touching: until the copy ends.
                times = [end, *(transfer.deadline for transfer in pending)]
                rest = min((each for each in times if now < each < math.inf), default=None)
                self._changed.wait(None if rest is None else rest - now)

    def rest(self) -> None:
        """Waits as :meth:`wait_idle` does, and for a copy of what was revoked: from then on the thread touches no
        block, until :meth:`wake`. Copies that wait for a word are given up: a part of them might have to be read again,
        when something else is there."""
        with self._changed:
            self._resting = True
        self.wait_idle()
        with self._changed:
            for transfer in list(self._aside):
                self._end(transfer)
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
        while (next_one := self._next()) is not None:
            if isinstance(next_one, Copy):
                self._finish(next_one)
                continue
            transfer = next_one
            self._carry_out(transfer)
            with self._changed:
                if transfer is self._current:
                    self._current = None
                    if not transfer.over and self._copied.of(transfer):
                        self._aside.append(transfer)
                    else:
                        self._end(transfer)
                self._changed.notify_all()

    def _next(self) -> Copy[Transfer[Plan]] | Transfer[Plan] | None:
        """What the thread does next, copies first; None: it ends."""
        with self._changed:
            while True:
                if (copy := self._copied.take()) is not None:
                    return copy
                if (transfer := self._due()) is not None:
                    self._queued.remove(transfer)
                    self._current = transfer
                    return transfer
                if self._stopped:
                    return None
                now = self._clock()
                self._changed.wait(min((each.not_before - now for each in self._queued), default=None))

    def _finish(self, copy: Copy[Transfer[Plan]]) -> None:
        """On the lane's thread: publish a copy, or give it up."""
        transfer: Transfer[Plan] = copy.transfer
        goes_on = copy.finish(copy.is_sure and self.wanted(transfer))
        with self._changed:
            if not goes_on or (transfer in self._aside and not self._copied.of(transfer)):
                self._end(transfer)

    def _is_untold(self, transfer: Transfer[Plan]) -> bool:
        """Whether nothing is left of it but copies that wait for a word."""
        copies = self._copied.of(transfer) if transfer in self._aside else []
        return bool(copies) and not any(copy.is_sure for copy in copies)

    def _due(self) -> Transfer[Plan] | None:
        """The next one for the thread."""
        now = self._clock()
        return next((transfer for transfer in self._queued if transfer.not_before <= now), None)

    def _live(self) -> list[Transfer[Plan]]:
        """The transfers that are not over."""
        taken_up = [self._current] if self._current is not None and not self._current.over else []
        return self._aside + taken_up + self._queued

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
        for waiting in (self._queued, self._aside):
            if transfer in waiting:
                waiting.remove(transfer)
        self._ended.append(transfer)
        self._changed.notify_all()
