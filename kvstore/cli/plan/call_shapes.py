"""The shape of a call of a node: how many pages, in how many chunks, buckets and hash slots. Pure.

How prefixes are cut is decided by the tier's own plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from redis.crc import key_slot

from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import pages_per_chunk
from kvstore.tiers.redis.format.planning import NewPage, plan_chunks
from kvstore.tiers.redis.net.server import BATCH_PAGES
from kvstore.tiers.redis.quotas import share_of

_NAMESPACE = bytes(key_names.NAMESPACE_BYTES)


class Shape(NamedTuple):
    """How many of what a call is about."""

    pages: int
    page_bytes: int
    chunks: tuple[int, ...]
    """Pages of each chunk."""
    buckets: int
    """Different ones of these chunks."""
    groups: int
    """Commands that ask for all entries: one in a thousand on a single server, one for each slot in a Cluster."""
    alone: int
    """Of these, those that ask for one entry."""

    @property
    def payload_bytes(self) -> int:
        """Of its pages."""
        return self.pages * self.page_bytes


def shape_of(keys: Sequence[bytes], page_bytes: int, buckets: int, *, cluster: bool) -> Shape:
    """The shape of a call for a whole prefix that is stored in one go, in a tier of so many buckets.

    Args:
        keys: of the pages, head first, 64 bytes each.
        page_bytes: of each.
        buckets: in Redis.
        cluster: whether it is one.
    """
    cut = plan_chunks([NewPage(key, page_bytes, place) for place, key in enumerate(keys)])
    share = share_of(_NAMESPACE, 0, buckets)
    different = {share.bucket_of(keys[chunk.start]) for chunk in cut}
    groups = _groups(keys) if cluster else [min(BATCH_PAGES, len(keys) - at) for at in range(0, len(keys), BATCH_PAGES)]
    return Shape(len(keys), page_bytes, tuple(map(len, cut)), len(different), len(groups), groups.count(1))


@lru_cache(1 << 14)
def typical_shape(pages: int, page_bytes: int, buckets: int, *, cluster: bool) -> Shape:
    """The shape to be expected of so many pages of a new prefix, wherever hashes put them."""
    length = pages_per_chunk(page_bytes)
    chunks = tuple(min(length, pages - at) for at in range(0, pages, length))
    different = _expected(len(chunks), buckets)
    if not cluster:
        return Shape(pages, page_bytes, chunks, different, batches_of(pages), int(pages == 1))
    slots = sum(_expected(min(BATCH_PAGES, pages - at), 1 << 14) for at in range(0, pages, BATCH_PAGES))
    return Shape(pages, page_bytes, chunks, different, slots, max(0, 2 * slots - pages))


def batches_of(pages: int) -> int:
    """How many times a node asks for so many entries, one behind the other."""
    return -(-pages // BATCH_PAGES)


def _groups(keys: Sequence[bytes]) -> list[int]:
    """How many keys each command names in a Cluster, with as many keys at once as the tier asks for."""
    runs = [keys[at : at + BATCH_PAGES] for at in range(0, len(keys), BATCH_PAGES)]
    slots = [Counter(key_slot(key_names.page_name(key)) for key in run) for run in runs]
    return [named for each in slots for named in each.values()]


def _expected(items: int, places: int) -> int:
    """How many of some places are taken, to be expected, where so many items fall on any of them."""
    return round(places * -math.expm1(items * math.log1p(-1 / places))) if places > 1 else min(1, items)
