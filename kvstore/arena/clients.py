"""Which clients on this host are attached, and which of them still live.

A client makes a file in the arena's ``clients`` folder, locks it with ``flock`` and names it to the node, which renames
it to the client's number. The kernel drops the lock when the client dies, however it dies and whatever became of its
connection; while it is locked, the client may write into the slots that were reserved for it. Locks outlive the node,
so a node that takes an arena over knows which clients of the earlier one still live.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
from pathlib import Path

from kvstore.errors import InvalidRequestError, LimitExceededError

MOST_CLIENTS = 1024
"""Most clients attached at once."""
_LAST_NUMBER = 0xFFFF
_LOCK_NAME = re.compile(r"new-[0-9a-f]{32}")


class Clients:
    """The attached clients, by number (1 to 65535)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._numbers: set[int] = set()
        self._last = 0
        for path in directory.iterdir():
            if not is_locked(path):
                path.unlink(missing_ok=True)
            elif path.name.isdigit():
                self._numbers.add(int(path.name))

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def attach(self, lock_name: str) -> int:
        """Take a client in that holds the lock on ``clients/<lock_name>``. Returns its number.

        Raises:
            InvalidRequestError: there is no such file, or nobody holds it locked.
            LimitExceededError: too many clients are attached.
        """
        path = self._directory / lock_name
        if not _LOCK_NAME.fullmatch(lock_name) or not path.exists() or not is_locked(path):
            raise InvalidRequestError(f"lock file {lock_name!r}: not a locked file in the arena's clients folder")
        with self._lock:
            if len(self._numbers) >= MOST_CLIENTS:
                raise LimitExceededError(f"{len(self._numbers)} clients are attached, the limit is {MOST_CLIENTS}")
            number = self._last % _LAST_NUMBER + 1
            while number in self._numbers:
                number = number % _LAST_NUMBER + 1
            self._last = number
            path.rename(self._directory / str(number))
            self._numbers.add(number)
        return number

    def dead(self) -> list[int]:
        """The attached clients that have died or detached."""
        with self._lock:
            numbers = list(self._numbers)
        return [number for number in numbers if not is_locked(self._directory / str(number))]

    def forget(self, number: int) -> None:
        """A dead client has nothing in the arena any more."""
        with self._lock:
            self._numbers.discard(number)
            (self._directory / str(number)).unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """Whether some process holds ``path`` locked; in doubt it does, since what a live client may write is not free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # this process has no descriptor left, say
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
    return False
