"""How a namespace's quota is divided over buckets. Decides; does no I/O.

A bucket enforces its part of a quota in the same script that enforces its budget. So that each part holds some chunks
of full size, a small quota is divided over fewer buckets than there are: the namespace's chunks go to those alone.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

from kvstore.tiers.redis.format.chunk import CHUNK_BYTES, PAGE_OVERHEAD, allocated

QUOTA_CHUNKS = 4
"""As many chunks of full size fit into every bucket's part of a quota, unless the quota itself is smaller."""
FULL_CHUNK = allocated(CHUNK_BYTES + 4096)
"""What the allocator takes for a chunk of full size, at most."""


class Share(NamedTuple):
    """Where a namespace's chunks may lie, and how much of them in each place."""

    first: int
    spread: int
    """So many buckets from the first on, round the end."""
    buckets: int
    limit_bytes: int
    """Most bytes in each of them; 0: no quota."""

    def bucket_of(self, key: bytes) -> int:
        """The bucket of a new chunk whose first page has this key."""
        return (self.first + xxhash.xxh3_64_intdigest(key) % self.spread) % self.buckets

    def limit_in(self, bucket: int) -> int | None:
        """Most bytes in a bucket; None where there is no quota."""
        if not self.limit_bytes:
            return None
        return self.limit_bytes if (bucket - self.first) % self.buckets < self.spread else 0

    def pages_at_once(self, length: int) -> int | None:
        """Most pages of this length in one chunk: a quota of few chunks gets smaller ones. None: as many as usual."""
        if not self.limit_bytes or self.limit_bytes >= QUOTA_CHUNKS * FULL_CHUNK:
            return None
        return max(1, self.limit_bytes // (QUOTA_CHUNKS * (length + PAGE_OVERHEAD)))


def share_of(namespace: bytes, quota: int, buckets: int) -> Share:
    """How a namespace's quota (bytes; 0: none) is divided over so many buckets."""
    if not quota:
        return Share(0, buckets, buckets, 0)
    spread = max(1, min(buckets, quota // (QUOTA_CHUNKS * FULL_CHUNK)))
    return Share(xxhash.xxh3_64_intdigest(namespace) % buckets, spread, buckets, quota // spread)
