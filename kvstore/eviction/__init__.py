"""Which page leaves first. Order and eviction are one object, so that they can't disagree.

A policy sees slots come, be used and go, and proposes victims in its order (:mod:`kvstore.eviction.contract`). It
decides nothing about holds or dirty pages: the catalog skips what may not leave now. A proposal changes nothing until
``remove`` is called.
"""

from collections.abc import Callable

from kvstore.eviction.contract import EvictionPolicy
from kvstore.eviction.lru import LeastRecentlyUsed

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed}
DEFAULT_POLICY = "lru"
"""What a node uses."""

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "LeastRecentlyUsed"]
