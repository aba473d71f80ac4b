"""Clients that are forked, or interrupted at any point: no page is ever wrong, and nothing leaks."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority
from forked import in_child

import kvstore
from kvstore.client.paths.shm.connection import SocketConnection
from kvstore.client.paths.transfer import Transfer
from kvstore.errors import UnavailableError
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.channel import Channel
from kvstore.wire.frame import NUMBERED, Kind, pack_frame
from kvstore.wire.local import Calls

ROOT = Path(__file__).parents[3]
FORKS = int(os.environ.get("FORKS", "12"))
INTERRUPTS = int(os.environ.get("INTERRUPTS", "400"))
PAGE = 5000
SPACE = kvstore.Layout(model="tiny", block_size=16, page_bytes=PAGE)


class InterruptError(Exception):
    """What a signal's handler raises."""


@pytest.mark.torn
@pytest.mark.timeout(300 + 2 * FORKS + INTERRUPTS // 10)
@pytest.mark.parametrize("scheme", ["unix", "kv", "kvs", "grpc", "embedded"])
def test_forks_and_interrupts_mix_up_no_pages(node_process, tmp_path, short_folder, shm_folder, scheme):
    """``FORKS`` children and ``INTERRUPTS`` alarms: see ``torn_client.py``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    flags = {}
    if scheme == "kvs":
        authority = Authority(tmp_path)
        cert, key = authority.sign("node", "127.0.0.1")
        flags = {"tls_cert": str(cert), "tls_key": str(key)}
        environment["TORN_CA"] = str(authority.ca)
    if scheme == "embedded":
        url = f"embedded://{short_folder}/e?arena=16MiB&disk_limit=64MiB&arena_dir={shm_folder}/e"
    else:
        node = node_process(**flags)
        url = node.url if scheme == "unix" else f"{scheme}://127.0.0.1:{node.port}"
    program = ROOT / "tests" / "fixtures" / "torn_client.py"
    done = subprocess.run(
        [sys.executable, program, url, str(FORKS), str(INTERRUPTS), "1"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout, done.stderr)
    counts = json.loads(done.stdout)
    assert counts["loaded"] > 100
    assert counts["stored"] > 50
    assert counts["forks"] == FORKS
    assert counts["interrupts"] > INTERRUPTS // 10
    assert counts["wrong"] == counts["children that failed"] == counts["written behind a call's end"] == 0
    assert counts["descriptors more"] < 20, "each interrupt left some"
    assert counts["refused behind"] == 0, "slots were left"


@pytest.fixture
def node(start_node) -> Any:
    return start_node(disk_limit=0)


@pytest.fixture
def near(node) -> Iterator[kvstore.Client]:
    with kvstore.connect(f"unix://{node.config.socket}", timeout=30.0) as client:
        yield client


@pytest.fixture
def far(node) -> Iterator[kvstore.Client]:
    with kvstore.connect(f"kv://127.0.0.1:{node.port}", timeout=30.0) as client:
        yield client


def loaded(pages: kvstore.Namespace, hashes: list[bytes]) -> np.ndarray:
    into = np.zeros((len(hashes), PAGE), np.uint8)
    return into[: pages.load(hashes, into)]


class TestInterrupted:
    """An exception at each step of a call on the arena's socket, before and behind it."""

    @pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
    @pytest.mark.parametrize("step", ["send_frames", "look", "receive"])
    @pytest.mark.parametrize("act", ["store", "load", "preallocated"])
    def test_no_answer_is_left_for_the_next_call(self, near, hashes, payload, monkeypatch, act, step, behind):
        monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.CAN_READ", False)  # every load is a call
        least = 1 if act == "preallocated" else 1 << 40
        monkeypatch.setattr("kvstore.client.paths.shm.preallocation.LEAST_BYTES", least)
        pages = near.namespace(SPACE)
        data = {name: payload(4) + np.uint8(name) for name in range(40)}
        for name in range(3):
            assert pages.store(hashes(4, name), data[name]).stored == 4
        original = getattr(Calls, step)
        left = [0]

        def interrupt(self: Any, *arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return original(self, *arguments)  # the node's end
            left[0] -= 1
            if left[0]:
                return original(self, *arguments)
            if behind:
                original(self, *arguments)
            raise InterruptError

        monkeypatch.setattr(Calls, step, interrupt)
        interrupted = 0
        for name in range(3, 13):
            left[0] = 1 + name % 5
            with suppress(InterruptError):
                if act == "load":
                    loaded(pages, hashes(4, name % 3))
                else:
                    pages.store(hashes(4, name), data[name])
            interrupted += left[0] <= 0
            left[0] = 0
            for other in (0, 1, 2):
                assert np.array_equal(loaded(pages, hashes(4, other)), data[other])
            again = pages.store(hashes(4, name + 20), data[name + 20])
            assert (again.stored, again.refused) == (4, 0)
            assert np.array_equal(loaded(pages, hashes(4, name + 20)), data[name + 20])
        assert interrupted >= 2

    @pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_connection_that_is_never_given_back_is_closed(self, near, hashes, payload, monkeypatch, eventually):
        pages = near.namespace(SPACE)
        assert pages.store(hashes(4), payload(4)).stored == 4
        path = near._session.path
        taken = [path._connections.take(time.monotonic() + 30.0) for _ in range(20)]
        assert all(isinstance(each, SocketConnection) for each in taken)
        assert len(path._connections._channels) == 20
        taken.clear()
        gc.collect()
        assert len(path._connections._channels) == 0

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_an_attachment_whose_operation_never_ended_goes_with_its_last_view(self, near, hashes, payload, eventually):
        pages = near.namespace(SPACE)
        pages.store(hashes(4), payload(4))
        path = near._session.path
        attachment = path._attachment
        assert attachment.use()  # and never done
        attachment.retire()
        assert pages.store(hashes(4, 1), payload(4)).stored == 4, "with another one"
        assert near.status().clients == 2
        view = attachment.view(0, 10)
        del attachment
        path._begun = threading.local()
        path._preallocation._slots.clear()
        gc.collect()
        assert near.status().clients == 2, "somebody may write to what it lent"
        del view
        gc.collect()
        eventually(lambda: near.status().clients == 1)


class TestAnswersToOthers:
    """What a forked child asked would be answered on the same connection."""

    def test_on_the_arenas_socket(self, near, hashes, payload, monkeypatch):
        monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.CAN_READ", False)
        pages = near.namespace(SPACE)
        data = payload(8)
        assert pages.store(hashes(4), data[:4]).stored == 4
        assert pages.store(hashes(4, 1), data[4:]).stored == 4
        path = near._session.path
        opened = pages._handle.current[0]
        connection = path._connections.take(time.monotonic() + 30.0)
        asked = path._load_request(path._attachment, opened, transfer_of(hashes(4)))
        connection.channel.send(Kind.PREPARE_LOAD, asked.SerializeToString())
        path._connections.give_back(connection)
        with suppress(UnavailableError):  # a miss, and no more
            into = loaded(pages, hashes(4, 1))
            assert np.array_equal(into, data[4 : 4 + len(into)])
        assert np.array_equal(loaded(pages, hashes(4, 1)), data[4:])
        assert connection not in path._connections._idle

    def test_on_a_bulk_connection(self, far, hashes, payload):
        pages = far.namespace(SPACE)
        data = payload(8)
        assert pages.store(hashes(4), data[:4]).stored == 4
        assert pages.store(hashes(4, 1), data[4:]).stored == 4
        path = far._session.path
        [idle] = path._pool._idle
        asked = pb.LoadPages(pages=pb.PageList(fingerprint=pages.fingerprint, hashes=b"".join(hashes(4))))
        frame = pack_frame(Kind.LOAD, asked.SerializeToString(), milliseconds=30_000)
        idle.channel.is_quiet = lambda: True  # it looked just before the other one's request
        idle.channel._socket.sendall(frame)
        assert np.array_equal(loaded(pages, hashes(4, 1)), data[4:])
        assert idle not in path._pool._idle
        assert pages.store(hashes(4, 2), data[:4]).stored == 4

    @pytest.mark.parametrize("scheme", ["unix", "kv"])
    def test_an_older_nodes_answers_say_nothing_and_are_taken(self, start_node, hashes, payload, monkeypatch, scheme):
        send = Channel.send

        def older(self: Channel, kind: Kind, message: bytes = b"") -> None:
            self.answering = 0
            send(self, kind, message)

        monkeypatch.setattr(Channel, "send", older)
        monkeypatch.setattr(
            "kvstore.service.sockets.bulk.pack_frame", lambda *given, milliseconds, **rest: pack_frame(*given, **rest)
        )
        monkeypatch.setattr("kvstore.client.paths.shm.mapped_arena.CAN_READ", False)
        node = start_node(disk_limit=0)
        url = f"unix://{node.config.socket}" if scheme == "unix" else f"kv://127.0.0.1:{node.port}"
        with kvstore.connect(url, timeout=30.0) as client:
            pages = client.namespace(SPACE)
            data = payload(4)
            for name in range(3):
                assert pages.store(hashes(4, name), data).stored == 4
                assert np.array_equal(loaded(pages, hashes(4, name)), data)

    def test_todays_answers_say_it_where_older_clients_do_not_look(self, start_node):
        """In a word that was 0 in every answer, and that nobody read there."""
        assert NUMBERED == 1
        frame = pack_frame(Kind.LOAD, b"message", milliseconds=5)
        assert len(frame) == 39, "no frame has grown"


class TestForked:
    def test_a_child_attaches_for_itself_and_leaves_its_parents_holds(self, near, hashes, payload, eventually):
        pages = near.namespace(SPACE)
        data = payload(4)
        assert pages.store(hashes(4), data).stored == 4
        with pages.prepare_load(hashes(4)) as held, pages.borrow(hashes(4)) as lent:
            storing, other = pages.prepare_store(hashes(4, 1)), pages.prepare_store(hashes(4, 3))

            def work() -> bool:
                assert held.complete() == lent.complete() == 0
                storing.abort()
                with pytest.raises(UnavailableError, match=f"begun by process {os.getppid()}"):
                    other.complete()
                assert np.array_equal(loaded(pages, hashes(4)), data)
                assert pages.store(hashes(4, 2), data).stored == 4
                return near.status().clients == 2

            assert in_child(work)
            assert held.complete() == lent.complete() == 4
            for page in storing.pages:
                page[:] = 7
            assert storing.complete().stored == other.complete().stored == 4
        assert np.array_equal(loaded(pages, hashes(4, 2)), data), "what the child stored stays"
        eventually(lambda: near.status().clients == 1)

    def test_a_childs_close_ends_nothing_of_its_parents(self, near, far, hashes, payload):
        for client in (near, far):
            pages = client.namespace(SPACE)
            data = payload(4)
            assert pages.store(hashes(4), data).stored + pages.store(hashes(4), data).present >= 4

            def work(client: kvstore.Client = client) -> bool:
                client.close()
                with pytest.raises(UnavailableError):
                    client.status()
                return True

            assert in_child(work)
            assert np.array_equal(loaded(pages, hashes(4)), data)

    def test_locks_that_other_threads_hold_are_free_in_a_child(self, near, far, hashes, payload):
        for client in (near, far):
            pages = client.namespace(SPACE)
            data = payload(4)
            pages.store(hashes(4), data)
            path = client._session.path
            owners = [client._session, pages._moved, path]
            if client is near:
                owners += [path._connections, path._preallocation, path._use_reports, path._admission]
            else:
                owners.append(path._pool)
            locks = [owner._lock for owner in owners]
            if client is near:
                locks += [path._attachment._guard, path._attachment.line._lock]
                locks += [owner._closed._cond for owner in (path, path._use_reports, path._preallocation)]
            for lock in locks:
                assert lock.acquire(timeout=30.0)

            def work(client: kvstore.Client = client, pages: kvstore.Namespace = pages, data: Any = data) -> bool:
                right = np.array_equal(loaded(pages, hashes(4)), data)
                client.close()
                return right

            try:
                assert in_child(work)
            finally:
                for lock in locks:
                    lock.release()


def test_a_read_that_never_ended_is_forgotten_behind_its_deadline():
    from kvstore.arena.epochs import LINE_BYTES, ReadingLine

    words, epoch = memoryview(bytearray(LINE_BYTES)).cast("Q"), memoryview(bytearray(8)).cast("Q")
    epoch[0] = 5
    line = ReadingLine(words, epoch)
    line.begin(time.monotonic() - 1.0)  # interrupted, and over
    epoch[0] = 9
    read = line.begin(time.monotonic() + 30.0)
    assert words[0] == 9
    line.end(read)
    assert words[0] == 0
    assert not line._reads


def test_slots_asked_for_by_an_interrupted_store_go_back(near, hashes, payload, monkeypatch):
    monkeypatch.setattr("kvstore.client.paths.shm.preallocation.LEAST_BYTES", 1)
    pages = near.namespace(SPACE)
    path = near._session.path
    attachment = path._attachment
    connection = path._connections.take(time.monotonic() + 30.0)
    for _ in range(5):
        path._preallocation.ask(connection, attachment, pages._handle.current[0], 4, 0)  # and never posted
    path._connections.give_back(connection)
    assert len(path._preallocation._coming) == 2
    monkeypatch.setattr("kvstore.client.paths.shm.preallocation.LONGEST_LEASE", 0.0)
    path._preallocation._give_back_idle()
    assert not path._preallocation._coming
    assert attachment.is_over, "what the node keeps for them is unknown"
    assert pages.store(hashes(4), payload(4)).stored == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_slots_of_a_store_that_was_lost_go_back(near, hashes, payload):
    """It was interrupted before anybody knew that it had them."""
    pages = near.namespace(SPACE)
    path = near._session.path
    opened = pages._handle.current[0]
    attachment = path._attachment
    path._reserve(opened, transfer_of(hashes(4)))  # and nobody takes the answer
    gc.collect()
    assert pages.store(hashes(4, 1), payload(4)).stored == 4
    assert attachment.is_over
    with pytest.raises(InterruptError), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.client.paths.shm.path.Reservation", raise_interrupt)  # behind the node's answer
        pages.store(hashes(4, 2), payload(4))
    assert path._attachment.is_over


def transfer_of(hashes: list[bytes]) -> Transfer:
    """Of pages whose memory the path lends."""
    return Transfer(b"".join(hashes), (), time.monotonic() + 30.0)


def raise_interrupt(*arguments: object, **options: object) -> None:
    raise InterruptError


def run(program: str) -> list[str]:
    """What a program prints whose main thread gets signals."""
    done = subprocess.run(
        [sys.executable, "-c", _PROLOGUE + program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_PROLOGUE = """
import os, signal, sys, threading, time
from kvstore.host.uninterrupted import abandonable, uninterrupted

class Alarm(Exception): pass
def handler(*_): raise Alarm
signal.signal(signal.SIGALRM, handler)
def alarm(): signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
"""


class TestUninterrupted:
    """Each in a process of its own."""

    def test_work_ends_before_an_interrupt_is_raised(self):
        program = """
ended = []
def work(value):
    alarm()
    threading.Event().wait(0.2)
    ended.append(threading.current_thread() is threading.main_thread())
    return value
try:
    uninterrupted(work)(1)
except Alarm:
    print("raised", ended)
signal.signal(signal.SIGALRM, lambda *_: None)
print(uninterrupted(work)(2), ended)
def fails(): raise KeyError("no")
try:
    uninterrupted(fails)()
except KeyError as error:
    print(error)
"""
        assert run(program) == ["raised [False]", "2 [False, False]", "'no'"]

    def test_further_interrupts_do_not_end_the_wait(self):
        program = """
again = threading.Event()
working = []
def storm():
    while not again.wait(0.0005):
        alarm()
def work():
    working.append(1)
    time.sleep(0.02)
    working.pop()
bad = raised = 0
def tell(*_):
    if len(seen) < 3:
        seen.append(1)
        raise Alarm
signal.signal(signal.SIGALRM, tell)
seen = [1] * 3
threading.Thread(target=storm, daemon=True).start()
for _ in range(60):
    try:
        seen = []
        uninterrupted(work)()
    except Alarm:
        raised += 1
        bad += bool(working)
        seen = [1] * 3
again.set()
print(raised > 30, bad)
"""
        assert run(program) == ["True 0"]

    def test_what_touches_nothing_of_its_callers_is_not_waited_for(self):
        program = """
go_on = threading.Event()
ended = threading.Event()
def work():
    alarm()
    go_on.wait()
    ended.set()
try:
    abandonable(work)()
except Alarm:
    print("raised", ended.is_set())
print(uninterrupted(lambda: 5)())
go_on.set()
ended.wait()
"""
        assert run(program) == ["raised False", "5"]

    def test_a_signal_that_another_thread_received_interrupts_too(self):
        program = """
go_on = threading.Event()
def work():
    signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
    go_on.wait()
try:
    abandonable(work)()
except Alarm:
    print("raised")
go_on.set()
"""
        assert run(program) == ["raised"]

    def test_what_was_lent_is_given_back_and_the_interrupt_stays_what_it_is(self):
        program = """
class Lent:
    def __enter__(self): return self
    def __exit__(self, *_):
        print("given back")
        raise RuntimeError
def lend():
    alarm()
    time.sleep(0.1)
    return Lent()
try:
    uninterrupted(lend)()
except Alarm:
    print("raised")
"""
        assert run(program) == ["given back", "raised"]

    def test_a_handler_that_forks_does_not_leave_its_child_waiting(self):
        program = """
from kvstore.errors import UnavailableError
children = []
def fork(*_):
    child = os.fork()
    if not child:
        return signal.alarm(30)
    children.append(child)
    go_on.set()
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.signal(signal.SIGUSR1, fork)
go_on = threading.Event()
def work():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    go_on.wait()
    return 1
try:
    print(uninterrupted(work)(), os.waitpid(children[0], 0)[1])
except UnavailableError:
    assert uninterrupted(lambda: 7)() == 7
    os._exit(0)
"""
        assert run(program) == ["1 0"]

    @pytest.mark.parametrize("url", ["unix", "kv"])
    def test_a_client_that_lives_until_the_interpreters_end_is_closed_there(self, node, url):
        where = f"unix://{node.config.socket}" if url == "unix" else f"kv://127.0.0.1:{node.port}"
        program = f"""
import kvstore
class Engine:
    def __init__(self):
        self.client = kvstore.connect({where!r})
        self.client.namespace(kvstore.Layout(model="m", block_size=16, page_bytes=4096))
    def __del__(self):
        self.client.close()
        print("closed", flush=True)
engine = Engine()
engine.self = engine
print("ends")
"""
        assert run(program) == ["ends", "closed"]
