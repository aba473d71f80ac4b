"""The node's arena as a client maps it: which pages are in it, and their bytes, read without a call.

Safe on processors that keep the order of stores and of loads (``kvstore.arena.epochs.CAN_READ``). The protocol is in
docs/architecture/arena.md.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt

from kvstore.arena import format as fmt
from kvstore.arena.clients import MOST_CLIENTS
from kvstore.arena.detaching import detach
from kvstore.arena.epochs import (
    CAN_READ,
    LINE_BYTES,
    LINE_WORDS,
    READERS_BYTES,
    ReadingLine,
)
from kvstore.arena.index import FEW_KEYS, IndexReader
from kvstore.arena.summary import seed_of
from kvstore.client.paths.buffers import Rows
from kvstore.client.paths.path import OpenedNamespace
from kvstore.client.paths.shm.copies import copy_runs, slot_bytes
from kvstore.client.paths.shm.mapped_summary import Look, MappedSummary
from kvstore.client.paths.shm.mapping import map_file
from kvstore.core import choice
from kvstore.errors import NotAttachedError, ResourceError
from kvstore.hashing import HASH_BYTES
from kvstore.host.forking import register_forked
from kvstore.page_codes import UNTOLD, PageTier

Bytes = npt.NDArray[np.uint8]
_LOOKS = 3
"""Most looks for pages, where some left a lower tier meanwhile."""
_ABSENT_IS_UNTOLD = bytes.maketrans(bytes([PageTier.ABSENT]), bytes([UNTOLD]))
_LOOK_SECONDS = 0.25
"""How long an arena is taken to be the one in its folder. One that a node replaces says so itself, at once."""


def copy_bytes(target: Bytes, source: Bytes) -> None:
    """Copy a page. NumPy releases the interpreter lock meanwhile. Tests come between the copy's halves."""
    target[...] = source


class MappedArena:
    """The files in an arena's folder, mapped. Safe for threads.

    Raises:
        ResourceError: the files can't be mapped, or are no arena of this version.
    """

    def __init__(self, directory: FilePath) -> None:
        self._headers_path = str(directory / "headers")
        headers = map_file(directory / "headers", mmap.PROT_READ)
        self._inode = _inode(self._headers_path)
        self._looked_at = time.monotonic()
        superblock = fmt.Superblock.unpack(headers[: fmt.FRAME_BYTES])
        if superblock is None or len(headers) != fmt.headers_bytes(superblock.arena_bytes):
            raise ResourceError(f"{directory}: the arena can't be mapped: it is being made, or of another version")
        pages = map_file(directory / "pages", mmap.PROT_READ | mmap.PROT_WRITE)
        if len(pages) != superblock.arena_bytes:
            raise ResourceError(f"{directory}: the arena can't be mapped: it is being made")
        readers = map_file(directory / "readers", mmap.PROT_READ | mmap.PROT_WRITE)
        if len(readers) != READERS_BYTES:
            raise ResourceError(f"{directory}: the arena can't be mapped: it is being made")
        self.memory = pages
        self._mappings = {each.identity: each for each in (headers, pages, readers)}
        self._summary = MappedSummary(
            directory, memoryview(headers)[fmt.SUMMARY_OFFSET :][:8].cast("Q"), self._mappings
        )
        self.pages: Bytes = np.frombuffer(pages, np.uint8)
        self.unit_bytes = superblock.unit_bytes
        words = memoryview(headers)
        self._edition = words[fmt.EDITION_OFFSET :][:8].cast("Q")
        self._elsewhere = words[fmt.ELSEWHERE_OFFSET :][:8].cast("Q")
        self._epoch = words[fmt.EPOCH_OFFSET :][:8].cast("Q")
        self._lines = memoryview(readers)
        self._headers, self._geometry = headers, fmt.geometry(superblock.arena_bytes)
        self._index = IndexReader.of(headers, superblock.arena_bytes)
        register_forked(self)

    def forked(self) -> None:
        """In a child: what its parent's views show is not the arena, and what is written to them is nobody else's."""
        detach(self._mappings)

    def line(self, number: int) -> ReadingLine:
        """The cache line in which the client with this number announces its reads."""
        start = number % MOST_CLIENTS * LINE_BYTES
        return ReadingLine(self._lines[start : start + LINE_BYTES].cast("Q")[:LINE_WORDS], self._epoch)

    def is_replaced(self) -> bool:
        """Whether the folder has other files by now, or none: nobody looks after these any more."""
        return _inode(self._headers_path) != self._inode

    def speaks_of(self, namespace: OpenedNamespace) -> bool:
        """Whether pages of this namespace can be looked for here now. False: only the node can tell.

        Raises:
            NotAttachedError: what is known of the namespace, or the arena itself, is out of date.
        """
        edition = self._edition[0]
        if edition == namespace.edition and time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return CAN_READ and edition != 0
        self._looked_at = time.monotonic()
        if self.is_replaced():
            raise NotAttachedError("the arena was replaced: attach again")
        if self.is_stale(namespace):
            raise NotAttachedError("the node was restarted, or a namespace was dropped: open it again")
        return CAN_READ and edition != 0

    def is_stale(self, namespace: OpenedNamespace) -> bool:
        """Whether the node was restarted, or dropped a namespace, since this one was opened."""
        return self._edition[0] not in (0, namespace.edition)

    def has(self, namespace: OpenedNamespace, block_hash: bytes) -> bool:
        """Whether a page is here; of a namespace of which ``speaks_of`` was true."""
        if (core := choice.native()) is not None:
            length = namespace.layout.page_bytes
            return core.find(self._headers, self._geometry, namespace.number, length, block_hash) == b"\1"
        return self._index.find_one(namespace.number, namespace.layout.page_bytes, block_hash)[0] >= 0

    @property
    def node_answers_lookups(self) -> bool:
        """Whether the node answers lookups over the arena's socket: those that say where else pages may be do."""
        return self._elsewhere[0] & ~fmt.SOMEWHERE != 0

    def here(self, namespace: OpenedNamespace, hashes: bytes) -> bytes:
        """Which pages are in the arena: one byte a page, ``ARENA`` or ``ABSENT``.

        Args:
            namespace: of which ``speaks_of`` was true.
            hashes: joined.
        """
        number, length = namespace.number, namespace.layout.page_bytes
        if (core := choice.native()) is not None:
            return core.find(self._headers, self._geometry, number, length, hashes)
        here: bytes = (self._index.find(number, length, hashes).frames >= 0).tobytes()  # ARENA is 1, ABSENT is 0
        return here

    def find(self, namespace: OpenedNamespace, hashes: bytes) -> bytes:
        """What can be said of pages without a call: one byte a page, ``ARENA``, ``ABSENT`` (certainly nowhere), or
        ``UNTOLD``: only the node can tell. Arguments as of :meth:`here`."""
        here = b""
        for _ in range(_LOOKS):
            look = self._summary.begin()
            elsewhere = self._elsewhere[0]  # behind the beginning, or a page that gets no place in the index is missed
            if look is not None and elsewhere == fmt.IN_OWN_TIER and (core := choice.native()) is not None:
                return self._where(core, look, namespace, hashes)
            here = self.here(namespace, hashes)
            if not elsewhere or PageTier.ABSENT not in here:
                return here
            if look is None or elsewhere != fmt.IN_OWN_TIER:
                break
            maybe = look.may_have(namespace.fingerprint, _where_absent(here, hashes))
            if look.was_steady() and self._edition[0] == namespace.edition:
                return _marked(here, maybe)
        return here.translate(_ABSENT_IS_UNTOLD)

    def _where(self, core: choice.Core, look: Look, namespace: OpenedNamespace, hashes: bytes) -> bytes:
        """:meth:`find` by the native core: all looks by one call."""
        number, length, edition = namespace.number, namespace.layout.page_bytes, namespace.edition
        seed, summary = seed_of(namespace.fingerprint), look.file
        return core.where(
            self._headers, self._geometry, number, length, edition, hashes, summary, look.buckets, look.word, seed
        )

    def load(self, namespace: OpenedNamespace, hashes: bytes, into: Sequence[Bytes]) -> tuple[int, bool]:
        """Copy the leading pages that are here; announced before.

        Returns:
            How many are whole and right, and whether the next one is nowhere.
        """
        if (core := choice.native()) is None:
            good = self.read(namespace, hashes).copy(into)
        else:
            number, length = namespace.number, namespace.layout.page_bytes
            pages = into.table if isinstance(into, Rows) else into
            edition = namespace.edition
            good = core.load(self._headers, self._geometry, self.memory, number, length, edition, hashes, pages)
        return good, self.is_nowhere(namespace, hashes[good * HASH_BYTES :][:HASH_BYTES])

    def is_nowhere(self, namespace: OpenedNamespace, block_hash: bytes) -> bool:
        """Whether a page that could not be had from the arena is nowhere else: one that left it just now may be in a
        lower tier. Without a hash: False."""
        if not block_hash:
            return False
        return not self._elsewhere[0] or self.find(namespace, block_hash)[0] == PageTier.ABSENT

    def read(self, namespace: OpenedNamespace, hashes: bytes) -> MappedRead:
        """Look the leading pages up to read them; announced before."""
        edition = namespace.edition  # that of now, or nothing is what it was when it was found
        index, length = self._index, namespace.layout.page_bytes
        frames: list[int] = []
        generations: list[int] = []
        if (core := choice.native()) is not None:
            frames, generations = core.search(self._headers, self._geometry, namespace.number, length, hashes)
        elif len(hashes) <= FEW_KEYS * HASH_BYTES:
            for start in range(0, len(hashes), HASH_BYTES):
                frame, generation = index.find_one(namespace.number, length, hashes[start : start + HASH_BYTES])
                if frame < 0:
                    break
                frames.append(frame)
                generations.append(generation)
        else:
            found = index.find(namespace.number, length, hashes)
            frames, generations = found.frames.tolist(), found.generations.tolist()
            if -1 in frames:
                del frames[frames.index(-1) :]
                del generations[len(frames) :]
        last = (self.pages.size - length) // fmt.FRAME_BYTES
        if frames and max(frames) > last:  # a damaged header: no page ends behind the arena
            del frames[next(place for place, frame in enumerate(frames) if frame > last) :]
            del generations[len(frames) :]
        return MappedRead(self, frames, generations, length, edition)

    def unchanged(self, read: MappedRead) -> int:
        """How many leading pages of a read are still what they were when they were found."""
        good = 0
        generation_of = self._index.generation
        for frame, generation in zip(read.frames, read.generations, strict=True):
            if generation_of(frame) != generation:
                break
            good += 1
        # Last: with another node, the namespace's number may stand for another one.
        return good if self._edition[0] == read.edition else 0


class MappedRead:
    """Leading pages that were found, to be copied from where they are."""

    __slots__ = ("_arena", "edition", "frames", "generations", "length")

    def __init__(
        self, arena: MappedArena, frames: list[int], generations: list[int], length: int, edition: int
    ) -> None:
        self._arena = arena
        self.frames = frames
        self.generations = generations
        self.length = length
        self.edition = edition

    def views(self) -> list[Bytes]:
        """The pages where they lie."""
        pages, length = self._arena.pages, self.length
        return [pages[start : start + length] for start in (frame * fmt.FRAME_BYTES for frame in self.frames)]

    def copy(self, into: Sequence[Bytes]) -> int:
        """Copy them, without the interpreter lock. Returns how many leading copies are whole and right."""
        pages, length = self._arena.pages, self.length
        if len(self.frames) == 1:
            start = self.frames[0] * fmt.FRAME_BYTES
            copy_bytes(into[0], pages[start : start + length])
        else:
            offsets = [frame * fmt.FRAME_BYTES for frame in self.frames]
            copy_runs(pages, offsets, slot_bytes(length), into, copy_bytes, out=True)
        return self._arena.unchanged(self)


def _where_absent(here: bytes, hashes: bytes) -> bytes:
    """The hashes of those pages that are absent, joined."""
    if PageTier.ARENA not in here:
        return hashes
    rows = np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)
    absent: bytes = rows[np.frombuffer(here, np.uint8) == PageTier.ABSENT].tobytes()
    return absent


def _marked(here: bytes, maybe: npt.NDArray[np.bool_]) -> bytes:
    """``here`` with those of its absent pages marked that may be somewhere, which are named in their order."""
    if not maybe.any():
        return here
    marked = np.frombuffer(here, np.uint8).copy()
    marked[np.flatnonzero(marked == PageTier.ABSENT)[maybe]] = UNTOLD
    told: bytes = marked.tobytes()
    return told


def _inode(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 - a Path would cost as much again
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino
