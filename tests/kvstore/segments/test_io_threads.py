import errno
import threading
from collections.abc import Callable

import pytest

from kvstore.segments.io_threads import IoThreads, LateError


def test_calls_return_and_raise() -> None:
    threads = IoThreads(2)
    assert threads.run(lambda: 5, 10) == 5
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda: 1 // 0, 10)
    threads.close()


def test_threads_that_were_let_go_do_what_was_submitted_and_refuse_the_rest() -> None:
    threads = IoThreads(1)
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        begun.set()
        return go_on.wait(60)

    first = threads.submit(wait)
    assert begun.wait(60)
    second = threads.submit(lambda: 2)
    threads.close()
    with pytest.raises(OSError, match="were let go"):
        threads.submit(lambda: 3)
    go_on.set()
    assert first.wait(60)
    assert second.wait(60) == 2


def test_a_late_call_is_cleaned_up_behind_when_it_is_over() -> None:
    threads = IoThreads(1, most_hanging=1)
    go_on, cleaned = threading.Event(), threading.Event()
    with pytest.raises(LateError) as late:
        threads.run(lambda: go_on.wait(60), 0.01, cleaned.set)
    assert late.value.errno == errno.ETIMEDOUT
    assert threads.all_hang
    assert not cleaned.is_set()
    assert threads.run(lambda: 7, 10) == 7, "another thread took its place"
    go_on.set()
    assert cleaned.wait(60)
    assert threads.run(lambda: 8, 10) == 8
    assert not threads.all_hang
    threads.close()


def test_a_call_that_never_began_never_will() -> None:
    threads = IoThreads(1, most_hanging=1)
    go_on, done = threading.Event(), []
    first = threads.submit(lambda: go_on.wait(60))
    second = threads.submit(lambda: done.append(2))
    with pytest.raises(LateError):
        second.wait(0.01)
    threads.give_up(second)
    go_on.set()
    first.wait(60)
    threads.run(lambda: done.append(3), 10)
    assert done == [3]
    assert not threads.all_hang
    threads.close()


def test_several_go_on_at_once_and_no_more() -> None:
    threads = IoThreads(3)
    together, alone = threading.Barrier(3), threading.Semaphore(3)

    def work() -> bool:
        taken = alone.acquire(blocking=False)
        together.wait(60)
        alone.release()
        return taken

    assert all(job.wait(30) for job in [threads.submit(work) for _ in range(9)])
    threads.close()


def test_where_no_thread_can_be_started_those_that_there_are_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = IoThreads(2)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="no thread") as caught:
            threads.run(lambda: 5, 10)
        assert caught.value.errno == errno.EAGAIN
    go_on = threading.Event()
    first = threads.submit(lambda: go_on.wait(60))
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        second = threads.submit(lambda: 7)
    go_on.set()
    assert first.wait(60)
    assert second.wait(60) == 7
    threads.close()


def test_those_who_wait_take_turns_and_so_do_the_calls_of_each() -> None:
    threads = IoThreads(1)
    go_on, done = threading.Event(), list[str]()

    def work(name: str) -> Callable[[], None]:
        return lambda: done.append(name)

    threads.submit(lambda: go_on.wait(60))
    jobs = []
    for who, names in (("a", "a1 a2 a3"), ("a", "A1 A2 A3"), ("b", "b1 b2"), ("c", "c1"), ("a", "α1")):
        jobs += threads.submit_all([work(name) for name in names.split()], who)
    assert threads.submit_all([], "a") == []
    go_on.set()
    for job in jobs:
        job.wait(60)
    assert done == ["a1", "b1", "c1", "A1", "b2", "α1", "a2", "A2", "a3", "A3"]
    threads.close()
