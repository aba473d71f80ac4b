"""One process at a time: a file that is locked as long as its owner lives, and says who that is."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvstore.errors import InUseError


class ProcessLock:
    """Holds a file locked for this process until it is released or the process ends. The file stays.

    Args:
        path: the file; made with mode 0600 where it is missing.
        refusal: how the error begins when somebody else holds it, as ``"/run/kvstore is in use"``.

    Raises:
        InUseError: another process, or another part of this one, holds it; the message names the process.
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path, refusal: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            # The owner writes its id just after it has the lock: for a moment there is none to name.
            name = f"process {owner}" if owner else "another process"
            raise InUseError(f"{refusal} by {name}") from error
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)

    @property
    def held(self) -> bool:
        """Whether it was not released yet."""
        return self._fd >= 0

    def release(self) -> None:
        """Let the next one in. A second call does nothing."""
        if self._fd >= 0:
            # Unlocked and not only closed: a forked child may have the descriptor as well.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1
