"""The attached clients of an arena: processes on this host that map it, and which of them still live.

A client makes a file in the arena's ``clients`` folder, locks it with ``flock`` and names it to the node, which renames
it to the client's number. The kernel drops the lock when the client dies, however it dies and whatever became of its
connection; while it is locked, the client may write into the slots that were reserved for it. A client that detaches
makes its file longer than nothing before it lets the lock go: from one that has died, a device may still be copying.
Locks outlive the node, so a node that takes an arena over knows which clients of the earlier one still live.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from pathlib import Path

from kvstore.client_name import MOST_NAME, shown_name
from kvstore.errors import InvalidRequestError, LimitExceededError, UnavailableError
from kvstore.host.forking import register_forked
from kvstore.status import ClientStatus

MOST_CLIENTS = 1024
"""Most clients attached at once."""
_LAST_NUMBER = 0xFFFF
_ABANDONED_SECONDS = 10.0
_LOCK_NAME = re.compile(r"new-[0-9a-f]{32}")
_NUMBER = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_NAMED = ".name"
"""Beside a client's lock file: what it calls itself, for the next node. Of no use for anything but to be shown."""
_NO_LOCK_FILE = (
    errno.ENOENT,
    errno.EACCES,  # of another user, who has not let the group in, or never will
    errno.ENXIO,  # a socket
    errno.ELOOP,  # a symbolic link
)
_log = logging.getLogger(__name__)


class Clients:
    """The attached clients, by number (1 to 65535). Safe for threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        # Of each lock file its own descriptor: somebody may delete the file while its client lives, and writes.
        self._files: dict[int, int] = {}
        self._names: dict[int, tuple[str, float]] = {}
        """What each calls itself, and since when it is attached: seconds since 1970."""
        self._last = 0
        self._closed = False
        self._left_earlier: set[int] = set()
        register_forked(self)
        for path in directory.iterdir():
            if path.name.endswith(_NAMED):
                if not _is_locked_at(path.with_suffix("")):
                    remove_lock_file(path)
                continue
            fd = _open(path)
            number = int(path.name) if _NUMBER.fullmatch(path.name) else 0
            if fd is None or not is_locked(fd):
                if fd is not None and os.fstat(fd).st_size > 0:
                    self._left_earlier.add(number)
                remove_lock_file(path)
            elif 0 < number <= _LAST_NUMBER:
                self._files[number] = fd
                continue
            if fd is not None:
                os.close(fd)
        self._names = {number: _read_name(directory, number) for number in self._files}

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, number: int) -> bool:
        return number in self._files

    def numbers(self) -> list[int]:
        """The attached clients."""
        return list(self._files)

    def lives(self, number: int) -> bool:
        """Whether an attached client has neither died nor detached."""
        fd = self._files.get(number)
        return fd is not None and is_locked(fd)

    def connected(self) -> list[ClientStatus]:
        """The attached clients, by what they call themselves."""
        now = time.time()
        with self._lock:
            told = list(self._names.values())
        return [ClientStatus(name, "shm", max(0.0, now - since)) for name, since in told]

    def attach(self, lock_name: str, name: str = "") -> int:
        """Take a client in that holds the lock on ``clients/<lock_name>``, and calls itself ``name``. Returns its
        number.

        No two attached clients' numbers are the same modulo ``MOST_CLIENTS``.

        Raises:
            InvalidRequestError: there is no such file, or nobody holds it locked.
            LimitExceededError: too many clients are attached.
            UnavailableError: the arena was given up.
        """
        path = self._directory / lock_name
        fd = _open(path) if _LOCK_NAME.fullmatch(lock_name) else None
        if fd is None or not is_locked(fd):
            if fd is not None:
                os.close(fd)
            raise InvalidRequestError(f"lock file {lock_name!r}: not a locked file in the arena's clients folder")
        try:
            return self._take_in(path, fd, shown_name(name))
        except BaseException:
            os.close(fd)
            raise

    def _take_in(self, path: Path, fd: int, name: str) -> int:
        with self._lock:
            if self._closed:
                raise UnavailableError("the node is stopping")
            if len(self._files) >= MOST_CLIENTS:
                raise LimitExceededError(f"{len(self._files)} clients are attached, the limit is {MOST_CLIENTS}")
            taken = {each % MOST_CLIENTS for each in self._files}
            number = self._last % _LAST_NUMBER + 1
            while number % MOST_CLIENTS in taken:
                number = number % _LAST_NUMBER + 1
            self._last = number
            try:
                path.rename(self._directory / str(number))
            except FileNotFoundError as error:  # its client gave up in this moment
                raise InvalidRequestError(f"lock file {path.name!r} is gone") from error
            except OSError as error:  # a folder has this number's name; another attempt gets the next number
                raise UnavailableError(f"lock file {path.name!r} can't be taken in: {error.strerror}") from error
            self._files[number] = fd
            self._names[number] = name, time.time()
            if name:
                _write_name(self._directory, number, name)
            return number

    def dead(self) -> list[int]:
        """The attached clients that have died or detached."""
        with self._lock:
            return [number for number, fd in self._files.items() if not is_locked(fd)]

    def has_left(self, number: int) -> bool:
        """Whether a client whose lock is gone said before that it had stopped writing: it detached, and did not
        die. Of an earlier node's clients those are known that left behind it."""
        with self._lock:
            fd = self._files.get(number)
            return os.fstat(fd).st_size > 0 if fd is not None else number in self._left_earlier

    def forget(self, number: int) -> None:
        """A dead client has nothing in the arena any more."""
        with self._lock:
            fd = self._files.pop(number, None)
            self._names.pop(number, None)
            if fd is not None and not self._closed:
                remove_lock_file(self._directory / str(number))
                remove_lock_file(self._directory / f"{number}{_NAMED}")
        if fd is not None:
            os.close(fd)

    def remove_abandoned(self) -> None:
        """Delete lock files whose clients died before they were taken in."""
        now = time.time()
        for path in self._directory.glob("new-*"):
            fd = None
            try:
                fd = _open(path)
                # Young ones are left alone: their clients have yet to lock them.
                if (fd is None or not is_locked(fd)) and now - path.lstat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
            except OSError:  # gone, or a folder, of which the next start tells
                pass
            finally:
                if fd is not None:
                    os.close(fd)

    def close(self) -> None:
        """Touch the folder no more: it may be another node's from now on."""
        with self._lock:
            self._closed = True
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()
            self._names.clear()

    def forked(self) -> None:
        """In a child: a look at a lock that the fork cut short must not keep that for ever."""
        self._lock = threading.Lock()
        self._closed = True
        files, self._files = self._files, {}
        self._names = {}
        for fd in files.values():
            with contextlib.suppress(OSError):  # closed in the parent just before
                os.close(fd)


def is_locked(fd: int) -> bool:
    """Whether some process holds a file locked; in doubt it does: what a live client may write is not free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def remove_lock_file(path: Path) -> None:
    """Delete what lies in the clients' folder. What can't be deleted stays: members of the group may put folders there,
    and a node must start all the same."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s is not a client's lock file, and can't be removed: %s", path, error.strerror)


def _open(path: Path) -> int | None:
    """A descriptor of a lock file; None: it is none, or nobody's any more. Other failures are raised: a client may live
    behind them."""
    try:
        # Anything may lie there that a member of the group can make: a pipe must not be waited at.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in _NO_LOCK_FILE:
            return None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _is_locked_at(path: Path) -> bool:
    fd = _open(path)
    if fd is None:
        return False
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def _write_name(directory: Path, number: int, name: str) -> None:
    path = directory / f"{number}{_NAMED}"
    with contextlib.suppress(OSError):  # the next node does not know it then
        path.unlink(missing_ok=True)
        # Members of the group may put links there: what is written to is a file that was made here.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, name.encode())
        finally:
            os.close(fd)


def _read_name(directory: Path, number: int) -> tuple[str, float]:
    """A client's name, and since when it is attached. Any member of the group may have written it."""
    try:
        fd = _open(directory / f"{number}{_NAMED}")
        if fd is not None:
            try:
                return shown_name(os.read(fd, 4 * MOST_NAME).decode(errors="replace")), os.fstat(fd).st_mtime
            finally:
                os.close(fd)
    except OSError:
        pass
    return "", time.time()
