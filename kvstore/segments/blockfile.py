"""One file, read and written in whole blocks, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from kvstore.host.forking import register_forked
from kvstore.segments.io_threads import IoThreads, LateError
from kvstore.segments.record import BLOCK, ByteArray

MAX_BUFFERS = 1024
"""IOV_MAX: the most buffers that one system call takes."""


SYNC_DEADLINES = 6
"""A sync writes what a cache has gathered: it has so many times as long as another call."""
T = TypeVar("T")


class Patience(NamedTuple):
    """How calls that may hang are made: on other threads, and waited for so long."""

    threads: IoThreads
    seconds: float

    def run(self, call: Callable[[], T]) -> T:
        """Make a call that has nothing to clean up when it is late.

        Raises:
            LateError: it was.
        """
        return self.threads.run(call, self.seconds)


class BlockFile:
    """An open file. Offsets and lengths are multiples of ``BLOCK``, buffers are aligned (:mod:`.aligned`).

    A file system that refuses O_DIRECT, when the file is opened or when it is read or written, gets buffered I/O.

    Args:
        path: the file.
        flags: as for ``os.open``; a file that is created is 0600.
        direct: False asks for buffered I/O from the start.
        patience: with it, every call but ``read`` and ``size`` has a deadline. After one that was late the file
            can only be closed; that happens when the late call is over.

    Raises:
        OSError: here and from every method, what the system says; ``LateError`` for a deadline.
    """

    def __init__(self, path: Path, flags: int, *, direct: bool = True, patience: Patience | None = None) -> None:
        self._patience = patience
        self._fd = -1
        self.lost = False
        """Whether a call was late: it may still be changing the file."""
        register_forked(self)
        self._in_time(lambda: self._open(path, flags | os.O_CLOEXEC, direct=direct))

    def _open(self, path: Path, flags: int, *, direct: bool) -> None:
        if direct:
            try:
                self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems create the file before they refuse the flag: O_EXCL would trip over it.
                self._fd = os.open(path, flags & ~os.O_EXCL, 0o600)
        else:
            self._fd = os.open(path, flags, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, buffers: Sequence[ByteArray], offset: int) -> None:
        """Write all of the buffers, one after the other, from ``offset`` on.

        After ``LateError`` they are still being read: they must not be staged ones, which are used again.
        """
        self._in_time(lambda: self._write(buffers, offset))

    def _write(self, buffers: Sequence[ByteArray], offset: int) -> None:
        left = [buffer for buffer in buffers if len(buffer)]
        while left:
            try:
                written = os.pwritev(self._fd, [buffer.data for buffer in left[:MAX_BUFFERS]], offset)
            except OSError as error:
                if self._leave_direct(error):
                    continue
                raise
            # O_DIRECT goes on at a whole block only: the bytes of a broken one are written again.
            written = written // BLOCK * BLOCK
            if not written:
                raise OSError(errno.EIO, "the system wrote less than a block")
            left = _without(left, written)
            offset += written

    def read(self, buffers: Sequence[ByteArray], offset: int) -> int:
        """Fill the buffers, one after the other, from ``offset`` on. Returns the bytes read: fewer at the end."""
        left = [buffer for buffer in buffers if len(buffer)]
        total = 0
        while left:
            try:
                count = os.preadv(self._fd, [buffer.data for buffer in left[:MAX_BUFFERS]], offset + total)
            except OSError as error:
                if self._leave_direct(error):
                    continue
                raise
            count = count // BLOCK * BLOCK
            if not count:
                break
            left = _without(left, count)
            total += count
        return total

    def size(self) -> int:
        """The file's length in bytes."""
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes."""
        self._in_time(lambda: os.ftruncate(self._fd, size))

    def sync(self, failed: Callable[[], None] = lambda: None) -> None:
        """Return when the file's bytes would survive a loss of power.

        Args:
            failed: called when the system refuses, also when it does so behind a ``LateError``. To ask it again proves
                nothing: it may have dropped what it could not write, and tells each open file only once.
        """

        def sync() -> None:
            try:
                os.fdatasync(self._fd)
            except OSError:
                failed()
                raise

        self._in_time(sync, SYNC_DEADLINES)

    def close(self) -> None:
        """Close the file, or let the call that was late do so when it is over."""
        if not self.lost:
            self._close()

    def forked(self) -> None:
        """In a child: the file is the parent's, and goes when that deletes it."""
        with suppress(OSError):
            self._close()

    @property
    def hangs(self) -> bool:
        """Whether a call that was late is still going on."""
        return self.lost and self._fd >= 0

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _in_time(self, call: Callable[[], T], deadlines: int = 1) -> T:
        """Make one call, with patience if there is any."""
        if self._patience is None:
            return call()
        if self.lost:
            raise OSError(errno.EIO, "an earlier call on this file was late")
        threads, seconds = self._patience
        try:
            return threads.run(call, seconds * deadlines, self._close)
        except LateError:
            self.lost = True
            raise

    def _leave_direct(self, error: OSError) -> bool:
        """Whether the call is to be tried again, buffered, because O_DIRECT may be what was refused."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True


def _without(buffers: list[ByteArray], count: int) -> list[ByteArray]:
    """The buffers, less their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
