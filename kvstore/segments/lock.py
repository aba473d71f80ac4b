"""One process a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvstore.errors import InUseError

LOCK_NAME = "lock"
LOCK_BYTES = 4096
"""What the lock's file counts against a limit: the one block that holds the process's id."""


class DirectoryLock:
    """Holds a directory for this process until it is released or the process ends.

    Raises:
        InUseError: another process, or another part of this one, holds it; the message names the process.
        OSError: the lock's file can't be opened.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            # The owner writes its id just after it has the lock: for a moment there is none to name.
            name = f"process {owner}" if owner else "another process"
            raise InUseError(f"{directory} is in use by {name}") from error
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let the next one in."""
        os.close(self._fd)
