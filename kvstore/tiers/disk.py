"""Pages in a segment log on disk: an index in memory over :mod:`kvstore.segments`."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvstore.errors import InvalidRequestError, ResourceError
from kvstore.segments import record
from kvstore.segments.aligned import ReadStaging, aligned_empty
from kvstore.segments.blockfile import BlockFile
from kvstore.segments.log import SegmentLog
from kvstore.segments.plan import plan_chunks, plan_reads
from kvstore.segments.segment import Entry, Segment
from kvstore.tiers.tier import KEY_BYTES, PageBytes, PageWrite, TierStatistics

_log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """Where a page's payload lies."""

    segment: Segment
    offset: int
    length: int
    checksum: int


class _Outcome(enum.Enum):
    """What became of one page's read."""

    FOUND = enum.auto()
    GONE = enum.auto()  # its segment made room for others
    CORRUPT = enum.auto()
    FAILED = enum.auto()  # the system refused


@dataclass(slots=True)
class _Counts:
    """The counters of :class:`~kvstore.tiers.tier.TierStatistics`."""

    asked: int = 0
    hit: int = 0
    missed: int = 0
    corrupt: int = 0
    errors: int = 0
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What :meth:`DiskTier.check` found."""

    records: int
    """Pages that are stored."""
    damaged: int
    """Of them, those whose bytes their checksum refuses or that the system refuses to read."""
    bytes: int
    """Payload of all of them."""


class DiskTier:
    """The tier that keeps pages in a directory, over restarts and crashes.

    ``errors`` counts single system calls that failed, each of which may answer for several pages; ``refused`` counts
    pages that can't fit whatever leaves; ``read_bytes`` and ``written_bytes`` count payload, without padding.

    Pages leave by whole segments, the oldest first. A page whose bytes are found damaged is forgotten; one whose read
    the system refused stays findable, and a new write of it is taken.

    Args:
        directory: made (0700) when it is not there; of this tier alone as long as it is open.
        limit_bytes: most bytes on disk, headers and padding included, at every moment; at least 1 MiB.
        segment_bytes: length of a segment; by default 256 MiB, or an eighth of the limit.
        verify: False skips the checksums at reading: for showing what damage does, and for nothing else.
        direct: False uses the page cache even where the file system has O_DIRECT.

    Raises:
        ConfigError: a size is out of its range.
        InUseError: another process holds the directory; the message names it.
        ResourceError: the directory can't be used.
        FormatError: a newer version wrote a segment; nothing was changed.
    """

    name = "disk"

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        segment_bytes: int | None = None,
        verify: bool = True,
        direct: bool = True,
    ) -> None:
        self._verify = verify
        # Two locks. `_writing` is held by whoever changes the log, over its I/O; `_lock` guards what is below it, is
        # held for moments only, never over I/O, and is taken inside `_writing` or alone.
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._index: dict[bytes, _Place] = {}
        self._unreadable: set[bytes] = set()  # in the index, but the last read was refused: written anew if asked
        self._forgotten: set[bytes] = set()  # out of the index, but not yet by a tombstone on disk
        self._counts = _Counts()
        self._used_bytes = 0
        self._closed = False
        self._segments = SegmentLog(directory, limit_bytes, segment_bytes=segment_bytes, direct=direct)
        try:
            self._replay()
            self._make_room([])
            self.recovery = self._segments.settle()
            """What opening found (:class:`~kvstore.segments.log.RecoveryReport`)."""
        except OSError as error:
            self._segments.close()
            raise ResourceError(
                f"{directory} holds {self._segments.used_bytes} bytes, the limit is {limit_bytes}, and old segments"
                f" can't be deleted: {error.strerror or error}"
            ) from error
        self._used_bytes = self._segments.used_bytes
        if self.recovery.cut_bytes or self.recovery.unreadable:
            _log.warning("%s was not closed in order: %s", directory, self.recovery)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here. Answers from memory, without I/O."""
        with self._lock:
            return [key in self._index for key in keys]

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages here that begin with ``prefix``, a namespace's fingerprint."""
        with self._lock:
            return [key for key in self._index if key.startswith(prefix)]

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """Store pages, in the order given, side by side; makes room within the limit first.

        Returns:
            Which pages are here now and would be found after a crash of the process (one already here counts).

        Raises:
            InvalidRequestError: a key does not have 64 bytes; nothing was stored.
        """
        for page in pages:
            if len(page.key) != KEY_BYTES:
                raise InvalidRequestError(f"a page key has {len(page.key)} bytes, it must have {KEY_BYTES}")
        with self._writing:
            wanted = self._wanted(pages)
            if wanted:
                self._write_tombstones()
            for chunk in plan_chunks([entry.length for entry in wanted], self._segments.chunk_bytes):
                self._append([wanted[index] for index in chunk])
            with self._lock:
                # A chunk may have pushed out an earlier one of the same call.
                return [page.key in self._index and page.key not in self._unreadable for page in pages]

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """Read pages into the arrays given, each of its page's exact length.

        Returns:
            For each page its verified xxh3_64, or None for a miss (the array may then hold anything).
        """
        with self._lock:
            found = [self._index.get(key) for key in keys]
        asked = [
            (position, place)
            for position, (place, array) in enumerate(zip(found, into, strict=True))
            if place is not None and place.length == len(array)
        ]
        outcomes, errors = self._fetch([place for _, place in asked], [into[position] for position, _ in asked])
        answers: list[int | None] = [None] * len(keys)
        with self._lock:
            counts = self._counts
            counts.asked += len(keys)
            counts.errors += errors
            for (position, place), outcome in zip(asked, outcomes, strict=True):
                key = keys[position]
                # By now the page may have left and come back: what was learnt holds for the place that was read.
                current = self._index.get(key) == place
                if outcome is _Outcome.FOUND:
                    answers[position] = place.checksum
                    counts.hit += 1
                    counts.read_bytes += place.length
                    self._unreadable.discard(key)
                elif outcome is _Outcome.CORRUPT:
                    counts.corrupt += 1
                    if current:
                        self._forget(key)
                        self._forgotten.add(key)
                elif outcome is _Outcome.FAILED and current:
                    self._unreadable.add(key)
            counts.missed += answers.count(None)
        return answers

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, also over a restart. Returns how many were here."""
        with self._writing:
            with self._lock:
                here = {key for key in keys if key in self._index}
                for key in here:
                    self._forget(key)
                self._forgotten |= here
            self._write_tombstones()
        return len(here)

    def flush(self) -> None:
        """Return when everything written so far would be found after the machine loses power.

        Raises:
            ResourceError: the system refuses; pages stay findable as long as the machine is up.
        """
        with self._writing:
            self._write_tombstones()
            self._sync()

    def statistics(self) -> TierStatistics:
        """A frozen view of the counters."""
        with self._lock:
            return TierStatistics(
                used_bytes=self._used_bytes,
                limit_bytes=self._segments.limit_bytes,
                pages=len(self._index),
                **asdict(self._counts),
            )

    def check(self) -> CheckReport:
        """Read and verify every page that is stored, and the index against the segments. Changes and counts nothing.

        Raises:
            AssertionError: the index names what no segment holds: a defect of this program.
        """
        with self._writing, self._lock:
            places = sorted(self._index.values(), key=_by_position)
            live = {segment: set(segment.keys) for segment in self._segments.segments}
            for key, place in self._index.items():
                assert key in live[place.segment], f"{place} does not hold {key.hex()}"
                assert place.offset + record.padded(place.length) <= place.segment.size, f"{place} is past the end"
            assert self._used_bytes == self._segments.used_bytes, "used bytes are not what the segments hold"
        records = damaged = size = 0
        for batch in plan_chunks([place.length for place in places]):
            here = [places[index] for index in batch]
            outcomes, _ = self._fetch(here, [aligned_empty(place.length) for place in here])
            for place, outcome in zip(here, outcomes, strict=True):
                if outcome is not _Outcome.GONE:
                    records += 1
                    size += place.length
                    damaged += outcome is not _Outcome.FOUND
        return CheckReport(records, damaged, size)

    def close(self) -> None:
        """Flush and release. No method may be called after it."""
        with self._writing:
            if self._closed:
                return
            self._write_tombstones()
            self._segments.seal()
            try:
                self._sync()
            except ResourceError as error:
                _log.warning("closing: %s", error)
            with self._lock:
                self._index.clear()
            self._closed = True
            self._segments.close()

    def _replay(self) -> None:
        for segment, entry in self._segments.replay():
            if entry.codec == record.RAW:
                self._index[entry.key] = _Place(segment, entry.offset, entry.length, entry.checksum)
            else:
                self._index.pop(entry.key, None)

    def _wanted(self, pages: Sequence[PageWrite]) -> list[Entry]:
        """Which of the pages have to be written: each once, not those that are here, not those that can't be."""
        wanted: dict[bytes, Entry] = {}
        with self._lock:
            for page in pages:
                if page.key in wanted or (page.key in self._index and page.key not in self._unreadable):
                    continue
                if len(page.payload) and self._segments.fits(len(page.payload)):
                    wanted[page.key] = Entry(page.key, page.checksum, page.payload)
                else:
                    self._counts.refused += 1
        return list(wanted.values())

    def _write_tombstones(self) -> None:
        """Bring to disk which pages are forgotten. Those that can't be written now are tried again next time."""
        with self._lock:
            entries = [Entry(key, 0, None) for key in self._forgotten]
        for chunk in plan_chunks([0] * len(entries)):
            self._append([entries[index] for index in chunk])

    def _append(self, entries: Sequence[Entry]) -> None:
        """Make room for one chunk, write it, and index it. A failure is counted."""
        if self._closed:  # the directory may be another's by now
            return
        try:
            self._make_room([entry.length for entry in entries])
            segment, offsets = self._segments.append(entries)
        except OSError as error:
            _log.warning("%d pages not written: %s", len(entries), error)
            with self._lock:
                self._counts.errors += 1
                self._used_bytes = self._segments.used_bytes
            return
        with self._lock:
            self._used_bytes = self._segments.used_bytes
            for entry, offset in zip(entries, offsets, strict=True):
                self._forgotten.discard(entry.key)  # either by this tombstone, or because this page comes after
                if entry.payload is None:
                    continue
                self._index[entry.key] = _Place(segment, offset, entry.length, entry.checksum)
                self._unreadable.discard(entry.key)
                self._counts.stored += 1
                self._counts.written_bytes += entry.length

    def _make_room(self, lengths: Sequence[int]) -> None:
        """Let segments leave until a chunk of these payload lengths fits; their pages first.

        Raises:
            OSError: the system refuses to delete one. Its pages are forgotten all the same.
        """
        leaving = self._segments.leaving_for(lengths)
        with self._lock:
            for segment in leaving:
                for key in segment.keys:
                    place = self._index.get(key)
                    if place is not None and place.segment is segment:
                        self._forget(key)
                        self._counts.evicted += 1
        self._segments.drop(leaving)

    def _forget(self, key: bytes) -> None:
        """Take a page out of the index. The caller holds the lock."""
        del self._index[key]
        self._unreadable.discard(key)

    def _sync(self) -> None:
        try:
            self._segments.flush()
        except OSError as error:
            with self._lock:
                self._counts.errors += 1
            raise ResourceError(f"what was written may not survive a loss of power: {error}") from error

    def _fetch(self, places: Sequence[_Place], into: Sequence[PageBytes]) -> tuple[list[_Outcome], int]:
        """Read and verify pages. Returns what became of each, and how many reads the system refused."""
        outcomes = [_Outcome.GONE] * len(places)
        errors = 0
        order = sorted(range(len(places)), key=lambda index: _by_position(places[index]))
        for group in _by_segment(order, places):
            for run in plan_reads([(places[index].offset, places[index].length) for index in group]):
                indices = [group[item] for item in run]
                segment = places[indices[0]].segment
                try:
                    # Held for one read at a time, so that making room waits for no more than that.
                    with segment.reading() as file:
                        if file is None:
                            continue
                        read = _read_run(file, places[indices[0]].offset, [into[index] for index in indices])
                except OSError as error:
                    _log.warning("%d pages not read: %s", len(indices), error)
                    errors += 1
                    for index in indices:
                        outcomes[index] = _Outcome.FAILED
                    continue
                for index in indices:
                    end = places[index].offset + places[index].length - places[indices[0]].offset
                    sound = end <= read and self._is_sound(places[index], into[index])
                    outcomes[index] = _Outcome.FOUND if sound else _Outcome.CORRUPT
        return outcomes, errors

    def _is_sound(self, place: _Place, payload: PageBytes) -> bool:
        # xxhash releases the GIL for any but small buffers: threads verify side by side.
        return not self._verify or xxhash.xxh3_64_intdigest(payload.data) == place.checksum


def _read_run(file: BlockFile, offset: int, into: Sequence[PageBytes]) -> int:
    """Fill the arrays from payloads that lie side by side from ``offset`` on. Returns the bytes read, with padding."""
    staging = ReadStaging(into)
    read = file.read(staging.buffers, offset)
    staging.finish()
    return read


def _by_position(place: _Place) -> tuple[int, int]:
    return place.segment.id, place.offset


def _by_segment(order: Iterable[int], places: Sequence[_Place]) -> list[list[int]]:
    """The indices, in their order, apart by segment."""
    groups: dict[int, list[int]] = {}
    for index in order:
        groups.setdefault(places[index].segment.id, []).append(index)
    return list(groups.values())
