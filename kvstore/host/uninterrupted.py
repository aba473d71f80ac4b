"""Uninterrupted work: what a signal's handler raises meanwhile (a Ctrl-C, an alarm) is raised behind the work's end.

Python runs handlers of signals in the main thread, between any two of its steps. Where one raises while a lock of
``threading`` or of gRPC is being taken, that lock stays taken for ever; a table that is being changed stays half
changed. So the main thread has such work done by another thread, and waits for its end. Stores and loads through a
mapped arena do without, since that costs 20 to 100 µs: what they do themselves may end anywhere.
"""

from __future__ import annotations

import _thread
import contextvars
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from kvstore.errors import UnavailableError
from kvstore.host.forking import register_forked

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
_LOOK_SECONDS = 0.5
"""How often the main thread looks for signals that did not end its wait."""
_python = ctypes.CDLL(None)
_python.PyThread_allocate_lock.restype = ctypes.c_void_p
_python.PyThread_acquire_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]
_python.PyThread_release_lock.argtypes = [ctypes.c_void_p]


def uninterrupted(work: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """``work`` as a function that returns or raises when it is over, and not before. Where a signal's handler raised
    meanwhile, that is raised instead, and the answer is lost; one that is a context manager is left as such."""

    @functools.wraps(work)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        if _may_be_interrupted():
            return cast("Answer", _done_by_another(_Job(functools.partial(work, *arguments, **options))))
        return work(*arguments, **options)

    return run


def abandonable(work: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """As :func:`uninterrupted`, for work that touches nothing of its caller's: where a handler raises, nobody waits for
    its end."""

    @functools.wraps(work)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        if _may_be_interrupted():
            return cast("Answer", _done_by_another(_Job(functools.partial(work, *arguments, **options)), waits=False))
        return work(*arguments, **options)

    return run


@contextmanager
def cut_by_interrupt(cut: Callable[[], object]) -> Iterator[None]:
    """Within uninterrupted work: while this lasts, an interrupt calls ``cut``, which makes the work end soon."""
    job = getattr(_own, "job", None)
    if job is None:
        yield
        return
    job.cuts.append(cut)
    try:
        if job.is_interrupted:
            cut()
        yield
    finally:
        job.cuts.remove(cut)


_own = threading.local()
"""``job``: the one that this thread does for the main thread."""


class _Job:
    """Work for another thread, and its answer or error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._context = contextvars.copy_context()  # traces go on
        self.claim = _thread.allocate_lock()
        """Taken by the worker that does it, or by whoever takes it back."""
        self.over = _thread.allocate_lock()
        self.over.acquire()
        self.is_over = False
        self.is_interrupted = False
        self.cuts: list[Callable[[], object]] = []
        self.answer: Any = None
        self.error: BaseException | None = None

    def do(self) -> None:
        _own.job = self
        try:
            self.answer = self._context.run(self._work)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self.error = error
        finally:
            _own.job = None

    def end(self) -> None:
        self.is_over = True
        self.over.release()


class _Worker:
    """A thread that waits for work. Not one of ``threading``'s, which are started in several steps."""

    def __init__(self) -> None:
        self._begin = _thread.allocate_lock()
        self._begin.acquire()
        self._job: _Job | None = None
        self.working = _python.PyThread_allocate_lock()
        """Held while it works. Python's own locks can't be waited for without running handlers."""
        self.is_spent = False
        """Whether somebody may have taken ``working`` who does not release it."""
        _thread.start_new_thread(self._run, ())

    def give(self, job: _Job) -> None:
        _python.PyThread_acquire_lock(self.working, 1)
        self._job = job
        self._begin.release()

    def dismiss(self) -> None:
        """Let a spent one's thread end."""
        self._begin.release()

    def _run(self) -> None:
        while not self.is_spent:
            self._begin.acquire()
            job, self._job = self._job, None
            mine = job is not None and job.claim.acquire(False)
            if job is not None and mine:
                job.do()
            _workers.idle.append(self)  # whoever gives it more waits for the rest
            if job is not None and mine:
                job.end()
            del job  # it may be the last to have what it lent
            _python.PyThread_release_lock(self.working)


class _Workers:
    """The idle workers, and the jobs of the others."""

    def __init__(self) -> None:
        self.idle: list[_Worker] = []
        self.jobs: list[_Job] = []
        register_forked(self)

    def take(self) -> _Worker:
        """An idle worker, or a new one.

        Raises:
            RuntimeError: no thread can be started.
        """
        while self.idle:
            worker = self.idle.pop()
            if not worker.is_spent:
                return worker
            worker.dismiss()
        return _Worker()

    def forked(self) -> None:
        """In a child: they are its parent's. Where a handler has forked, its main thread waits for one of them."""
        self.idle.clear()
        for job in self.jobs:
            if not job.is_over:
                job.error = UnavailableError("this process was forked from one that was doing this")
                job.end()
        self.jobs.clear()


_workers = _Workers()


def _may_be_interrupted() -> bool:
    # At the interpreter's end no other thread comes to anything any more.
    return threading.current_thread() is threading.main_thread() and not sys.is_finalizing()


def _done_by_another(job: _Job, *, waits: bool = True) -> Any:
    try:
        worker = _workers.take()
    except (RuntimeError, MemoryError):  # no thread to be had
        job.do()
    else:
        _workers.jobs.append(job)
        try:
            _wait(job, worker, waits=waits)
        finally:
            if job in _workers.jobs:  # a forked child has forgotten them
                _workers.jobs.remove(job)
    if job.error is not None:
        try:
            raise job.error
        finally:
            del job  # or it, its error and this frame would keep each other, and the caller's memory
    return job.answer


def _wait(job: _Job, worker: _Worker, *, waits: bool) -> None:
    """Return when it is done. Behind an interrupt raise that, when nothing of it is being done any more."""
    try:
        worker.give(job)
        while not job.is_over:
            # One that another thread received, or that came just before the wait, does not end it.
            job.over.acquire(timeout=_LOOK_SECONDS)
    except BaseException as interrupt:
        if job.claim.acquire(False):
            raise  # it was not begun, and now never is
        if not waits:
            raise
        job.is_interrupted = True
        try:
            for cut in list(job.cuts):
                cut()
        finally:
            if not job.is_over:
                # In one call, in which no handler runs: however many signals come, it is over behind it.
                worker.is_spent = True
                _python.PyThread_acquire_lock(worker.working, 1)
        try:
            if isinstance(job.answer, AbstractContextManager):
                job.answer.__exit__(type(interrupt), interrupt, None)
        finally:
            raise interrupt
