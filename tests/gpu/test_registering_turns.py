"""Processes that map one file register its memory one after the other, and nobody waits for a dead one."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.gpu.registered import Bytes
from kvstore.gpu.registering_turns import Turns

Eventually = Callable[[Callable[[], object]], None]
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


class Looks(threading.Event):
    """Never set unless it is set; knows whether a turn was looked for in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.set()
        return super().wait(timeout)


@pytest.fixture
def file(shm_folder: Path) -> Path:
    path = shm_folder / "pages"
    path.write_bytes(bytes(1 << 20))
    return path


def mapped(path: Path) -> Bytes:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has a turn, until it is killed."""
    script = f"""
        import mmap, sys, threading
        import numpy as np
        from kvstore.gpu.registering_turns import Turns
        with open({str(path)!r}, "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        with Turns(memory[4096:]).turn(threading.Event()):
            print("has it", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield process
        process.kill()


def test_a_turn_comes_when_the_process_that_has_it_dies(file: Path) -> None:
    memory, stop, had = mapped(file), Looks(), threading.Event()

    def take() -> None:
        with Turns(memory).turn(stop):
            had.set()

    with holder(file) as other:
        taking = threading.Thread(target=take)
        taking.start()
        assert stop.waited.wait(60)
        assert not had.is_set()
        other.send_signal(signal.SIGKILL)
        assert had.wait(60)
    taking.join(60)


def test_one_that_was_stopped_is_not_waited_for_and_not_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    turns = Turns(mapped(file), longest=0.05)
    with holder(file) as other:
        other.send_signal(signal.SIGSTOP)
        with turns.turn(stop := Looks()):
            assert stop.waited.is_set()
        with turns.turn(stop := Looks()):
            assert not stop.waited.is_set()
    assert [record.message for record in caplog.records] == [
        f"another process has been registering memory of {file} for 0.05 s: not waiting for it"
    ]


def test_an_end_is_not_kept_waiting(file: Path) -> None:
    stop = threading.Event()
    with holder(file):
        ending = threading.Timer(0.01, stop.set)
        ending.start()
        with Turns(mapped(file)).turn(stop):
            assert stop.is_set()
        ending.join()


def test_a_turn_ends_although_a_child_was_forked_in_it(file: Path) -> None:
    memory = mapped(file)
    with Turns(memory).turn(threading.Event()):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with Turns(memory).turn(stop := Looks()):
            assert not stop.waited.is_set()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_memory_without_a_file_and_a_file_that_is_gone_have_no_turns(file: Path) -> None:
    memory = mapped(file)
    turns = Turns(memory)
    with holder(file):
        file.unlink()
        for each in (turns, Turns(memory), Turns(np.zeros(64, np.uint8))):
            with each.turn(stop := Looks()):
                assert not stop.waited.is_set()


def test_a_file_that_can_not_be_locked_has_no_turns(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    caplog.set_level(logging.INFO)
    turns = Turns(mapped(file))
    monkeypatch.setattr(fcntl, "flock", refuse)
    before = _descriptors()
    for _ in range(2):
        with turns.turn(stop := Looks()):
            assert not stop.waited.is_set()
    assert _descriptors() == before
    assert [record.message for record in caplog.records] == [
        f"registering memory of {file} without turns: [Errno {errno.ENOLCK}] {os.strerror(errno.ENOLCK)}"
    ]


def _descriptors() -> set[str]:
    return {each.name for each in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("name", [b"a \xff b", "a\u2028b".encode()])
def test_any_file_name_has_turns(shm_folder: Path, name: bytes) -> None:
    file = shm_folder / os.fsdecode(name)
    file.write_bytes(bytes(1 << 20))
    with file.open() as other, Turns(mapped(file)).turn(threading.Event()), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_processes_register_one_arena_one_after_the_other(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, str(FIXTURES / "pinning_process.py"), str(file), str(log), str(64 << 10)]
    ranks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
    errors = [rank.communicate()[1] for rank in ranks]

    assert said == ["pinned\n"] * 3, errors
    assert [rank.returncode for rank in ranks] == [0] * 3, errors
    notes = [line.split() for line in log.read_text().splitlines()]
    assert len(notes) == 3 * 2 * 16
    for (began, first), (ended, second) in zip(notes[::2], notes[1::2], strict=True):
        assert (began, ended, first) == ("begin", "end", second), "two at once"
