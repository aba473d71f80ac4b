"""What the object tier decides, as pure functions: packs, ranges, which packs leave, who adopts. No I/O, no clocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.tiers.objects.pack import pack_bytes

LARGEST_PACK, SMALLEST_PACK = 64 << 20, 16 << 20
MOST_GAP = 1 << 20
"""Bytes between two pages that are read along: they cost less than a request."""
MOST_RANGE = 8 << 20
"""Bytes that one request reads, unless it is one page: larger reads go in parallel."""
RANK_SECONDS = 60.0
CROWDED_SILENCES = 3
_FOLDED_AT = 16
_LEVEL_BYTES = 4096
_LEVEL_FACTOR = 8


def pack_bytes_for(limit_bytes: int) -> int:
    """How large a pack becomes: a 64th of the limit, 16 to 64 MiB; less where the limit is small."""
    return min(max(limit_bytes // 64, SMALLEST_PACK), LARGEST_PACK, limit_bytes // 8)


def plan_packs(lengths: Sequence[int], most_bytes: int, overhead: int) -> list[range]:
    """Which pages go into one pack: neighbours, as many as fit, at least one."""
    packs, start = [], 0
    size = 0
    for at, length in enumerate(lengths):
        cost = pack_bytes([length], overhead)  # too much by the headers that packs share: no pack is larger than asked
        if at > start and size + cost > most_bytes:
            packs.append(range(start, at))
            start, size = at, 0
        size += cost
    if start < len(lengths):
        packs.append(range(start, len(lengths)))
    return packs


def in_chains(keys: Sequence[bytes], parents: Sequence[bytes]) -> list[int]:
    """An order in which pages of one chain stand side by side, head first; chains in the order of their heads."""
    places = {key: at for at, key in enumerate(keys)}
    children: dict[int, list[int]] = {}
    heads = []
    for at, parent in enumerate(parents):
        before = places.get(parent)
        if before is None or before == at:
            heads.append(at)
        else:
            children.setdefault(before, []).append(at)
    order: list[int] = []
    waiting = heads[::-1]
    while waiting:
        at = waiting.pop()
        order.append(at)
        waiting += children.get(at, ())[::-1]
    if len(order) < len(keys):  # pages that are each other's parents
        seen = set(order)
        order += [at for at in range(len(keys)) if at not in seen]
    return order


class Extent(NamedTuple):
    """Where a page lies in its pack."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.offset + self.length


def plan_ranges(extents: Sequence[Extent]) -> list[range]:
    """Which pages of a pack one request reads.

    Args:
        extents: of the pages, by offset.

    Returns:
        Runs of their places; gaps up to ``MOST_GAP`` are read along.
    """
    runs, start = [], 0
    for at in range(1, len(extents)):
        gap = extents[at].offset - extents[at - 1].end
        if gap > MOST_GAP or extents[at].end - extents[start].offset > MOST_RANGE:
            runs.append(range(start, at))
            start = at
    if extents:
        runs.append(range(start, len(extents)))
    return runs


class PackUse(NamedTuple):
    """What counts for whether a pack of this writer's leaves."""

    id: int
    size: int
    live_bytes: int
    """Of pages that are still found in it."""
    recent_bytes: int
    """Of those that were read, or written, while the last half of the limit was."""
    used_at: float
    """When a page of it was read last, or it was made."""


def order_of_leaving(packs: Iterable[PackUse]) -> list[int]:
    """The ids of packs, the first to leave first: those without pages, then those of which the smallest part is in
    recent use, and of these those that nobody has read for longest."""

    def rank(each: PackUse) -> tuple[bool, float, float, int]:
        return each.live_bytes > 0, each.recent_bytes / each.size, each.used_at, each.id

    return [each.id for each in sorted(packs, key=rank)]


def own_share(limit_bytes: int, prefix_limit: int, others_bytes: int, writers: int) -> int:
    """How many bytes a writer may take now.

    Args:
        limit_bytes: the writer's own.
        prefix_limit: of all writers together, as far as one knows; 0: none.
        others_bytes: of the others' packs.
        writers: how many there are, this one included.
    """
    if not prefix_limit:
        return limit_bytes
    return min(limit_bytes, max(prefix_limit - others_bytes, prefix_limit // max(1, writers)))


def adoption_delay(
    dead: bytes, me: bytes, living: Iterable[bytes], silence: float, *, closed: bool, room: bool
) -> float:
    """How many seconds a writer has to be seen silent until ``me`` takes over what it left.

    Every node finds the same order of all writers for each that is dead, so that mostly one of them does. Who has no
    room for it waits for longer, since it would have to drop packs. Two that do it at once cost requests alone.

    Args:
        dead: the writer.
        me: who asks.
        living: the other writers.
        silence: seconds without a heartbeat, behind which a writer counts as dead.
        closed: whether it has ended by itself.
        room: whether ``me`` has room for all of it.
    """
    mine = _draw(dead, me)
    rank = sum(_draw(dead, other) < mine for other in set(living) - {dead, me})
    return (0.0 if closed else silence) + rank * RANK_SECONDS + (0.0 if room else CROWDED_SILENCES * silence)


def to_fold(sizes: Sequence[int]) -> list[int]:
    """Which index objects to write anew as one: sixteen of about one size; none: there are not so many.

    Each entry is so written anew once for each eightfold size, and there are few objects at any time.
    """
    levels: dict[int, list[int]] = {}
    for at, size in enumerate(sizes):
        level, most = 0, _LEVEL_BYTES
        while size > most:
            level, most = level + 1, most * _LEVEL_FACTOR
        levels.setdefault(level, []).append(at)
    for _, places in sorted(levels.items()):
        if len(places) >= _FOLDED_AT:
            return places
    return []


def _draw(dead: bytes, writer: bytes) -> bytes:
    return hashlib.sha256(dead + writer).digest()
