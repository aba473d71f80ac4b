"""The most that one call may ask for; both ends know these limits."""

from __future__ import annotations

MOST_LOOKUP_PAGES = 1 << 17
"""Most pages that one lookup may name, over all its namespaces."""
MOST_QUERIES = 4096
"""Most queries that it may be made of, and uses, or counts of lookups, in one report."""
MOST_LOOKED_UP = 1 << 24
"""Most pages that one count of lookups may name; of more, these are counted."""
BATCH_BYTES = 16 << 20
"""Most bytes of pages in one batch, unless it is one page."""
MOST_BATCH_PAGES = 256
LONGEST_PIN = 366 * 86400
"""Longest time, in seconds, that a pin lasts."""
LONGEST_TIMEOUT = 86400.0
"""Longest time, in seconds, that a client's call may take."""
LONGEST_LEASE = 60.0
"""Longest time, in seconds, that a reservation or a hold may last."""
