"""Removal of arenas: an embedded store's when it is closed, and what a killed one left whose folder is gone.

A node's arena stays, so that its pages outlive it. An embedded store is done with its own when it is closed: what is to
outlive it is on disk. One that is killed leaves it to the next opening of its folder. So its arena says which folder
that is: where that is gone there will be no next one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvstore.arena.clients import is_locked, remove_lock_file
from kvstore.errors import InUseError
from kvstore.host.process_lock import ProcessLock

LOCK_NAME = "node.lock"
FOLDER_NAME = "folder"
"""Where an embedded store's arena says whose it is: the path of the store's folder, and a newline."""
MEMORY_NAMES = ("pages", "headers", "readers")
SUMMARIES = "summary-*"
"""Which files are summaries of lower tiers: one at a time, but for moments."""
_OTHER_NAMES = ("namespaces.json", "namespaces.new", "pins", "pins.new", FOLDER_NAME)


def remove_memory(directory: Path) -> None:
    """Delete an arena's files, and its clients': these attach again, to other ones."""
    for name in (*MEMORY_NAMES, "namespaces.json"):
        (directory / name).unlink(missing_ok=True)
    remove_summaries(directory)
    with suppress(FileNotFoundError):
        for path in (directory / "clients").iterdir():
            remove_lock_file(path)


def remove_summaries(directory: Path, but: str = "") -> None:
    """Delete the summaries of lower tiers, but for the one of this name. Who maps one keeps what it says until then."""
    for path in directory.glob(SUMMARIES):
        if path.name != but:
            path.unlink(missing_ok=True)


def remove(directory: Path, lock: ProcessLock) -> None:
    """Delete an arena with its folder, where nothing else lies in that, and give up the lock on it."""
    with suppress(OSError):  # who may not delete them leaves them to the next opening
        remove_memory(directory)
        for name in _OTHER_NAMES:
            (directory / name).unlink(missing_ok=True)
    with suppress(OSError):
        (directory / "clients").rmdir()
    lock.remove()
    with suppress(OSError):  # somebody else's file, or the next owner's lock
        directory.rmdir()


def note_folder(directory: Path, folder: Path) -> None:
    """Write down whose arena this is. Not where the folder was never made: then it can't be gone."""
    with suppress(OSError):
        if not is_gone(folder):
            (directory / FOLDER_NAME).write_bytes(os.fsencode(folder.absolute()) + b"\n")


def forget_folder(directory: Path) -> None:
    """From now on the arena stays, whoever made it."""
    (directory / FOLDER_NAME).unlink(missing_ok=True)


def is_gone(folder: Path) -> bool:
    """Whether there is certainly no such folder."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # whatever hides it
        return False
    return False


def remove_orphans(above: Path) -> None:
    """Delete the arenas in this folder of this user's that embedded stores left, which do not live, and whose folders
    are gone."""
    for directory in _arenas(above):
        if not _is_orphan(directory):
            continue
        try:
            lock = ProcessLock(directory / LOCK_NAME, f"{directory} is in use")
        except (InUseError, OSError):
            continue
        if _is_orphan(directory):
            remove(directory, lock)
        else:
            lock.release()


def unused(above: Path) -> list[tuple[Path, int]]:
    """The arenas in this folder that no living process owns, and the bytes of shared memory that each takes."""
    found = []
    for directory in _arenas(above):
        with suppress(OSError):
            fd = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not is_locked(fd):
                    files = [*(directory / name for name in MEMORY_NAMES), *directory.glob(SUMMARIES)]
                    taken = sum(path.stat().st_blocks * 512 for path in files)
                    found.append((directory, taken))
            finally:
                os.close(fd)
    return found


def _arenas(above: Path) -> Iterator[Path]:
    """Folders of this user's alone: nobody else can have put anything there."""
    with suppress(OSError):
        if _is_own(above):
            yield from (path for path in sorted(above.iterdir()) if _is_own(path))


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _is_orphan(directory: Path) -> bool:
    try:
        text = (directory / FOLDER_NAME).read_bytes()
    except OSError:
        return False
    return text.startswith(b"/") and text.endswith(b"\n") and is_gone(Path(os.fsdecode(text[:-1])))
