"""What the Redis tier's parts share: topology, buckets, entries, counters, timeout."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvstore.tiers.counters import TierCounts
from kvstore.tiers.redis.buckets import Buckets
from kvstore.tiers.redis.entries import Entries
from kvstore.tiers.redis.net.topology import Topology


@dataclass(frozen=True, slots=True)
class Context:
    """Each part has its own state, which nobody else keeps, and is safe for threads."""

    topology: Topology
    buckets: Buckets
    entries: Entries
    counts: TierCounts
    timeout: float
    """Seconds for each step of a call; a lookup has its own deadline."""

    def deadline(self) -> float:
        """The end of a step that begins now, on the clock of ``time.monotonic``."""
        return time.monotonic() + self.timeout
