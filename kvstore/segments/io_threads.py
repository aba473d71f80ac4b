"""Threads for I/O with deadlines: whoever waits for a call that hangs can stop waiting.

A system call on a disk that does not answer can't be called off. It is left to its thread: what it reads into and the
file that it uses stay its own until it comes back.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvstore.fairness import Turns

T = TypeVar("T")
_log = logging.getLogger(__name__)


class LateError(OSError):
    """An I/O was not done by its deadline, or could not even begin, since too many others hang."""

    def __init__(self, seconds: float) -> None:
        super().__init__(errno.ETIMEDOUT, f"the disk did not answer within {seconds:g} s")


class Job(Generic[T]):
    """One call that a thread does, or will do."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._done = threading.Lock()  # held until the call ended: to wait for a lock costs less than for an event
        self._done.acquire()
        self._started = self._ended = self._given_up = False
        self._afterwards: Callable[[], None] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    def wait(self, seconds: float) -> T:
        """What the call returned or raised.

        Raises:
            LateError: it did neither in time. It may still be going on; see :meth:`give_up`.
        """
        if not self._done.acquire(timeout=max(0.0, seconds)):
            raise LateError(seconds)
        self._done.release()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def give_up(self, afterwards: Callable[[], None] | None = None) -> bool:
        """Nobody waits any more: a call that has not begun never will.

        Args:
            afterwards: called once the call is over, in its thread, or now if it is over or never began.

        Returns:
            Whether the call is still going on.
        """
        with self._lock:
            self._given_up = True
            if self._started and not self._ended:
                self._afterwards = afterwards
                return True
        if afterwards is not None:
            afterwards()
        return False

    def do(self) -> None:
        """Make the call, in this thread."""
        with self._lock:
            if self._given_up:
                return
            self._started = True
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        with self._lock:
            self._ended = True
            afterwards = self._afterwards
        self._done.release()
        if afterwards is not None:
            afterwards()


class IoThreads:
    """A few threads for I/O, which are replaced when they hang, up to a bound.

    Args:
        threads: how many calls go on at once.
        most_hanging: how many threads may hang until :attr:`all_hang`.
    """

    def __init__(self, threads: int, most_hanging: int = 16, name: str = "kvstore-disk") -> None:
        self._threads = threads
        self._name = name
        self._most_hanging = most_hanging
        self._turns: Turns[Job[Any]] = Turns()
        self._queue: SimpleQueue[bool] = SimpleQueue()
        """True for each job that waits, False for each thread that is to end: no other wait costs less."""
        self._lock = threading.Lock()
        self._alive = 0
        self._idle = 0
        self._hanging = 0  # calls that go on though nobody waits for them any more
        self._closed = False

    def run(self, call: Callable[[], T], seconds: float, afterwards: Callable[[], None] | None = None) -> T:
        """Do one call and wait for it.

        Args:
            call: what may hang.
            seconds: how long to wait.
            afterwards: called when a call that was late is over, however long that takes.

        Raises:
            LateError: it was late.
        """
        job = self.submit(call)
        try:
            return job.wait(seconds)
        except LateError:
            self.give_up(job, afterwards)
            raise

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """Begin one call as soon as a thread is free. Who gives it up says so to :meth:`give_up`."""
        [job] = self.submit_all([call])
        return job

    def submit_all(self, calls: Sequence[Callable[[], T]], who: Hashable = None) -> list[Job[T]]:
        """The same for several calls, in this order. Where others wait, too, they take turns: first those for whom
        calls are made (``who``), and among the calls for one of them each ``submit_all``.

        Raises:
            OSError: there is no thread, and none can be started; or they were let go. None of them was begun.
        """
        jobs = [Job(call) for call in calls]
        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "the threads for I/O were let go")
            more = self._queue.qsize() + len(jobs) - self._idle
            for _ in range(min(more, self._threads - (self._alive - self._hanging))):
                # Daemons: a thread that hangs must not keep the process from ending.
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                except RuntimeError as error:
                    if self._alive > self._hanging:  # those that there are do it
                        break
                    raise OSError(errno.EAGAIN, f"no thread for I/O can be started: {error}") from error
                self._alive += 1
            self._turns.add(who, jobs)
            for _ in jobs:  # before any thread is told to end
                self._queue.put(True)
        return jobs

    def give_up(self, job: Job[T], afterwards: Callable[[], None] | None = None) -> None:
        """Let a call that is late go on without anyone waiting; another thread takes its thread's place."""

        def over() -> None:
            with self._lock:
                self._hanging -= 1
            if afterwards is not None:
                afterwards()

        with self._lock:
            self._hanging += 1  # `over` takes it back, at once if the call is not going on
        job.give_up(over)

    @property
    def all_hang(self) -> bool:
        """Whether so many calls hang that no more should begin."""
        return self._hanging >= self._most_hanging

    def close(self) -> None:
        """Let the threads end, each behind what it is doing."""
        with self._lock:
            self._closed = True
            for _ in range(self._alive):
                self._queue.put(False)

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._alive - self._hanging > self._threads:  # one that hung came back, and has been replaced
                    self._alive -= 1
                    return
                self._idle += 1
            one_more = self._queue.get()
            with self._lock:
                self._idle -= 1
                if not one_more:
                    self._alive -= 1
                    return
                job = self._turns.take()
            try:
                job.do()
            except Exception:  # noqa: BLE001 - what follows a late call failed; the thread does others
                _log.exception("a late call's end failed")
