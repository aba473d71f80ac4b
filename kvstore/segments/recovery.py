"""Reading a segment file that some process left behind: by its footer, or by a scan. Nothing is changed here."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import FormatError
from kvstore.segments import record
from kvstore.segments.record import BLOCK, ChunkHeader


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """What a segment file holds."""

    id: int
    stamp: bytes | None
    """None: neither the segment header nor the first chunk's is sound, and nothing in the file can be trusted."""
    size: int
    """The file's length now, in bytes."""
    end: int
    """Where the last whole chunk ends, in bytes."""
    sealed: bool
    table: bytes
    """Records in the order written, tombstones included: 88 bytes each."""
    key_check: bytes | None = None
    """What the segment header says of the key of its pages; None when they are not encrypted or it is damaged."""

    @property
    def count(self) -> int:
        """How many records there are."""
        return len(self.table) // record.RECORDS.itemsize


def recover(path: Path, segment: int) -> RecoveredSegment:
    """Find the records of a segment file, reading the footer only where that is sound.

    Raises:
        FormatError: a newer version wrote the file.
        OSError: the system refuses to read it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into payloads
        size = os.fstat(fd).st_size
        first = os.pread(fd, BLOCK, 0)
        stamp = _stamp(fd, path, segment, size, first)
        if stamp is None:
            return RecoveredSegment(segment, None, size, size, sealed=False, table=b"")
        found = _by_footer(fd, segment, stamp, size) or _by_scan(fd, segment, stamp, size)
        header = record.decode_segment_header(first)
        if header is not None and header.codec == record.AES_GCM:
            return dataclasses.replace(found, key_check=header.key_check)
        return found
    finally:
        os.close(fd)


def header_is_sound(path: Path, segment: int) -> bool:
    """Whether the file begins with the header of this segment.

    Raises:
        OSError: the system refuses to read it.
    """
    with path.open("rb") as file:
        header = record.decode_segment_header(file.read(BLOCK))
    return header is not None and header.id == segment


def _stamp(fd: int, path: Path, segment: int, size: int, first: bytes) -> bytes | None:
    """The segment's stamp by its header or, where that is damaged, by its first chunk's."""
    header = record.decode_segment_header(first)
    if header is not None and header.version > record.FORMAT_VERSION:
        raise FormatError(
            f"{path}: segment format version {header.version}; this version of kvstore reads up to"
            f" {record.FORMAT_VERSION}. Nothing was changed"
        )
    if header is not None and header.id == segment:
        return header.stamp
    chunk = _chunk_header(fd, BLOCK, size)
    return chunk.stamp if chunk is not None and chunk.segment == segment else None


def _by_footer(fd: int, segment: int, stamp: bytes, size: int) -> RecoveredSegment | None:
    if size % BLOCK or size < 2 * BLOCK:
        return None
    trailer = record.decode_trailer(os.pread(fd, BLOCK, size - BLOCK))
    if trailer is None or trailer.segment != segment or trailer.stamp != stamp:
        return None
    if trailer.footer + record.footer_bytes(trailer.records) != size:
        return None
    table = os.pread(fd, record.record_table_bytes(trailer.records), trailer.footer)
    if record.table_checksum(table) != trailer.checksum:
        return None
    return RecoveredSegment(segment, stamp, size, trailer.footer, sealed=True, table=table)


def _by_scan(fd: int, segment: int, stamp: bytes, size: int) -> RecoveredSegment:
    table = bytearray()
    sequence = -1
    offset = end = BLOCK
    while offset + BLOCK <= size:
        chunk = _chunk_header(fd, offset, size)
        if (
            chunk is not None
            and (chunk.segment, chunk.stamp) == (segment, stamp)
            and chunk.sequence > sequence
            and offset + chunk.size.bytes <= size
        ):
            table += chunk.table
            sequence = chunk.sequence
            offset = end = offset + chunk.size.bytes
        else:
            offset += BLOCK
    return RecoveredSegment(segment, stamp, size, end, sealed=False, table=bytes(table))


def _chunk_header(fd: int, offset: int, size: int) -> ChunkHeader | None:
    block = os.pread(fd, BLOCK, offset)
    length = record.announced_chunk_header_bytes(block)
    if length is None or offset + length > size:
        return None
    return record.decode_chunk_header(block if length == BLOCK else os.pread(fd, length, offset))
