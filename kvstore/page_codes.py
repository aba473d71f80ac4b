"""The codes of an answer, one byte for each page: the tier that has it, what became of its slot, why it is absent.

Members are plain integers in ``bytes``: ``tiers.count(PageTier.ARENA)`` counts at full speed. A loop over pages binds
the member to a name before it: looking one up takes several times as long as comparing with it.
"""

from __future__ import annotations

from enum import IntEnum


class PageTier(IntEnum):
    """What a lookup says of a page: the fastest tier that has it."""

    ABSENT = 0
    ARENA = 1
    DISK = 2
    REDIS = 3
    OBJECTS = 4


TIER_NAMES = (None, "arena", "disk", "redis", "objects")
"""What people call these, by number."""
NEWEST_TIER = max(PageTier)
"""The largest number that this version knows: a client says so, and is told of no newer one."""
_AS_OLDER_ONES_SAY = bytes.maketrans(bytes([PageTier.OBJECTS]), bytes([PageTier.REDIS]))


def as_known(tiers: bytes, newest: int) -> bytes:
    """Tiers of pages, as a caller knows them whose largest number is ``newest``; 0: the caller does not say, and knows
    those up to Redis. To it, the object tier is the shared tier that it knows."""
    return tiers if newest >= PageTier.OBJECTS else tiers.translate(_AS_OLDER_ONES_SAY)


UNTOLD = 255
"""Instead of a :class:`PageTier`: it may be in a lower tier, and only the node can tell. It never travels."""


class StoreOutcome(IntEnum):
    """What ``prepare_store`` says of a page."""

    RESERVED = 0
    """A slot is reserved for it."""
    PRESENT = 1
    """It is here already."""
    REFUSED = 2
    """No slot could be reserved for it."""


class Explanation(IntEnum):
    """What ``explain`` says of a page."""

    HERE = 0
    UNKNOWN = 1
    """It is absent, and nothing is remembered of it."""
    EVICTED = 2
    """It is absent, since it left the arena to make room."""
