"""What both ends of a call agree on: the byte that stands for a page, and the most that one call may ask."""

from __future__ import annotations

ABSENT, ARENA, DISK, REDIS = 0, 1, 2, 3
"""What a lookup says of a page: the fastest tier that has it."""
TIER_NAMES = (None, "arena", "disk", "redis")
"""What people call these."""
RESERVED, PRESENT, REFUSED = 0, 1, 2
"""What ``prepare_store`` says of a page."""

HERE, UNKNOWN, EVICTED = 0, 1, 2
"""What ``explain`` says of a page: it is here; nothing is remembered of it; it left the arena to make room."""

MOST_LOOKUP_PAGES = 1 << 17
"""Most pages that one lookup may name, over all its namespaces."""
MOST_QUERIES = 4096
"""Most queries that it may be made of, and uses in one report."""
BATCH_BYTES = 16 << 20
MOST_BATCH_PAGES = 256
LONGEST_TICKET = 60.0
"""Longest time, in seconds, that a reservation or a hold may last."""
