"""Turns at registering one file's memory with CUDA, for all processes of the machine that map it."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.gpu.registered import Bytes

_log = logging.getLogger(__name__)

LONGEST_TURN = 30.0
"""Seconds for which a turn is waited for. A chunk takes a thousandth of that: whoever has it is stopped, or hangs."""
LOOK_SECONDS = 0.005
"""Between two looks whether it is free: :data:`PAUSE` of whoever had it, at most."""
PAUSE = 0.01
"""Seconds between two turns of one process: others get theirs in between, and its engine its calls to CUDA, which wait
for each other with those that register memory."""


class Turns:
    """Turns of this process. The file is locked (``flock``) meanwhile, so that a process that dies ends its turn.

    Pages that one process pins while another one is at it may be refused: the kernel moves them first (out of memory
    that it keeps movable), and can't while they are held. Tensor-parallel ranks map one arena and start together.

    Args:
        memory: what will be registered; only a mapped file has turns.
        longest: seconds after which a turn is not waited for any longer, nor any later one.
    """

    def __init__(self, memory: Bytes, longest: float = LONGEST_TURN) -> None:
        self._path = _file_at(memory.ctypes.data)
        self._longest = longest

    @contextmanager
    def turn(self, stop: threading.Event) -> Iterator[None]:
        """Wait for a turn, and have it. One that does not come within ``longest``, or before ``stop`` is set, is done
        without, and so are all where the file can't be locked."""
        fd = self._open()
        if fd < 0:
            yield
            return
        try:
            has_it = self._wait(fd, stop)
            try:
                yield
            finally:
                if has_it:  # unlocked and not only closed: a child that is being forked has the descriptor, too
                    fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC) if self._path else -1
        except OSError:  # a node that has made another one took it away
            return -1

    def _wait(self, fd: int, stop: threading.Event) -> bool:
        """Whether it came."""
        end = time.monotonic() + self._longest
        while not stop.is_set():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    _log.info(
                        "another process has been registering memory of %s for %g s: not waiting for it",
                        self._path,
                        self._longest,
                    )
                    self._path = ""
                    return False
                stop.wait(LOOK_SECONDS)
            except OSError as error:  # a file system without locks
                _log.info("registering memory of %s without turns: %s", self._path, error)
                self._path = ""
                return False
            else:
                return True
        return False


def _file_at(address: int) -> str:
    """The file that is mapped at an address; empty where there is none."""
    # Any library of the engine may have a name of bytes that are no text, or that splitlines() would end a line at.
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).rstrip("\n").split("\n"):
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            is_file = len(fields) == 6 and fields[5].startswith("/") and not fields[5].endswith(" (deleted)")
            return fields[5] if is_file else ""
    return ""
