"""One file, read and written in whole blocks, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.segments.record import BLOCK, ByteArray

MAX_BUFFERS = 1024
"""IOV_MAX: the most buffers that one system call takes."""


class BlockFile:
    """An open file. Offsets and lengths are multiples of ``BLOCK``, buffers are aligned (:mod:`.aligned`).

    A file system that refuses O_DIRECT, when the file is opened or when it is read or written, gets buffered I/O.

    Args:
        path: the file.
        flags: as for ``os.open``; a file that is created is 0600.
        direct: False asks for buffered I/O from the start.

    Raises:
        OSError: here and from every method, what the system says.
    """

    def __init__(self, path: Path, flags: int, *, direct: bool = True) -> None:
        flags |= os.O_CLOEXEC
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
        """Write all of the buffers, one after the other, from ``offset`` on."""
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
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Return when the file's bytes would survive a loss of power."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

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
