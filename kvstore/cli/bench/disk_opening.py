"""Measures how long the disk tier takes to open, and how much memory its index takes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from kvstore.errors import ResourceError
from kvstore.segments import record
from kvstore.segments.aligned import aligned_empty
from kvstore.segments.record import BLOCK, SegmentHeader, Trailer
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.tier import FINGERPRINT_BYTES, KEY_BYTES, PageWrite

_BATCH_BYTES = 16 << 20
_SEGMENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Opening:
    """How long a log takes to open, its files not in the page cache."""

    bytes: int
    """Payload that the seconds are for."""
    written_bytes: int
    """Payload that was really written; where it is less, the seconds are extrapolated."""
    page_bytes: int
    segments: int
    closed_seconds: float
    """After it was closed: every segment has its footer."""
    killed_seconds: float
    """As a killed process leaves it: the newest segment is scanned."""


@dataclass(frozen=True, slots=True)
class IndexMemory:
    """What the index of an open tier takes."""

    pages: int
    memory_bytes_a_page: float
    """How much larger the process is, by page."""
    seconds: float
    """To open it."""


def measure_opening(folder: Path, size: int, written: int, page_bytes: int) -> Opening:
    """Write pages through a tier, and open what lies there twice: as after a kill, and as after a close.

    Args:
        folder: that is not there yet.
        size: bytes of payload to tell the seconds of.
        written: bytes of payload to write; ``size``, or less where that does not fit.
        page_bytes: size of a page.

    Raises:
        ResourceError: the tier did not take or did not find a page.
        OSError: the system refuses.
    """
    written -= written % _BATCH_BYTES
    folder.mkdir(mode=0o700)
    limit = 2 * written + (1 << 30)
    payload = aligned_empty(page_bytes)
    payload[:] = 7
    checksum, fingerprint = xxhash.xxh3_64_intdigest(payload.data), os.urandom(FINGERPRINT_BYTES)
    tier = DiskTier(folder / "log", limit)
    for _ in range(0, written, _BATCH_BYTES):
        hashes = [os.urandom(KEY_BYTES - FINGERPRINT_BYTES) for _ in range(_BATCH_BYTES // page_bytes)]
        if not all(tier.write([PageWrite(fingerprint + each, checksum, payload) for each in hashes])):
            raise ResourceError(f"{folder}: not every page was taken: {tier.statistics()}")
    # The same files under other names: what the process would leave if it were killed now.
    killed = folder / "killed"
    killed.mkdir(mode=0o700)
    for path in (folder / "log").glob("*.segment"):
        os.link(path, killed / path.name)
    pages = written // page_bytes
    killed_seconds = _open(killed, limit, pages)
    shutil.rmtree(killed)
    tier.close()
    segments = len(list((folder / "log").glob("*.segment")))
    closed_seconds = _open(folder / "log", limit, pages)
    shutil.rmtree(folder)
    scale = size / written
    return Opening(size, written, page_bytes, segments, closed_seconds * scale, killed_seconds * scale)


def measure_index(folder: Path, pages: int, page_bytes: int) -> IndexMemory:
    """Open a log of so many pages whose payloads are holes: only what opening reads is really there.

    Raises:
        ResourceError: the tier did not find a page.
        OSError: the system refuses.
    """
    limit = 2 * pages * record.padded(page_bytes) + (1 << 30)
    make_log(folder, 1, page_bytes)
    _open(folder, limit, 1)  # what is loaded and allocated once does not count
    shutil.rmtree(folder)
    make_log(folder, pages, page_bytes)
    before = _resident()
    start = time.perf_counter()
    tier = DiskTier(folder, limit)
    seconds = time.perf_counter() - start
    memory = _resident() - before
    found = tier.statistics().pages
    tier.close()
    shutil.rmtree(folder)
    if found != pages:
        raise ResourceError(f"{folder}: {pages} pages were written, {found} are found")
    return IndexMemory(pages, memory / pages, seconds)


def make_log(folder: Path, pages: int, page_bytes: int) -> None:
    """A log of sealed segments that hold so many pages of one namespace by their footers, and holes for payloads."""
    folder.mkdir(mode=0o700)
    fingerprint = np.frombuffer(os.urandom(FINGERPRINT_BYTES), np.uint8)
    each = _SEGMENT_BYTES // record.padded(page_bytes)
    for number in range(1, -(-pages // each) + 1):
        count = min(each, pages - (number - 1) * each)
        stamp = os.urandom(record.STAMP_BYTES)
        keys = np.frombuffer(bytearray(os.urandom(KEY_BYTES * count)), np.uint8).reshape(count, KEY_BYTES)
        keys[:, :FINGERPRINT_BYTES] = fingerprint
        table = np.zeros(count, record.RECORDS)
        table["key"] = np.frombuffer(keys.tobytes(), f"V{KEY_BYTES}")
        table["offset"] = 2 * BLOCK + np.arange(count, dtype=np.uint64) * record.padded(page_bytes)
        table["length"] = page_bytes
        footer = 2 * BLOCK + count * record.padded(page_bytes)
        data = table.tobytes()
        trailer = Trailer(number, stamp, footer, count, record.table_checksum(data))
        with (folder / f"{number:016x}.segment").open("wb") as file:
            file.write(record.encode_segment_header(SegmentHeader(number, stamp)))
            file.seek(footer)
            file.write(data.ljust(record.padded(len(data)), b"\0") + record.encode_trailer(trailer))


def _open(folder: Path, limit: int, pages: int) -> float:
    """Seconds to open a log of so many pages that no cache holds."""
    for path in folder.glob("*.segment"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet can't leave the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    tier = DiskTier(folder, limit)
    seconds = time.perf_counter() - start
    found = tier.statistics().pages
    tier.close()
    if found != pages:
        raise ResourceError(f"{folder}: {pages} pages were written, {found} are found")
    return seconds


def _resident() -> int:
    """Bytes of memory that the process holds and uses."""
    gc.collect()
    with suppress(AttributeError):  # other libraries than glibc don't keep so much
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again, unseen
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
