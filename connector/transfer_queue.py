"""A background thread that carries out transfers one after the other, each before its deadline or not at all.

Everybody changes the states of transfers (:mod:`kvstore.connector.transfers`) under the queue's lock; the copies and
the calls to the node happen outside it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic

from kvstore.connector.transfers import Plan, State, Transfer, TransferTable
from kvstore.connector.unconfirmed_copies import Copy, UnconfirmedCopies

if TYPE_CHECKING:
    from kvstore.gpu.begun import BegunCopy
    from kvstore.gpu.cuda import Event

_LOOK_SECONDS = 0.001
"""How often whoever waits for a copy looks whether the device is done, while the queue's thread is elsewhere."""


class TransferQueue(Generic[Plan]):
    """Carries out plans in order.

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
        self._deadline = deadline
        self._carry_out: Callable[[Transfer[Plan]], None] = carry_out
        self._clock = clock
        self._changed = threading.Condition()
        self._table: TransferTable[Plan] = TransferTable(capacity, self._changed.notify_all)
        self._copies: UnconfirmedCopies[Plan] = UnconfirmedCopies()
        self._is_busy = False  # with a transfer, which may be over meanwhile
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def late(self) -> int:
        """Transfers given up at their deadline."""
        return self._table.late

    def submit(self, plan: Plan, after: Event | None = None) -> None:
        """Takes a plan, to be carried out behind a mark.

        When too many wait, or the queue rests or is shut down, the transfer is over at once."""
        with self._changed:
            now = self._clock()
            if self._table.submit(Transfer(plan, now, now + self._deadline, after, advanced=now)):
                self._changed.notify_all()

    def begin(self, transfer: Transfer[Plan], begin: Callable[[], BegunCopy]) -> BegunCopy | None:
        """On the queue's thread: begin a copy from or to the transfer's blocks. It is waited for (:meth:`wait`), or
        ended (:meth:`drop`).

        Returns:
            None: the transfer is not wanted any more, its blocks are left alone.
        """
        with self._at_blocks(transfer) as allowed:
            if not allowed:
                return None
            copy = begin()
            with self._changed:
                self._table.add_copy(copy)
            return copy

    def wait(self, transfer: Transfer[Plan], copy: BegunCopy) -> bool:
        """On the queue's thread: until a copy that it has begun is done.

        Returns:
            False: the transfer is not wanted any more, what was copied counts for nothing.
        """
        try:
            with self._at_blocks(transfer) as allowed:
                if allowed:
                    copy.wait()
        finally:
            self.drop(copy)
        return self.wanted(transfer)

    def drop(self, copy: BegunCopy) -> None:
        """On the queue's thread: until nothing of a copy is under way, whose bytes nobody wants any more. A second call
        does nothing."""
        try:
            copy.end()
        finally:
            with self._changed:
                self._table.remove_copy(copy)
                self._table.look()
                self._changed.notify_all()

    def wanted(self, transfer: Transfer[Plan]) -> bool:
        """Whether there is a point in going on: the transfer is not over, and does not end with its copies."""
        with self._changed:
            return self._table.wants(transfer)

    def may_overlap(self, transfer: Transfer[Plan], size: int) -> bool:
        """On the queue's thread: whether it may go on to the next batch beside a copy of so many bytes. Past the
        deadline it may not: the transfer could not be given up between two copies. Nor where the copy has to be
        confirmed, and nothing may be copied before it is (:meth:`finish_copies`)."""
        with self._changed:
            return self._clock() < transfer.deadline and not self._copies.is_full_with(size)

    @contextmanager
    def _at_blocks(self, transfer: Transfer[Plan]) -> Iterator[bool]:
        with self._changed:
            allowed = self._table.begin_copy(transfer)
        try:
            yield allowed
        finally:
            if allowed:
                with self._changed:
                    self._table.end_copy()
                    self._changed.notify_all()

    def advance(self, transfer: Transfer[Plan], places: Collection[int]) -> bool:
        """As :meth:`TransferTable.advance`."""
        with self._changed:
            return self._table.advance(transfer, places, self._clock())

    def postpone(self, transfer: Transfer[Plan], seconds: float) -> None:
        """The thread lets go of it, and takes it up again so much later, behind the others that it has by then."""
        with self._changed:
            self._table.postpone(transfer, self._clock() + seconds)

    def end(self, transfer: Transfer[Plan]) -> None:
        """It is over, whatever the thread, which has taken it up, goes on to do."""
        with self._changed:
            self._table.end(transfer)

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
            pending = self._table.live()
            while True:
                now = self._clock()
                pending = [
                    each for each in pending if not each.over and not each.given_up and each.layers_done <= layer
                ]
                for transfer in [each for each in pending if now >= each.deadline]:
                    pending.remove(transfer)
                    late.append(transfer)
                    self._table.give_up(transfer)
                if not pending:
                    return late
                self._changed.wait(min(each.deadline for each in pending) - now)

    def take_ended(self) -> list[Transfer[Plan]]:
        """The transfers that are over and were not returned before. Gives up what is past its deadline."""
        with self._changed:
            self._table.give_up_late(self._clock())
            return self._table.take_ended()

    def revoke(self, request_ids: Collection[str]) -> None:
        """As :meth:`TransferTable.revoke`."""
        with self._changed:
            self._table.revoke(request_ids)

    def withdraw(self, block_ids: Collection[int]) -> int:
        """As :meth:`TransferTable.withdraw`."""
        with self._changed:
            pages = self._table.withdraw(block_ids)
            self._changed.notify_all()
        return pages

    def await_confirmation(
        self, transfer: Transfer[Plan], block_ids: Collection[int], size: int, finish: Callable[[bool], bool]
    ) -> None:
        """On the queue's thread, behind a copy of a batch: it waits for :meth:`confirm`, or :meth:`hold`.

        Args:
            transfer: which the thread has taken up, and goes on with.
            block_ids: that were copied.
            size: bytes of the copy.
            finish: called on the queue's thread, once, and must not raise: publish it, or give it up. Whether there is
                a point in going on with the transfer.
        """
        with self._changed:
            self._copies.add(Copy(transfer, frozenset(block_ids), size, finish))

    def confirm(self) -> None:
        """The engine has told of a step, and what it gave out there was revoked, or withdrawn. Copies that had ended
        before are right."""
        with self._changed:
            self._copies.confirm()
            self._changed.notify_all()

    def hold(self, held: Mapping[str, Collection[int]]) -> None:
        """These requests are over, and nobody gets these blocks of theirs before :meth:`release`: their copies are
        right."""
        with self._changed:
            self._copies.hold(held)
            self._changed.notify_all()

    def release(self, request_ids: Collection[str]) -> None:
        """They are held no longer."""
        with self._changed:
            self._copies.release(request_ids)

    def finish_copies(self, transfer: Transfer[Plan]) -> bool:
        """On the queue's thread, before it begins a copy: until one more may wait to be confirmed.

        Returns:
            False: the transfer is over.
        """
        while True:
            with self._changed:
                while (copy := self._copies.take()) is None and self._copies.is_full and not transfer.over:
                    self._changed.wait()
                if copy is None:
                    return not transfer.over
            self._finish(copy)

    def wait_idle(self, most: float = math.inf) -> None:
        """Waits until every transfer submitted so far is over: as long as a deadline and a copy take, or ``most``
        seconds. Not for copies that wait for :meth:`confirm`, which nobody calls meanwhile."""
        with self._changed:
            end = self._clock() + most
            pending: list[Transfer[Plan]] = self._table.live()
            while True:
                now = self._clock()
                self._table.give_up_late(now)
                pending = [transfer for transfer in pending if not transfer.over and not self._waits(transfer)]
                if not pending or now >= end:
                    return
                # One that is past its deadline is copying: until its copies end.
                times = [end, *(transfer.deadline for transfer in pending)]
                rest = min((each for each in times if now < each < math.inf), default=math.inf)
                self._wait(rest - now)

    def rest(self) -> None:
        """Waits as :meth:`wait_idle` does, and for a copy of what was revoked: from then on the thread touches no
        block, until :meth:`wake`. Copies that wait to be confirmed are given up: a part of them might have to be read
        again, when something else is there."""
        with self._changed:
            self._table.is_resting = True
        self.wait_idle()
        with self._changed:
            for transfer in self._table.in_state(State.UNCONFIRMED):
                self._table.end(transfer)
            while self._table.is_copying:
                self._wait(math.inf)

    def wake(self) -> None:
        """Transfers are taken again."""
        with self._changed:
            self._table.is_resting = False

    def stop(self) -> None:
        """Gives everything up and stops the thread.

        A thread that hangs in a call ends when the call does, and touches no block before.
        """
        with self._changed:
            self._table.stop()
            self._changed.notify_all()

    def join(self, most: float) -> None:
        """Waits for a call or copy under way behind :meth:`stop`, ``most`` seconds at most."""
        self._thread.join(most)

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            if isinstance(next_one, Copy):
                self._finish(next_one)
                continue
            self._carry_out(next_one)
            with self._changed:
                self._is_busy = False
                self._table.put_down(next_one, bool(self._copies.of(next_one)))
                self._changed.notify_all()

    def _next(self) -> Copy[Plan] | Transfer[Plan] | None:
        """What the thread does next, copies first; None: it ends."""
        with self._changed:
            while True:
                if (copy := self._copies.take()) is not None:
                    return copy
                now = self._clock()
                if (transfer := self._table.take_up(now)) is not None:
                    self._is_busy = True
                    return transfer
                if self._table.is_stopped:
                    return None
                postponed = self._table.in_state(State.QUEUED)
                self._changed.wait(min((each.not_before - now for each in postponed), default=None))

    def _finish(self, copy: Copy[Plan]) -> None:
        """On the queue's thread: publish a copy, or give it up."""
        transfer: Transfer[Plan] = copy.transfer
        goes_on = copy.finish(copy.confirmed and self.wanted(transfer))
        with self._changed:
            if not goes_on or (transfer.state is State.UNCONFIRMED and not self._copies.of(transfer)):
                self._table.end(transfer)

    def _wait(self, most: float) -> None:
        """For a change, or the end of a copy of which nobody tells: ``most`` seconds. The caller holds the lock."""
        if self._table.copies_by_itself:
            most = min(most, _LOOK_SECONDS)
        self._changed.wait(None if most == math.inf else most)

    def _waits(self, transfer: Transfer[Plan]) -> bool:
        """Whether nothing is left of it but copies that wait to be confirmed."""
        copies = self._copies.of(transfer) if transfer.state is State.UNCONFIRMED else []
        return bool(copies) and not any(copy.confirmed for copy in copies)
