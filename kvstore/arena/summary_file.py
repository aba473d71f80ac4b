"""The files of summaries in an arena's folder, on the node's side: made, named in the superblock, and deleted.

A file is never resized, and never trusted by the next node: another size, or another node, makes a new one. It is named
when it is complete. Clients compare the name with that of the file that they have mapped: while there is none, or
another, they ask the node.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

from kvstore.arena.removal import remove_summaries
from kvstore.arena.summary import VERSION, SummaryHeader, SummaryWriter, summary_bytes
from kvstore.errors import ResourceError
from kvstore.host.shared_memory import check_space
from kvstore.security.socket_group import SocketGroup
from kvstore.units import format_size


def summary_name(number: int) -> str:
    """The name of the file with this number, in the arena's folder."""
    return f"summary-{number:014x}"


def word_of(number: int) -> int:
    """What the superblock says where this file counts."""
    return number << 8 | VERSION


def number_of(word: int) -> int:
    """The number of the file that counts; 0: there is none, or it is of another version."""
    return word >> 8 if word & 0xFF == VERSION else 0


class SummaryFile:
    """One file, mapped to be written. Its memory goes with the last mapping of it."""

    def __init__(self, number: int, buckets: int, mapping: mmap.mmap) -> None:
        self.number = number
        self.buckets = buckets
        buffer = memoryview(mapping)
        packed = SummaryHeader(buckets, number).pack()
        buffer[: len(packed)] = packed
        self.writer = SummaryWriter(buffer, buckets)


class Summaries:
    """The files of one arena. Not safe for threads.

    Args:
        directory: the arena's folder; what an earlier node left in it is deleted, and counts no more.
        word: of the superblock.
        group: who may read them besides this user.
        maps: told of what is mapped, by device and inode: a forked child lets go of it.
    """

    def __init__(
        self, directory: Path, word: memoryview, group: SocketGroup, maps: dict[tuple[int, int], mmap.mmap]
    ) -> None:
        self._directory = directory
        self._word = word
        self._group = group
        self._maps = maps
        self._mapped: tuple[int, int] | None = None
        word[0] = 0
        remove_summaries(directory)

    def make(self, buckets: int) -> SummaryFile:
        """A new file, with nothing in it; from now on none counts, and those before it are gone.

        Raises:
            ResourceError: the memory is not there.
        """
        self.withdraw()
        size = summary_bytes(buckets)
        check_space(self._directory, size)
        number = secrets.randbits(55) or 1
        path = self._directory / summary_name(number)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)  # or a later write would be a SIGBUS
                status = os.fstat(fd)
                mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(fd)
            self._group.set_modes(path, 0o600, 0o640)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ResourceError(f"{path}: can't allocate {format_size(size)}: {error.strerror or error}") from error
        self._mapped = status.st_dev, status.st_ino
        self._maps[self._mapped] = mapping
        return SummaryFile(number, buckets, mapping)

    def name(self, file: SummaryFile) -> None:
        """This file is complete: clients rely on it from now on."""
        self._word[0] = word_of(file.number)

    def withdraw(self) -> None:
        """No file counts any more; it is deleted."""
        self._word[0] = 0
        remove_summaries(self._directory)
        if self._mapped is not None:
            self._maps.pop(self._mapped, None)
            self._mapped = None
