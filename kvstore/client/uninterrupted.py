"""Work that no signal breaks off in the middle.

Python runs the handlers of signals in the main thread, between any two of its steps, and they may raise: a Ctrl-C, an
alarm. A lock of ``threading`` or of gRPC that is being taken then stays taken for ever, and a table that is being
changed stays half changed. So what takes such locks is done by another thread, and the main thread waits for its end.
Paths over a mapped arena do without: what they do themselves may be broken off anywhere.
"""

from __future__ import annotations

import _thread
import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def uninterrupted(work: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """``work`` as a function that returns, or raises, when it is over: what a signal's handler raises meanwhile is
    raised behind that. The answer is lost then; one that lends something is left as a context is."""

    @functools.wraps(work)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Answer:
        if threading.current_thread() is not threading.main_thread():
            return work(*arguments, **options)
        return _beside(functools.partial(work, *arguments, **options))

    return run


def _beside(work: Callable[[], Answer]) -> Answer:
    answers: list[Answer] = []
    errors: list[BaseException] = []
    over = _thread.allocate_lock()
    over.acquire()
    context = contextvars.copy_context()  # traces go on

    def run() -> None:
        try:
            answers.append(context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            errors.append(error)
        finally:
            over.release()

    interrupt: BaseException | None = None
    try:
        _thread.start_new_thread(run, ())  # threading's own threads are started in several steps
    except BaseException as error:  # noqa: BLE001 - raised behind the work's end
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            return work()
        interrupt = error
    while True:
        try:
            while not answers and not errors:
                over.acquire()
            break
        except BaseException as error:  # noqa: BLE001 - as above
            interrupt = error
    if interrupt is not None:
        for answer in answers:
            if isinstance(answer, AbstractContextManager):
                answer.__exit__(type(interrupt), interrupt, None)
        raise interrupt
    if errors:
        raise errors[0]
    return answers[0]
