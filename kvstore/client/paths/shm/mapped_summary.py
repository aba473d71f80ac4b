"""The summary of the node's own lower tiers, as a client maps it: which pages that the arena lacks are nowhere."""

from __future__ import annotations

import mmap
from pathlib import Path as FilePath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.arena.summary import SummaryHeader, SummaryReader, seed_of, summary_bytes
from kvstore.arena.summary_file import number_of, summary_name
from kvstore.client.paths.shm.mapping import Mapping, map_file
from kvstore.errors import ResourceError


class Look(NamedTuple):
    """A look at the summary, begun before the arena is asked. What :meth:`may_have` says holds if :meth:`was_steady`
    is true behind it."""

    reader: SummaryReader
    file: memoryview
    buckets: int
    withdrawals: int
    word: int
    superblock: memoryview
    """The word that names the file."""

    def may_have(self, fingerprint: bytes, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Which pages of a namespace, whose joined hashes these are, may be in a lower tier: False is certain."""
        return self.reader.may_have(seed_of(fingerprint), hashes)

    def was_steady(self) -> bool:
        """Whether nothing was withdrawn since it began, and the file is the one that counts."""
        return self.reader.withdrawals == self.withdrawals and self.superblock[0] == self.word


class MappedSummary:
    """The summary in an arena's folder, mapped anew when the superblock names another file. Safe for threads.

    Args:
        directory: the arena's folder.
        word: of the superblock, which names the file.
        mappings: told of what is mapped, by device and inode: a forked child lets go of it.
    """

    def __init__(self, directory: FilePath, word: memoryview, mappings: dict[tuple[int, int], Mapping]) -> None:
        self._directory = directory
        self._word = word
        self._mappings = mappings
        self._mapped: tuple[int, tuple[memoryview, SummaryReader] | None] = 0, None
        """What the superblock said, and what was mapped for it; None: it can't be."""
        self._identity: tuple[int, int] | None = None

    def begin(self) -> Look | None:
        """Begin a look; the arena is asked behind this. None: there is no summary, or not yet, so only the node can
        tell."""
        word = self._word[0]
        if not word:
            return None
        mapped = self._mapped
        if mapped[0] != word:
            self._mapped = mapped = word, self._map(word)
        if mapped[1] is None:
            return None
        file, reader = mapped[1]
        return Look(reader, file, reader.buckets, reader.withdrawals, word, self._word)

    def _map(self, word: int) -> tuple[memoryview, SummaryReader] | None:
        number = number_of(word)
        if not number:  # of a newer version
            return None
        try:
            mapping = map_file(self._directory / summary_name(number), mmap.PROT_READ)
        except ResourceError:  # it is gone already: the next look finds another one named
            return None
        header = SummaryHeader.unpack(mapping[:64])
        if header is None or header.number != number or not header.buckets:
            return None
        if len(mapping) != summary_bytes(header.buckets):
            return None
        if self._identity is not None:
            self._mappings.pop(self._identity, None)
        self._identity = mapping.identity
        self._mappings[mapping.identity] = mapping
        file = memoryview(mapping)
        return file, SummaryReader(file, header.buckets)
