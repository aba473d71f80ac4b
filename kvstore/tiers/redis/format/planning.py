"""Which new pages go into one chunk. Decides; does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.hashing import HASH_BYTES
from kvstore.tiers.redis.format.chunk import MOST_POSITION, pages_per_chunk


class NewPage(NamedTuple):
    """A page that has to be stored."""

    key: bytes
    length: int
    position: int
    """Which page of its chain it is."""


def positions(keys: Sequence[bytes], parents: Sequence[bytes], known: Mapping[bytes, int]) -> list[int]:
    """Which page of its chain each page is.

    Args:
        keys: in the order in which they were given to the tier.
        parents: the key of the page before each in its chain; empty where nobody says.
        known: the positions of pages that are in Redis already.

    A page whose parent is not said or not known is taken to follow the one given before it, if that is of its
    namespace: pages of a prefix come side by side. Else it begins a chain, as far as chunks are concerned.
    """
    found = dict(known)
    answers = []
    before: tuple[bytes, int] | None = None
    for key, parent in zip(keys, parents, strict=True):
        if parent and parent in found:
            position = found[parent] + 1
        elif not parent and before is not None and before[0][:-HASH_BYTES] == key[:-HASH_BYTES]:
            position = before[1] + 1
        else:
            position = 0
        position %= MOST_POSITION  # what is known may be damaged
        found[key] = position
        before = (key, position)
        answers.append(position)
    return answers


def plan_chunks(pages: Sequence[NewPage]) -> list[range]:
    """Cut pages into chunks: runs of neighbours of one namespace and length.

    A chunk never goes over a multiple of :func:`pages_per_chunk` in the chain, so that everybody cuts the same chain at
    the same places, whatever part of it is new to them.
    """
    chunks: list[range] = []
    start = 0
    for at in range(1, len(pages) + 1):
        if at < len(pages):
            before, page = pages[at - 1], pages[at]
            if (
                page.position == before.position + 1
                and page.position % pages_per_chunk(page.length)
                and page.length == before.length
                and page.key[:-HASH_BYTES] == before.key[:-HASH_BYTES]
            ):
                continue
        chunks.append(range(start, at))
        start = at
    return chunks


def cut_smaller(chunk: range, most_pages: int | None) -> list[range]:
    """A chunk in pieces of so many pages; None: whole."""
    step = most_pages or len(chunk)
    return [chunk[at : at + step] for at in range(0, len(chunk), step)]
