"""One segment file: appended to until it is sealed, read by many threads, deleted once."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore.segments import aligned, record
from kvstore.segments.blockfile import BlockFile
from kvstore.segments.record import BLOCK, ByteArray, ChunkHeader, Record, SegmentHeader, Trailer, padded
from kvstore.segments.recovery import RecoveredSegment

_NAME = re.compile(r"([0-9a-f]{16})\.segment")


def segment_name(segment: int) -> str:
    """The file's name of a segment."""
    return f"{segment:016x}.segment"


def segment_id(name: str) -> int | None:
    """The id of the segment whose file has this name; None for any other file."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


class Entry(NamedTuple):
    """One page, or a tombstone, on its way into a segment."""

    key: bytes
    checksum: int
    payload: ByteArray | None
    """None: a tombstone."""

    @property
    def length(self) -> int:
        """Bytes of the payload."""
        return 0 if self.payload is None else len(self.payload)


class Segment:
    """A segment file. Made by :meth:`create` or :meth:`recovered`.

    Appending, sealing, syncing and deleting are for one thread at a time; reading is for all, at any time.
    """

    def __init__(self, path: Path, segment: int, stamp: bytes | None, size: int, *, direct: bool) -> None:
        self.path = path
        self.id = segment
        self.size = size
        """The file's length in bytes."""
        self.keys: list[bytes] = []
        """Of its pages, in the order written: what may have to be forgotten when the segment goes."""
        self.synced = False
        """Whether all of it would survive a loss of power."""
        self.sealed = False
        self._stamp = stamp
        self._direct = direct
        self._file: BlockFile | None = None  # open as long as it is appended to
        self._footer_due = False
        self._records: list[Record] = []  # what the footer will hold
        self._sequence = 0
        self._state = threading.Condition()
        self._readers = 0
        self._retired = False

    @classmethod
    def create(cls, directory: Path, segment: int, *, direct: bool) -> Segment:
        """An empty segment to append to.

        Raises:
            OSError: the system refuses; no file is left.
        """
        path = directory / segment_name(segment)
        stamp = os.urandom(record.STAMP_BYTES)
        made = cls(path, segment, stamp, BLOCK, direct=direct)
        file = BlockFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=direct)
        try:
            header = record.encode_segment_header(SegmentHeader(segment, stamp))
            file.write(aligned.stage_write([_bytes(header)]), 0)
        except OSError:
            file.close()
            with suppress(OSError):
                path.unlink()
            raise
        made._file = file
        made._footer_due = True
        return made

    @classmethod
    def recovered(cls, path: Path, found: RecoveredSegment, *, direct: bool) -> Segment:
        """A segment that some process left behind. It counts :attr:`footprint` bytes; :meth:`settle` may follow."""
        made = cls(path, found.id, found.stamp, padded(found.size), direct=direct)
        made.keys = [entry.key for entry in found.records if entry.codec != record.TOMBSTONE]
        made.sealed = found.sealed
        made.synced = found.stamp is None  # nothing in it that could be lost
        if not found.sealed and found.stamp is not None:
            made.size = found.end
            made._records = list(found.records)
            made._footer_due = True
        return made

    @property
    def footprint(self) -> int:
        """Bytes that count against a limit: the file's, and those of the footer that it will get."""
        return self.footprint_with([])

    def footprint_with(self, lengths: Sequence[int]) -> int:
        """The footprint after another chunk, whose payloads have these lengths."""
        if not self._footer_due:
            return self.size
        chunk = record.chunk_bytes(lengths) if lengths else 0
        return self.size + chunk + record.footer_bytes(len(self._records) + len(lengths))

    @property
    def empty(self) -> bool:
        """Whether nothing was appended to it, since it was created, that a footer would name."""
        return not self._records

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Write one chunk.

        Returns:
            Where each payload starts, in bytes from the start of the file.

        Raises:
            OSError: the system refuses. Nothing was added; the segment takes no further chunk and wants
                :meth:`seal`.
        """
        assert self._file is not None, "append to a sealed segment"
        assert self._stamp is not None
        payload_bytes = sum(padded(entry.length) for entry in entries)
        at = self.size + record.chunk_header_bytes(len(entries))
        records = []
        for entry in entries:
            codec = record.TOMBSTONE if entry.payload is None else record.RAW
            records.append(Record(entry.key, at, entry.checksum, entry.length, codec))
            at += padded(entry.length)
        header = record.encode_chunk_header(
            ChunkHeader(self.id, self._stamp, self._sequence, payload_bytes, tuple(records))
        )
        payloads = [entry.payload for entry in entries if entry.payload is not None]
        self.synced = False
        self._file.write(aligned.stage_write([_bytes(header), *payloads]), self.size)
        self.size = at
        self._sequence += 1
        self._records += records
        self.keys += [entry.key for entry in records if entry.codec != record.TOMBSTONE]
        return [entry.offset for entry in records]

    def seal(self) -> None:
        """Append the footer and close the file, after cutting what a failed append left.

        Where the system refuses, the segment stays without its footer: it is scanned when it is opened again.
        """
        assert self._file is not None, "seal a segment twice"
        assert self._stamp is not None
        table = record.encode_records(self._records)
        trailer = record.encode_trailer(
            Trailer(self.id, self._stamp, self.size, len(self._records), record.table_checksum(table))
        )
        self.synced = False
        try:
            self._file.truncate(self.size)
            self._file.write(aligned.stage_write([_bytes(table), _bytes(trailer)]), self.size)
            self.sealed = True
        except OSError:
            with suppress(OSError):
                self._file.truncate(self.size)
        finally:
            self._close_file()

    def settle(self) -> None:
        """Cut the torn tail of a recovered segment and seal it. Nothing is left to do for a sealed one."""
        if self.sealed or self._stamp is None:
            return
        try:
            self._file = BlockFile(self.path, os.O_RDWR, direct=self._direct)
        except OSError:
            self._footer_due = False
            with suppress(OSError):
                self.size = padded(self.path.stat().st_size)
            return
        self.seal()

    def sync(self) -> None:
        """Return when all of the segment would survive a loss of power.

        Raises:
            OSError: the system refuses.
        """
        if self.synced:
            return
        if self._file is not None:
            self._file.sync()
        else:
            with BlockFile(self.path, os.O_RDWR, direct=False) as file:
                file.sync()
        self.synced = True

    @contextmanager
    def reading(self) -> Iterator[BlockFile | None]:
        """The file, open, and held: it is not deleted before the block ends. None: it is gone already.

        Raises:
            OSError: the system refuses to open it.
        """
        with self._state:
            here = not self._retired
            self._readers += here
        if not here:
            yield None
            return
        try:
            with BlockFile(self.path, os.O_RDONLY, direct=self._direct) as file:
                yield file
        finally:
            with self._state:
                self._readers -= 1
                self._state.notify_all()

    def delete(self) -> None:
        """Let no new reader in, wait for those inside, delete the file: its bytes are free when this returns.

        Raises:
            OSError: the system refuses; to be tried again.
        """
        with self._state:
            self._retired = True
            self._state.wait_for(lambda: not self._readers)
        self._close_file()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let no new reader in, wait for those inside."""
        with self._state:
            self._retired = True
            self._state.wait_for(lambda: not self._readers)
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            self.size = padded(file.size())  # with what a refused footer, or a refused cut, has left
            self._footer_due = False
            self._records = []
            file.close()


def _bytes(data: bytes) -> ByteArray:
    return np.frombuffer(data, dtype=np.uint8)
