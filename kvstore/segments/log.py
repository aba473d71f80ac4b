"""The segment log: where appends go, how much space is used and free, and what is found again at opening."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, ResourceError
from kvstore.host.process_lock import ProcessLock
from kvstore.segments import record
from kvstore.segments.batching import CHUNK_BYTES
from kvstore.segments.blockfile import SYNC_DEADLINES, Patience
from kvstore.segments.cipher import TAG_BYTES, Cipher, check_key
from kvstore.segments.folder import LAST_ID, list_segments, make_folder, out_of_reach, warn_of_foreign_files
from kvstore.segments.io_threads import LateError
from kvstore.segments.record import BLOCK, ChunkSize
from kvstore.segments.recovery import RecoveredSegment, recover
from kvstore.segments.segment import NO_CHUNK, Entry, Segment, segment_name
from kvstore.segments.write_budget import FILE_BYTES, WriteBudget

LOCK_NAME = "lock"
LOCK_BYTES = 4096
"""What the lock's file counts against the limit: the one block that holds the process's id."""
MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENT_BYTES = 512 << 10
MIN_LIMIT_BYTES = 2 * MIN_SEGMENT_BYTES
_SEGMENTS_IN_LIMIT = 8  # so that the one which is deleted is a small part of the whole
_HEADROOM_SHARE = 4  # this part of a segment is kept free for carrying over, once there are enough segments
_GROW_AGAIN_SECONDS = 60.0
_CHUNK_OVERHEAD = 128 << 10  # more than all headers and footers of a segment with one full chunk


def default_segment_bytes(limit_bytes: int) -> int:
    """The size of segments in a log of this limit: 256 MiB, or an eighth of the limit, but at least 512 KiB."""
    return max(MIN_SEGMENT_BYTES, min(MAX_SEGMENT_BYTES, limit_bytes // _SEGMENTS_IN_LIMIT))


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What opening a log found."""

    segments: int = 0
    scanned: int = 0
    """Of the segments: those without a sound footer, whose chunk headers were read one by one."""
    unreadable: int = 0
    """Of the segments: those that hold nothing that could be trusted, or that the system refused to read."""
    cut_bytes: int = 0
    """Torn tails and damaged footers."""
    records: int = 0


class SegmentLog:
    """The segments of one directory. One thread at a time, but for reading segments, which any thread may.

    Args:
        directory: made (0700) when it is not there.
        limit_bytes: most bytes that all files together hold, at every moment; at least 1 MiB.
        segment_bytes: how long a segment gets before the next one starts (a page larger than that has a segment
            of its own); between 512 KiB and ``limit_bytes``.
        direct: whether to use O_DIRECT where the file system has it.
        patience: for every call that may hang, but for those at opening.
        clock: seconds that only grow.
        on_late: told of a deadline that passed without anything being refused for it.
        write_limit_bytes: most bytes a day that :attr:`budget` grants; 0: no limit.
        now: seconds since 1970.
        cipher: encrypts the pages of new segments, and decrypts those of old ones.

    Raises:
        ConfigError: a size is out of its range; or segments are encrypted with another key, or with one and there
            is none. Nothing was changed.
        InUseError: another process holds the directory.
        ResourceError: the directory can't be used.
        FormatError: a newer version wrote a segment; nothing was changed.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        segment_bytes: int | None = None,
        direct: bool = True,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_late: Callable[[OSError], None] = lambda error: None,
        write_limit_bytes: int = 0,
        now: Callable[[], float] = time.time,
        cipher: Cipher | None = None,
    ) -> None:
        if limit_bytes < MIN_LIMIT_BYTES:
            raise ConfigError(f"disk limit is {limit_bytes} bytes, the least is {MIN_LIMIT_BYTES}")
        if segment_bytes is None:
            segment_bytes = default_segment_bytes(limit_bytes)
        if not MIN_SEGMENT_BYTES <= segment_bytes <= limit_bytes:
            raise ConfigError(
                f"segments of {segment_bytes} bytes: they must be between {MIN_SEGMENT_BYTES} bytes and the disk"
                f" limit, {limit_bytes}"
            )
        self.limit_bytes = limit_bytes
        self._small_files_bytes = LOCK_BYTES
        self.other_files_bytes = 0
        """What other files in the directory take of the limit."""
        # So that the segment being written never has to be deleted.
        self.segment_bytes = min(segment_bytes, limit_bytes - LOCK_BYTES - FILE_BYTES)
        self.chunk_bytes = min(CHUNK_BYTES, self.segment_bytes - _CHUNK_OVERHEAD)
        """Most padded payload that one append of several pages may hold."""
        self._usable_bytes = limit_bytes  # less where the file system turned out to be smaller
        self._grow_again_at = 0.0
        self._directory = directory
        self._direct = direct
        self._patience = patience
        self._clock = clock
        self._on_late = on_late
        self._cipher = cipher
        self.overhead_bytes = TAG_BYTES if cipher is not None else 0
        """How much longer a page is in new segments."""
        self._directory_synced = False
        self._active: Segment | None = None
        self.segments: list[Segment] = []
        """The oldest first."""
        self.by_id: dict[int, Segment] = {}
        self._older_bytes = 0  # footprints of all segments but the one being written, counted when these change
        try:
            make_folder(directory)
            self._lock = ProcessLock(directory / LOCK_NAME, f"{directory} is in use")
            try:
                self.budget = WriteBudget(directory, write_limit_bytes, patience, now)
                """Bytes that may be written today."""
                self._small_files_bytes += self.budget.file_bytes
                self._recovered, self._next_id = self._recover()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise ResourceError.of_place(directory, error) from error

    def _recover(self) -> tuple[list[tuple[Segment, RecoveredSegment]], int]:
        listed = list_segments(self._directory)
        read: dict[int, RecoveredSegment] = {}
        unread: set[int] = set()
        for number, path in listed.segments.items():
            try:
                read[number] = recover(path, number)
                check_key(path, read[number], self._cipher)
            except OSError:
                read[number] = RecoveredSegment(number, None, path.lstat().st_size, 0, sealed=False, table=b"")
                unread.add(number)
        foreign = [*listed.foreign, *(listed.segments.pop(number) for number in out_of_reach(read.values()))]
        warn_of_foreign_files(self._directory, foreign)
        recovered = []
        for number, path in listed.segments.items():
            found = read[number]
            made = Segment.recovered(path, found, direct=self._direct, patience=self._patience, cipher=self._cipher)
            made.unread = number in unread
            recovered.append((made, found))
        self.segments = [segment for segment, _ in recovered]
        self.by_id = {segment.id: segment for segment in self.segments}
        self._count_older()
        return recovered, listed.last_id + 1

    def check_limit(self, limit_bytes: int) -> None:
        """Check that :meth:`set_limit` would take that; safe for threads.

        Raises:
            ConfigError: there would be space for less than two segments.
        """
        least = max(MIN_LIMIT_BYTES, 2 * self.segment_bytes)
        if limit_bytes < least:
            raise ConfigError(
                f"disk limit is {limit_bytes} bytes; while the tier is open the least is {least}, two of its segments"
                " (a restart makes them shorter)"
            )

    def set_limit(self, limit_bytes: int) -> None:
        """Another limit from now on; the caller then deletes what is too much. Segments keep their length.

        Raises:
            ConfigError: there would be space for less than two segments; nothing was changed.
        """
        self.check_limit(limit_bytes)
        self.limit_bytes = self._usable_bytes = limit_bytes

    def set_write_limit(self, limit_bytes: int) -> None:
        """Another limit on the bytes written a day; 0: none."""
        self.budget.limit_bytes = limit_bytes
        self._small_files_bytes = LOCK_BYTES + self.budget.file_bytes

    def replay(self) -> Iterator[tuple[Segment, npt.NDArray[np.void]]]:
        """The records found at opening (``record.RECORDS``), segment by segment: the last one of a key counts."""
        for segment, found in self._recovered:
            yield segment, np.frombuffer(found.table, record.RECORDS)

    def settle(self) -> RecoveryReport:
        """Cut torn tails and seal what was left unsealed. To be called once, when the log is within its limit."""
        report = RecoveryReport(
            segments=len(self._recovered),
            scanned=sum(not found.sealed and found.stamp is not None for _, found in self._recovered),
            unreadable=sum(found.stamp is None for _, found in self._recovered),
            cut_bytes=sum(
                found.size - found.end for _, found in self._recovered if not found.sealed and found.stamp is not None
            ),
            records=sum(found.count for _, found in self._recovered),
        )
        self._recovered = []
        for segment in self.segments:
            segment.settle()
        self._count_older()
        return report

    @property
    def headroom_bytes(self) -> int:
        """What is kept free, where it can be, so that pages can be carried over before their segment is deleted."""
        return self.segment_bytes // _HEADROOM_SHARE if 4 * self.segment_bytes <= self.limit_bytes else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, with the footer that the segment being written will get."""
        return (
            self._small_files_bytes
            + self.other_files_bytes
            + self._older_bytes
            + (self._active.footprint if self._active is not None else 0)
        )

    def fits(self, length: int) -> bool:
        """Whether a payload of this length could be stored if nothing else were."""
        length += self.overhead_bytes
        others = self._small_files_bytes + self.other_files_bytes + _fresh_footprint(ChunkSize(1, 0))
        return length <= record.MAX_PAYLOAD_BYTES and record.padded(length) <= self.limit_bytes - others

    def stored_lengths(self, entries: Sequence[Entry]) -> list[int]:
        """How long the payloads of entries will be on disk."""
        overhead = self.overhead_bytes
        return [0 if payload is None else len(payload) + overhead for _, _, payload in entries]

    def chunk_size(self, entries: Sequence[Entry]) -> ChunkSize:
        """How large a chunk of these entries is."""
        return ChunkSize.of(self.stored_lengths(entries))

    def missing(self, chunk: ChunkSize = NO_CHUNK, headroom_bytes: int = 0) -> int:
        """How many bytes too few are free for an append of this size that leaves a reserve."""
        if not chunk.records:
            growth = 0
        elif self._active is not None and self._takes(self._active, chunk):
            growth = self._active.footprint_with(chunk) - self._active.footprint
        else:
            growth = _fresh_footprint(chunk)
        return self.used_bytes + growth + headroom_bytes - self._usable()

    def evictable(self, chunk: ChunkSize) -> list[Segment]:
        """The segments that may be deleted to free space for such an append, the oldest first.

        Not in: the one that the append would go to, and those in which calls still hang.
        """
        takes = self._active is not None and self._takes(self._active, chunk)
        return [segment for segment in self.segments if not segment.stuck and not (takes and segment is self._active)]

    def is_active(self, segment: Segment) -> bool:
        """Whether the segment is being written."""
        return segment is self._active

    def delete(self, segment: Segment) -> None:
        """Delete a segment. Waits for those who are reading it.

        Raises:
            OSError: the system refuses, or is late; the segment stays and counts, but nobody reads it any more.
        """
        if segment is self._active:
            self._active = None
        try:
            segment.delete()
        finally:
            self._count_older()
        self.segments.remove(segment)
        del self.by_id[segment.id]
        self._directory_synced = False  # a file that comes back after a loss of power has what was removed since
        self._count_older()

    def file_system_is_full(self) -> None:
        """The file system is full below the limit: for a while, what is used now counts as the limit."""
        self._usable_bytes = self.used_bytes
        self._grow_again_at = self._clock() + _GROW_AGAIN_SECONDS

    def try_to_grow(self) -> bool:
        """Use the whole limit again. False: that was so already."""
        was_less = self._usable_bytes < self.limit_bytes
        self._usable_bytes = self.limit_bytes
        return was_less

    def _usable(self) -> int:
        if self._clock() >= self._grow_again_at:
            self._usable_bytes = self.limit_bytes
        return self._usable_bytes

    def append(self, entries: Sequence[Entry]) -> tuple[Segment, npt.NDArray[np.void]]:
        """Write one chunk, for which there is space.

        Returns:
            The segment, and the record of each entry (``record.RECORDS``).

        Raises:
            OSError: the system refuses, or is late. Nothing was added; the next append starts a new segment.
        """
        if self._active is not None and not self._takes(self._active, self.chunk_size(entries)):
            self._seal_active()
        if self._active is None:
            self._directory_synced = False
            self._active = self._create()
            self.segments.append(self._active)
            self.by_id[self._active.id] = self._active
        active = self._active
        try:
            return active, active.append(entries)
        except OSError:
            # The device may refuse this very place for good: what was written stays, the rest goes elsewhere.
            self._seal_active()
            raise

    def _create(self) -> Segment:
        while self._next_id <= LAST_ID:
            number = self._next_id
            self._next_id += 1  # also when this fails: a call that was late may still make the file
            try:
                return Segment.create(
                    self._directory, number, direct=self._direct, patience=self._patience, cipher=self._cipher
                )
            except FileExistsError:  # put there since the folder was opened: the next number may be free
                warn_of_foreign_files(self._directory, [self._directory / segment_name(number)])
        raise OSError(
            errno.EOVERFLOW, f"{self._directory}: no number is left for a segment behind {segment_name(LAST_ID)}"
        )

    def flush(self) -> None:
        """Return when everything appended so far would survive a loss of power.

        Raises:
            OSError: the system refuses, or has refused to sync a segment that is still there.
        """
        for segment in self.segments:
            segment.sync()
        if not self._directory_synced:
            if self._patience is None:
                self._sync_directory()
            else:
                threads, seconds = self._patience
                threads.run(self._sync_directory, seconds * SYNC_DEADLINES)
            self._directory_synced = True

    def _sync_directory(self) -> None:
        # Asked again after a refusal: file systems with a journal refuse everything once that could not be written.
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def seal(self) -> None:
        """Give the segment being written its footer: the next append starts a new one."""
        if self._active is not None:
            self._seal_active()

    def close(self) -> None:
        """Wait for readers, close all files, let the directory go. Seal and flush come before."""
        for segment in self.segments:
            segment.close()
        self.budget.close()
        self._lock.release()

    def _takes(self, active: Segment, chunk: ChunkSize) -> bool:
        return active.empty or active.footprint_with(chunk) <= self.segment_bytes

    def _seal_active(self) -> None:
        assert self._active is not None
        active, self._active = self._active, None
        if active.empty:
            with suppress(OSError):  # else the file stays, counts, and leaves later
                active.delete()
                self.segments.remove(active)
                del self.by_id[active.id]
        else:
            error = active.seal()
            if isinstance(error, LateError):  # a refusal to seal follows one that was told
                self._on_late(error)
        self._count_older()

    def _count_older(self) -> None:
        self._older_bytes = sum(segment.footprint for segment in self.segments if segment is not self._active)


def write_cost(chunk: ChunkSize) -> int:
    """Bytes that an append of this size writes at most, its part of headers and footer included."""
    return _fresh_footprint(chunk) + BLOCK


def _fresh_footprint(chunk: ChunkSize) -> int:
    """What a new segment with this one chunk counts."""
    return BLOCK + chunk.bytes + record.footer_bytes(chunk.records)
