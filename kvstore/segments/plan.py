"""The log's decisions, without I/O: what goes into one write, what into one read, and what leaves."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.segments.record import padded

CHUNK_BYTES = 16 << 20
"""Most payload in one chunk, unless a single page is larger: above it single writes get slower, not faster."""
CHUNK_RECORDS = 500
"""Most records in one chunk: with two buffers a page, a chunk still fits into one system call."""
READ_BYTES = 8 << 20
"""Most bytes in one read, unless a single page is larger."""
READ_PAGES = 500


def plan_chunks(lengths: Sequence[int], most_bytes: int = CHUNK_BYTES) -> list[range]:
    """Which payloads go into one chunk together: all of them, in order, in as few chunks as the bounds allow.

    Args:
        lengths: of the payloads, in bytes.
        most_bytes: padded payload that a chunk of several pages may hold.
    """
    return _cut([padded(length) for length in lengths], [False] * len(lengths), most_bytes, CHUNK_RECORDS)


def plan_reads(extents: Sequence[tuple[int, int]]) -> list[range]:
    """Which payloads one read brings: runs in which each payload starts where the one before it ends.

    Args:
        extents: (offset, length) of payloads in one segment, by offset.
    """
    ends = [offset + padded(length) for offset, length in extents]
    apart = [index > 0 and extents[index][0] != ends[index - 1] for index in range(len(extents))]
    return _cut([padded(length) for _, length in extents], apart, READ_BYTES, READ_PAGES)


def oldest_to_drop(footprints: Sequence[int], excess: int) -> int:
    """How many segments leave so that ``excess`` bytes come back: the oldest ones, first in, first out.

    Only a number can be answered: tombstones rest on it that segments leave strictly by age (see the package).

    Args:
        footprints: bytes that each segment holds, the oldest first.
        excess: bytes over the limit; 0 and less: nothing leaves.
    """
    count = 0
    while excess > 0 and count < len(footprints):
        excess -= footprints[count]
        count += 1
    return count


def _cut(sizes: Sequence[int], apart: Sequence[bool], most_bytes: int, most: int) -> list[range]:
    """Consecutive ranges of at most so many bytes and items, cut also before each item that is ``apart``."""
    ranges = []
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and (apart[index] or total + size > most_bytes or index - start == most):
            ranges.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(sizes):
        ranges.append(range(start, len(sizes)))
    return ranges
