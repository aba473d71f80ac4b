"""Locks of processes, where these fork and where lock files come and go."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest
from forked import descriptors_below, in_child

from kvstore.errors import InUseError
from kvstore.host import process_lock
from kvstore.host.process_lock import ProcessLock


def test_a_child_holds_nothing_and_releases_nothing(tmp_path: Path) -> None:
    lock = ProcessLock(tmp_path / "lock", "it is in use")

    def use() -> tuple[bool, list[str]]:
        held = lock.held
        lock.release()
        lock.remove()
        return held, descriptors_below(str(tmp_path))

    assert in_child(use) == (False, [])
    assert lock.held
    with pytest.raises(InUseError):
        ProcessLock(tmp_path / "lock", "it is in use")
    lock.release()
    ProcessLock(tmp_path / "lock", "it is in use").release()


def test_a_lock_that_a_thread_is_taking_is_not_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the file open and locked, and nobody knows the descriptor yet."""
    taken, go_on = threading.Event(), threading.Event()
    original = fcntl.flock

    def slow(fd: int, how: int) -> None:
        original(fd, how)
        taken.set()
        assert go_on.wait(60)

    monkeypatch.setattr(process_lock.fcntl, "flock", slow)
    thread = threading.Thread(target=lambda: ProcessLock(tmp_path / "lock", "it is in use"))
    thread.start()
    try:
        assert taken.wait(60)
        assert in_child(lambda: descriptors_below(str(tmp_path))) == []
    finally:
        go_on.set()
        thread.join()


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes behind would make a file of its own, and lock that."""
    path = tmp_path / "lock"
    owner = ProcessLock(path, "it is in use")
    original = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(process_lock.fcntl, "flock", original)
        owner.remove()
        original(fd, how)

    monkeypatch.setattr(process_lock.fcntl, "flock", late)
    lock = ProcessLock(path, "it is in use")
    assert path.exists()
    with pytest.raises(InUseError):
        ProcessLock(path, "it is in use")
    lock.remove()
    assert not path.exists()
