"""A lock between processes: a file that is locked as long as its owner lives, and says who that is."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvstore.errors import InUseError
from kvstore.host.descriptors import open_descriptors
from kvstore.host.forking import register_forked


class ProcessLock:
    """Holds a file locked for this process until it is released or the process ends. The file stays.

    A forked child has no part in it: it may outlive its parent, whose locks would live on in it.

    Args:
        path: the file; made with mode 0600 where it is missing.
        refusal: how the error begins when somebody else holds it, as ``"/run/kvstore is in use"``.

    Raises:
        InUseError: another process, or another part of this one, holds it; the message names the process.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, refusal: str) -> None:
        self._path = path
        self._fd = -1
        self._opening = True
        register_forked(self)
        try:
            self._fd = _lock(path, refusal)
        finally:
            self._opening = False
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    @property
    def held(self) -> bool:
        """Whether it was not released yet; never in a forked child."""
        return self._fd >= 0

    def release(self) -> None:
        """Let the next one in. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # Unlocked and not only closed: a child that is being forked has the descriptor for a moment.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def remove(self) -> None:
        """Let the next one in, who makes a file of its own: this one goes."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # gone, or not ours to take away: it stays, unlocked
                self._path.unlink()
            self.release()

    def forked(self) -> None:
        """Close the descriptor, and unlock nothing: the lock is the parent's."""
        fd, self._fd = self._fd, -1
        # Another thread of the parent may have opened the file, and not come to say so.
        found = open_descriptors(lambda each: _lies_at(self._path, each)) if self._opening else []
        for each in {fd, *found} - {-1}:
            with contextlib.suppress(OSError):
                os.close(each)


def _lock(path: Path, refusal: str) -> int:
    """A descriptor of the file that lies there, locked."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _lies_at(path, fd):
                return fd
        except BlockingIOError as error:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            # The owner writes its id just after it has the lock: for a moment there is none to name.
            name = f"process {owner}" if owner else "another process"
            raise InUseError(f"{refusal} by {name}") from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its last owner has removed it meanwhile


def _lies_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
