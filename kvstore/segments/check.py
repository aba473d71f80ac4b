"""The check of a log that no node has open: every record is verified, and damage repaired if asked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import ConfigError, ResourceError
from kvstore.host.process_lock import ProcessLock
from kvstore.segments import aligned, record
from kvstore.segments.batching import plan_reads
from kvstore.segments.blockfile import BlockFile
from kvstore.segments.folder import list_segments, out_of_reach
from kvstore.segments.log import LOCK_NAME
from kvstore.segments.recovery import RecoveredSegment, header_is_sound, recover
from kvstore.segments.segment import Segment

Progress = Callable[[int, int], None]
"""Called with bytes that are verified, and bytes in all."""


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """One segment file."""

    name: str
    bytes: int
    pages: int
    """Records of pages, the superseded ones included."""
    damaged_pages: int
    """Of them, those whose bytes their checksum refuses, or that the system refuses to read."""
    cut_bytes: int
    """What stands behind the last whole chunk: a torn tail, or a damaged footer."""
    header_damaged: bool
    unreadable: bool
    """Nothing in it can be trusted."""
    repaired: bool = False

    @property
    def damaged(self) -> bool:
        """Whether anything is wrong with it."""
        return bool(self.damaged_pages or self.cut_bytes or self.header_damaged or self.unreadable)


def check_log(
    directory: Path,
    *,
    repair: bool = False,
    progress: Progress = lambda done, size: None,
    left_alone: Callable[[Collection[Path]], None] = lambda foreign: None,
) -> Iterator[SegmentReport]:
    """Verify one segment after the other, the oldest first.

    Repairing cuts torn tails, drops damaged pages from a segment's footer, writes damaged segment headers anew, and
    deletes segments in which nothing can be trusted. A page that is dropped was a miss before; whatever else is there
    stays.

    Args:
        directory: of the disk tier.
        repair: False changes nothing.
        progress: told how far it is.
        left_alone: told, once, which foreign files are named like segments; they are neither read nor changed.

    Raises:
        ConfigError: no such directory.
        InUseError: a node has it open.
        FormatError: a newer version wrote a segment; nothing was changed.
        ResourceError: the system refuses to read or to change it.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    try:
        paths, foreign = list_segments(directory)
        if not paths:
            left_alone(foreign)
            return
        lock = ProcessLock(directory / LOCK_NAME, f"{directory} is in use")
        try:
            # All of them before anything is changed: a newer version's segment refuses the whole directory.
            found = {number: recover(path, number) for number, path in paths.items()}
            left_alone([*foreign, *(paths.pop(number) for number in out_of_reach(found.values()))])
            size = sum(path.stat().st_size for path in paths.values())
            done = 0
            for number, path in paths.items():
                base = done

                def step(count: int, base: int = base) -> None:
                    progress(base + count, size)

                yield _check(path, found.pop(number), step, repair=repair)
                done = base + (path.stat().st_size if path.exists() else 0)
                progress(done, size)
        finally:
            lock.release()
    except OSError as error:
        if isinstance(error, ResourceError):
            raise
        raise ResourceError(f"{directory} can't be checked: {error}") from error


def _check(path: Path, found: RecoveredSegment, step: Callable[[int], None], *, repair: bool) -> SegmentReport:
    table = np.frombuffer(found.table, record.RECORDS)
    sound = np.ones(len(table), np.bool_)
    pages = np.flatnonzero(table["codec"] != record.TOMBSTONE)
    pages = pages[np.argsort(table["offset"][pages], kind="stable")]
    extents = list(zip(table["offset"][pages].tolist(), table["length"][pages].tolist(), strict=True))
    with BlockFile(path, os.O_RDONLY) as file:
        for run in plan_reads(extents):
            sound[pages[run.start : run.stop]] = _verify(file, [extents[at] for at in run], table[pages[list(run)]])
            step(extents[run[-1]][0])
    report = SegmentReport(
        name=path.name,
        bytes=found.size,
        pages=len(pages),
        damaged_pages=int((~sound).sum()),
        cut_bytes=0 if found.sealed or found.stamp is None else found.size - found.end,
        header_damaged=found.stamp is not None and not header_is_sound(path, found.id),
        unreadable=found.stamp is None,
    )
    if not repair or not report.damaged:
        return report
    return _repaired(path, found, table[sound].tobytes(), report)


def _verify(file: BlockFile, extents: list[tuple[int, int]], records: npt.NDArray[np.void]) -> list[bool]:
    """Which of these neighbouring payloads are what their checksums say."""
    first, (last, length) = extents[0][0], extents[-1]
    memory = aligned.take_scratch(last + record.padded(length) - first)
    try:
        read = file.read([memory], first)
    except OSError:
        if len(extents) == 1:
            return [False]
        return [_verify(file, [extent], records[at : at + 1])[0] for at, extent in enumerate(extents)]
    sums = records["checksum"].tolist()
    return [
        at - first + size <= read and xxhash.xxh3_64_intdigest(memory[at - first : at - first + size].data) == checksum
        for (at, size), checksum in zip(extents, sums, strict=True)
    ]


def _repaired(path: Path, found: RecoveredSegment, table: bytes, report: SegmentReport) -> SegmentReport:
    if found.stamp is None:
        path.unlink()
        return dataclasses.replace(report, repaired=True)
    segment = Segment.recovered(
        path, RecoveredSegment(found.id, found.stamp, found.size, found.end, sealed=False, table=table), direct=False
    )
    if report.header_damaged and not (np.frombuffer(found.table, record.RECORDS)["codec"] == record.AES_GCM).any():
        # That of an encrypted one says something of the key, which is not known here; it is read without its header.
        segment.write_header()
    segment.settle()
    if not segment.sealed:
        raise ResourceError(f"{path}: the system refuses to write its footer")
    segment.sync()
    return dataclasses.replace(report, repaired=True)
