"""When short chunks of one row are put together. Decides; does no I/O.

A *row* is the pages between two multiples of ``pages_per_chunk`` in a chain: what is one chunk if it is stored at once.
A prompt that grows turn by turn stores a row piece by piece. The piece that fills the row to its end is the occasion to
write the row anew as one chunk: a reader then has one value to fetch for it.
"""

from __future__ import annotations

from kvstore.tiers.redis.format.chunk import ChunkHeader, pages_per_chunk
from kvstore.tiers.redis.format.entry import PageEntry

MOST_TAILS = 8
"""Most pieces before the last that are put together."""


def fills_a_row(header: ChunkHeader) -> bool:
    """Whether this chunk ends where its row ends, but begins within it."""
    row = pages_per_chunk(header.lengths[0])
    return header.position % row != 0 and (header.position + len(header.hashes)) % row == 0


def is_tail(header: ChunkHeader, entry: PageEntry, following: ChunkHeader) -> bool:
    """Whether a chunk is the piece right before another one of the same row, with nobody else behind it.

    Args:
        header: the chunk's.
        entry: of the page before ``following``'s first, which led to this chunk.
        following: the header of the piece behind.
    """
    return (
        header.nonce == entry.nonce
        and header.namespace == following.namespace
        and set(header.lengths) == {following.lengths[0]}
        and header.position + len(header.hashes) == following.position  # else another prompt goes on there
    )


def begins_a_row(header: ChunkHeader) -> bool:
    """Whether there is nothing to be put before this chunk."""
    return header.position % pages_per_chunk(header.lengths[0]) == 0 or not header.parent
