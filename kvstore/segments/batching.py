"""Planning of I/O, without any: what goes into one write, what into one read, and which segments are deleted first."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.segments.record import padded, padded_in_all

CHUNK_BYTES = 16 << 20
"""Most payload in one chunk, unless a single page is larger: above it single writes get slower, not faster."""
CHUNK_RECORDS = 500
"""Most records in one chunk: with two buffers a page, a chunk still fits into one system call."""
READ_BYTES = 2 << 20
"""Most bytes in one read, unless a single page is larger. Several reads are in flight."""
READ_PAGES = 500
READ_GAP_BYTES = 64 << 10
"""What lies between two pages is read along up to here: cheaper than another read."""


def plan_chunks(lengths: Sequence[int], most_bytes: int = CHUNK_BYTES) -> list[range]:
    """Which payloads go into one chunk together: all of them, in order, in as few chunks as the bounds allow.

    Args:
        lengths: of the payloads, in bytes.
        most_bytes: padded payload that a chunk of several pages may hold.
    """
    ranges = []
    start = total = 0
    if 0 < len(lengths) <= CHUNK_RECORDS and padded_in_all(lengths) <= most_bytes:
        return [range(len(lengths))]
    for index, length in enumerate(lengths):
        size = padded(length)
        if index > start and (total + size > most_bytes or index - start == CHUNK_RECORDS):
            ranges.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(lengths):
        ranges.append(range(start, len(lengths)))
    return ranges


def plan_reads(extents: Sequence[tuple[int, int]]) -> list[range]:
    """Which payloads one read brings: runs of payloads that lie side by side, or almost.

    Args:
        extents: (offset, length) of payloads in one segment, by offset.
    """
    runs = []
    start = before = 0
    for index, (offset, length) in enumerate(extents):
        end = offset + padded(length)
        if index > start:
            gap = offset - before
            if not 0 <= gap <= READ_GAP_BYTES or end - extents[start][0] > READ_BYTES or index - start == READ_PAGES:
                runs.append(range(start, index))
                start = index
        before = end
    if start < len(extents):
        runs.append(range(start, len(extents)))
    return runs


def order_of_eviction(footprints: Sequence[int], live: Sequence[int], recent: Sequence[int]) -> list[int]:
    """In which order segments are deleted: first those of which the smallest part is in recent use.

    Among equals, those that hold the fewest pages at all, then the oldest. Equal means to a sixteenth: a page more or
    less must not outweigh age.

    Args:
        footprints: bytes that each segment holds, the oldest first.
        live: of these, bytes of pages that are still found.
        recent: of these, bytes of pages in recent use.

    Returns:
        Their numbers.
    """

    def share(part: int, index: int) -> int:
        return part * 16 // max(1, footprints[index])

    return sorted(range(len(footprints)), key=lambda i: (share(recent[i], i), share(live[i], i), i))


def leading_within(lengths: Sequence[int], most_bytes: int) -> int:
    """How many of these payloads, from the first on, fit into so many bytes when each is padded."""
    for index, length in enumerate(lengths):
        most_bytes -= padded(length)
        if most_bytes < 0:
            return index
    return len(lengths)
