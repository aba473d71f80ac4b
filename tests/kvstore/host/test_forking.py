"""A fork waits for calls that it must not come between, and calls wait for a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from forked import in_child

import kvstore
from kvstore.host import forking
from kvstore.host.forking import unforked


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_fork_waits_for_a_call_under_way(monkeypatch, eventually):
    monkeypatch.setattr(forking, "LONGEST_WAIT", 60.0)
    begun, answer = threading.Event(), threading.Event()
    steps: list[str] = []

    def call() -> None:
        with unforked():
            begun.set()
            answer.wait()
            steps.append("the call ended")

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(0)
        steps.append("forked")
        os.waitpid(child, 0)

    calling = in_thread(call)
    begun.wait()
    forking_thread = in_thread(fork)
    eventually(lambda: forking._calls._forks == 1)
    answer.set()
    calling.join()
    forking_thread.join()
    assert steps == ["the call ended", "forked"]
    assert (forking._calls._forks, forking._calls._under_way) == (0, 0)


def test_a_call_that_hangs_holds_no_fork_up_for_long(monkeypatch):
    monkeypatch.setattr(forking, "LONGEST_WAIT", 0.01)
    begun, answer = threading.Event(), threading.Event()

    def call() -> None:
        with unforked():
            begun.set()
            answer.wait()

    calling = in_thread(call)
    begun.wait()
    assert in_child(lambda: forking._calls._under_way) == 0, "its parent's calls are not a child's"
    answer.set()
    calling.join()
    assert forking._calls._under_way == 0


def test_a_child_that_was_forked_in_a_call_may_leave_it(monkeypatch):
    monkeypatch.setattr(forking, "LONGEST_WAIT", 0.01)

    def leave() -> int:
        held.__exit__(None, None, None)
        return forking._calls._under_way

    held = unforked()
    held.__enter__()
    try:
        assert in_child(leave) == 0
    finally:
        held.__exit__(None, None, None)
    assert forking._calls._under_way == 0


def test_every_call_of_a_client_is_one_that_forks_wait_for(start_node, monkeypatch):
    seen: list[int] = []
    node = start_node(disk_limit=0)
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=30.0) as client:
        connection = client._session.control._connection
        status = connection.stub.Status

        def watched(*arguments: object, **options: object) -> object:
            seen.append(forking._calls._under_way)
            return status(*arguments, **options)

        monkeypatch.setattr(connection.stub, "Status", watched)
        client.status()
    assert seen == [1]
