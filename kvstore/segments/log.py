"""Many segments: where appends go, which segments leave to make room, and what is found again at opening."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError, ResourceError
from kvstore.process_lock import ProcessLock
from kvstore.segments import record
from kvstore.segments.plan import CHUNK_BYTES, oldest_to_drop
from kvstore.segments.record import BLOCK, Record
from kvstore.segments.recovery import RecoveredSegment, recover
from kvstore.segments.segment import Entry, Segment, segment_id, segment_name

_LOCK_NAME = "lock"
LOCK_BYTES = 4096
"""What the lock's file counts against the limit: the one block that holds the process's id."""
MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENT_BYTES = 512 << 10
MIN_LIMIT_BYTES = 2 * MIN_SEGMENT_BYTES
_SEGMENTS_IN_LIMIT = 8  # so that the one which leaves is a small part of the whole
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

    Raises:
        ConfigError: a size is out of its range.
        InUseError: another process holds the directory.
        ResourceError: the directory can't be used.
        FormatError: a newer version wrote a segment; nothing was changed.
    """

    def __init__(
        self, directory: Path, limit_bytes: int, *, segment_bytes: int | None = None, direct: bool = True
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
        self.segment_bytes = min(segment_bytes, limit_bytes - LOCK_BYTES)  # the one being written never has to leave
        self.chunk_bytes = min(CHUNK_BYTES, self.segment_bytes - _CHUNK_OVERHEAD)
        """Most padded payload that one append of several pages may hold."""
        self._directory = directory
        self._direct = direct
        self._directory_synced = False
        self._active: Segment | None = None
        self.segments: list[Segment] = []
        """The oldest first."""
        self._older_bytes = 0  # footprints of all segments but the one being written, counted when these change
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = ProcessLock(directory / _LOCK_NAME, f"{directory} is in use")
            try:
                self._recovered, self._next_id = self._recover()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise ResourceError(f"the directory {directory} can't be used: {error.strerror or error}") from error

    def _recover(self) -> tuple[list[tuple[Segment, RecoveredSegment]], int]:
        ids = sorted(i for i in (segment_id(path.name) for path in self._directory.iterdir()) if i is not None)
        recovered = []
        for segment in ids:
            path = self._directory / segment_name(segment)
            try:
                if not path.is_file() or path.is_symlink():
                    continue
                found = recover(path, segment)
            except OSError:
                found = RecoveredSegment(segment, None, path.lstat().st_size, 0, sealed=False, records=())
            recovered.append((Segment.recovered(path, found, direct=self._direct), found))
        self.segments = [segment for segment, _ in recovered]
        self._count_older()
        return recovered, max(ids, default=0) + 1

    def replay(self) -> Iterator[tuple[Segment, Record]]:
        """Every record found at opening, in the order written: the last one of a key counts."""
        for segment, found in self._recovered:
            for entry in found.records:
                yield segment, entry

    def settle(self) -> RecoveryReport:
        """Cut torn tails and seal what was left unsealed. To be called once, when the log is within its limit."""
        report = RecoveryReport(
            segments=len(self._recovered),
            scanned=sum(not found.sealed and found.stamp is not None for _, found in self._recovered),
            unreadable=sum(found.stamp is None for _, found in self._recovered),
            cut_bytes=sum(
                found.size - found.end for _, found in self._recovered if not found.sealed and found.stamp is not None
            ),
            records=sum(len(found.records) for _, found in self._recovered),
        )
        self._recovered = []
        for segment in self.segments:
            segment.settle()
        self._count_older()
        return report

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, with the footer that the segment being written will get."""
        return LOCK_BYTES + self._older_bytes + (self._active.footprint if self._active is not None else 0)

    def fits(self, length: int) -> bool:
        """Whether a payload of this length could be stored if nothing else were."""
        return length <= record.MAX_PAYLOAD_BYTES and LOCK_BYTES + _fresh_footprint([length]) <= self.limit_bytes

    def leaving_for(self, lengths: Sequence[int]) -> list[Segment]:
        """The segments to :meth:`drop` so that an append of these payload lengths stays within the limit."""
        if self._active is not None and self._takes(self._active, lengths):
            candidates = self.segments[:-1]
            growth = self._active.footprint_with(lengths) - self._active.footprint
        else:
            candidates = self.segments
            growth = _fresh_footprint(lengths) if lengths else 0
        excess = self.used_bytes + growth - self.limit_bytes
        if excess <= 0:
            return []
        return candidates[: oldest_to_drop([segment.footprint for segment in candidates], excess)]

    def drop(self, leaving: Sequence[Segment]) -> None:
        """Delete these segments, the oldest ones. Waits for those who are reading them.

        Raises:
            OSError: the system refuses; what it refused, and what is younger, stays and counts.
        """
        for segment in leaving:
            assert segment is self.segments[0], "segments leave by age"
            segment.delete()
            if segment is self._active:
                self._active = None
            del self.segments[0]
            self._count_older()

    def append(self, entries: Sequence[Entry]) -> tuple[Segment, list[int]]:
        """Write one chunk; room was made before.

        Returns:
            The segment, and where in its file each payload starts.

        Raises:
            OSError: the system refuses. Nothing was added; the next append starts a new segment.
        """
        if self._active is not None and not self._takes(self._active, [entry.length for entry in entries]):
            self._seal_active()
        if self._active is None:
            self._directory_synced = False
            self._active = Segment.create(self._directory, self._next_id, direct=self._direct)
            self._next_id += 1
            self.segments.append(self._active)
        active = self._active
        try:
            return active, active.append(entries)
        except OSError:
            # The device may refuse this very place for good: what was written stays, the rest goes elsewhere.
            self._seal_active()
            raise

    def flush(self) -> None:
        """Return when everything appended so far would survive a loss of power.

        Raises:
            OSError: the system refuses.
        """
        for segment in self.segments:
            segment.sync()
        if not self._directory_synced:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self._directory_synced = True

    def seal(self) -> None:
        """Give the segment being written its footer: the next append starts a new one."""
        if self._active is not None:
            self._seal_active()

    def close(self) -> None:
        """Wait for readers, close all files, let the directory go. Seal and flush come before."""
        for segment in self.segments:
            segment.close()
        self._lock.release()

    def _takes(self, active: Segment, lengths: Sequence[int]) -> bool:
        return active.empty or active.footprint_with(lengths) <= self.segment_bytes

    def _seal_active(self) -> None:
        assert self._active is not None
        active, self._active = self._active, None
        if active.empty:
            with suppress(OSError):  # else the file stays, counts, and leaves by age
                active.delete()
                self.segments.pop()
        else:
            active.seal()
        self._count_older()

    def _count_older(self) -> None:
        self._older_bytes = sum(segment.footprint for segment in self.segments if segment is not self._active)


def _fresh_footprint(lengths: Sequence[int]) -> int:
    """What a new segment with one chunk of these payload lengths counts."""
    return BLOCK + record.chunk_bytes(lengths) + record.footer_bytes(len(lengths))
