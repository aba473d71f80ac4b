"""One segment file: appended to until it is sealed, read by many threads, deleted once."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.segments import aligned, record
from kvstore.segments.blockfile import BlockFile, Patience
from kvstore.segments.cipher import TAG_BYTES, Cipher, SegmentCipher
from kvstore.segments.io_threads import LateError
from kvstore.segments.record import BLOCK, ByteArray, ChunkHeader, ChunkSize, SegmentHeader, Trailer, padded
from kvstore.segments.recovery import RecoveredSegment

_NAME = re.compile(r"([0-9a-f]{16})\.segment")


def segment_name(segment: int) -> str:
    """The file's name of a segment."""
    return f"{segment:016x}.segment"


def segment_id(name: str) -> int | None:
    """The id of the segment whose file has this name; None for any other file."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


NO_CHUNK = ChunkSize(0, 0)


class Entry(NamedTuple):
    """One page, or a tombstone, on its way into a segment."""

    key: bytes
    checksum: int
    payload: ByteArray | None
    """None: a tombstone."""

    @property
    def length(self) -> int:
        """Bytes of the payload, not encrypted."""
        return 0 if self.payload is None else len(self.payload)


class Segment:
    """A segment file. Made by :meth:`create` or :meth:`recovered`.

    Appending, sealing, syncing and deleting are for one thread at a time; reading is for all, at any time.
    """

    def __init__(
        self, path: Path, segment: int, stamp: bytes | None, size: int, *, direct: bool, patience: Patience | None
    ) -> None:
        self.path = path
        self.id = segment
        self.size = size
        """The file's length in bytes."""
        self.cipher: SegmentCipher | None = None
        """What its pages are encrypted with, if they are."""
        self.encrypted = False
        """Whether they are: all of them, or none."""
        self.unread = False
        """Whether the system refused to read it when it was opened: it may hold anything."""
        self.synced = False
        """Whether all of it would survive a loss of power."""
        self.doubtful = False
        """Whether a sync of it was refused: nobody knows what of it reached the disk, and no later sync says so."""
        self.sealed = False
        self._stamp = stamp
        self._direct = direct
        self._patience = patience
        self._file: BlockFile | None = None  # open as long as it is appended to
        self._footer_due = False
        self._table = bytearray()  # what the footer will hold
        self._tombstone_keys = bytearray()  # the keys of its tombstones
        self._sequence = 0
        self._state = threading.Condition()
        self._readers = 0
        self._retired = False

    @classmethod
    def create(
        cls,
        directory: Path,
        segment: int,
        *,
        direct: bool,
        patience: Patience | None = None,
        cipher: Cipher | None = None,
    ) -> Segment:
        """An empty segment to append to; its pages are encrypted if there is a cipher.

        Raises:
            OSError: the system refuses; no file is left. Or it is late, and may leave a file all the same.
        """
        path = directory / segment_name(segment)
        stamp = os.urandom(record.STAMP_BYTES)
        made = cls(path, segment, stamp, BLOCK, direct=direct, patience=patience)
        file = BlockFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=direct, patience=patience)
        try:
            header = SegmentHeader(segment, stamp)
            if cipher is not None:
                header = SegmentHeader(segment, stamp, 2, record.AES_GCM, cipher.check_value(segment, stamp))
            _write_staged(file, [_bytes(record.encode_segment_header(header))], 0)
        except OSError:
            file.close()
            with suppress(OSError):
                made._unlink()
            raise
        made._file = file
        made._footer_due = True
        made.cipher = cipher.for_segment(segment, stamp) if cipher is not None else None
        made.encrypted = cipher is not None
        return made

    @classmethod
    def recovered(
        cls,
        path: Path,
        found: RecoveredSegment,
        *,
        direct: bool,
        patience: Patience | None = None,
        cipher: Cipher | None = None,
    ) -> Segment:
        """A segment that some process left behind. It counts :attr:`footprint` bytes; :meth:`settle` may follow."""
        made = cls(path, found.id, found.stamp, padded(found.size), direct=direct, patience=patience)
        made.cipher = cipher.for_segment(found.id, found.stamp) if cipher is not None and found.stamp else None
        made.sealed = found.sealed
        made.synced = found.stamp is None  # nothing in it that could be lost
        if not found.sealed and found.stamp is not None:
            made.size = found.end
            made._table = bytearray(found.table)
            made._footer_due = True
        return made

    @property
    def footprint(self) -> int:
        """Bytes that count against a limit: the file's, and those of the footer that it will get."""
        return self.footprint_with(NO_CHUNK)

    def footprint_with(self, chunk: ChunkSize) -> int:
        """The footprint after another chunk."""
        if not self._footer_due:
            return self.size
        growth = chunk.bytes if chunk.records else 0
        return self.size + growth + record.footer_bytes(self._count + chunk.records)

    @property
    def tombstones(self) -> list[bytes]:
        """The keys that its tombstones hide."""
        size = record.KEY_BYTES
        return [bytes(self._tombstone_keys[at : at + size]) for at in range(0, len(self._tombstone_keys), size)]

    def add_tombstones(self, keys: Sequence[bytes]) -> None:
        """It holds tombstones of these keys."""
        self._tombstone_keys += b"".join(keys)

    @property
    def empty(self) -> bool:
        """Whether nothing was appended to it, since it was created, that a footer would name."""
        return not self._table

    @property
    def stuck(self) -> bool:
        """Whether it can't leave now: a call that was late still goes on in it, or a reader who held it up does."""
        return (self._file is not None and self._file.hangs) or (self._retired and self._readers > 0)

    @property
    def _count(self) -> int:
        return len(self._table) // record.RECORDS.itemsize

    def append(self, entries: Sequence[Entry]) -> npt.NDArray[np.void]:
        """Write one chunk.

        Returns:
            The record of each entry (``record.RECORDS``).

        Raises:
            OSError: the system refuses, or is late. Nothing was added; the segment takes no further chunk and
                wants :meth:`seal`.
        """
        assert self._file is not None, "append to a sealed segment"
        assert self._stamp is not None
        at = self.size + record.chunk_header_bytes(len(entries))
        payloads, records = self._encode(entries, at)
        table = records.tobytes()
        payload_bytes = record.padded_in_all(records["length"].tolist())
        at += payload_bytes
        header = record.encode_chunk_header(ChunkHeader(self.id, self._stamp, self._sequence, payload_bytes, table))
        self.synced = False
        try:
            _write_staged(self._file, [_bytes(header), *payloads], self.size)
        except LateError:
            self.size = at  # for all that is known
            raise
        self.size = at
        self._sequence += 1
        self._table += table
        self.add_tombstones([entry.key for entry in entries if entry.payload is None])
        return records

    def _encode(self, entries: Sequence[Entry], at: int) -> tuple[list[ByteArray], npt.NDArray[np.void]]:
        """What is written of each page, and the record of each entry, from an offset on."""
        keys, checksums, written = zip(*entries, strict=True)
        payloads = [payload for payload in written if payload is not None]
        overhead = TAG_BYTES if self.cipher is not None else 0
        lengths = [0 if payload is None else len(payload) + overhead for payload in written]
        ends = at + np.cumsum([padded(length) for length in lengths])
        records = np.zeros(len(entries), record.RECORDS)
        records["key"] = np.frombuffer(b"".join(keys), f"V{record.KEY_BYTES}")
        records["offset"][0] = at
        records["offset"][1:] = ends[:-1]
        records["checksum"] = checksums
        records["length"] = lengths
        if len(payloads) < len(entries):
            records["codec"] = [record.TOMBSTONE if payload is None else record.RAW for payload in written]
        if self.cipher is not None and payloads:
            payloads = self._encrypt(self.cipher, payloads, records)
        return payloads, records

    def _encrypt(
        self, cipher: SegmentCipher, payloads: Sequence[ByteArray], records: npt.NDArray[np.void]
    ) -> list[ByteArray]:
        """The payloads as they are stored; notes checksums and codec of these in their records."""
        pages = np.flatnonzero(records["codec"] != record.TOMBSTONE)
        lengths = records["length"][pages].tolist()
        memory = aligned.take_for_encryption(record.padded_in_all(lengths))
        encrypted, at = [], 0
        for place, payload, length in zip(pages.tolist(), payloads, lengths, strict=True):
            stored = memory[at : at + length]
            at += padded(length)
            cipher.encrypt(int(records["offset"][place]), records["key"][place].tobytes(), payload, stored)
            records["checksum"][place] = xxhash.xxh3_64_intdigest(stored.data)
            encrypted.append(stored)
        records["codec"][pages] = record.AES_GCM
        return encrypted

    def seal(self) -> OSError | None:
        """Append the footer and close the file, after cutting what a failed append left.

        Returns:
            None, or why the segment stays without its footer: the system refused, or was late. It is scanned when it
            is opened again.
        """
        assert self._file is not None, "seal a segment twice"
        assert self._stamp is not None
        if self._file.lost:
            self._footer_due = False
            return None  # whoever was late before has been told
        table = bytes(self._table)
        trailer = record.encode_trailer(
            Trailer(self.id, self._stamp, self.size, self._count, record.table_checksum(table))
        )
        self.synced = False
        try:
            self._file.truncate(self.size)
            _write_staged(self._file, [_bytes(table), _bytes(trailer)], self.size)
            self.sealed = True
        except LateError as error:
            self.size += padded(len(table)) + BLOCK  # for all that is known
            self._footer_due = False
            return error
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self.size)
            return error
        finally:
            self._close_file()
        return None

    def write_header(self) -> None:
        """Write the header of a recovered segment anew.

        Raises:
            OSError: the system refuses.
        """
        assert self._stamp is not None
        with BlockFile(self.path, os.O_RDWR, direct=self._direct) as file:
            _write_staged(file, [_bytes(record.encode_segment_header(SegmentHeader(self.id, self._stamp)))], 0)

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
            OSError: the system refuses, or has refused before: what it could not write then it may have dropped, and
                would answer now that all is well. Such a segment stays :attr:`doubtful`, and its pages, which can be
                read as long as the machine is up, have to be written elsewhere.
        """
        if not self.doubtful and not self.synced:
            if self._file is not None and not self._file.lost:
                self._file.sync(self._doubt)
            else:
                with BlockFile(self.path, os.O_RDWR, direct=False, patience=self._patience) as file:
                    file.sync(self._doubt)
        if self.doubtful:  # by now: a sync that was late may have ended meanwhile
            raise OSError(errno.EIO, "the system could not write all of a segment, and may have dropped some of it")
        self.synced = True

    def _doubt(self) -> None:
        self.doubtful = True

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
            OSError: the system refuses, or a reader does not come out in time; to be tried again.
        """
        seconds = None if self._patience is None else self._patience.seconds
        with self._state:
            self._retired = True
            if not self._state.wait_for(lambda: not self._readers, seconds):
                raise LateError(seconds or 0.0)
        if self._file is not None and self._file.hangs:
            raise OSError(errno.EBUSY, "a call that was late still goes on in it")
        self._close_file()
        self._unlink()

    def close(self) -> None:
        """Let no new reader in, wait for those inside, but not for long."""
        with self._state:
            self._retired = True
            self._state.wait_for(lambda: not self._readers, None if self._patience is None else self._patience.seconds)
        self._close_file()

    def _unlink(self) -> None:
        def unlink() -> None:
            self.path.unlink(missing_ok=True)

        if self._patience is None:
            unlink()
        else:
            self._patience.run(unlink)

    def _close_file(self) -> None:
        if self._file is None or self._file.hangs:
            return
        file, self._file = self._file, None
        if not file.lost:
            self.size = padded(file.size())  # with what a refused footer, or a refused cut, has left
        self._footer_due = False
        self._table = bytearray()
        file.close()


def _write_staged(file: BlockFile, payloads: Sequence[ByteArray], offset: int) -> None:
    try:
        file.write(aligned.stage_write(payloads), offset)
    except LateError:
        aligned.give_staging_away()
        raise


def _bytes(data: bytes) -> ByteArray:
    return np.frombuffer(data, dtype=np.uint8)
