"""Eviction policies: which page leaves first. Order and eviction are one object, so that they can't disagree.

A policy sees slots come, be used and go, and proposes victims in its order (:mod:`kvstore.catalog.policies.policy`). It
decides nothing about holds or dirty pages: the catalog skips what may not leave now. A proposal changes nothing until
``remove`` is called.
"""

from collections.abc import Callable

from kvstore.catalog.policies.expected_reuse import ExpectedReuse
from kvstore.catalog.policies.lru import LeastRecentlyUsed
from kvstore.catalog.policies.policy import EvictionPolicy, Prospect
from kvstore.catalog.policies.s3_fifo import S3FIFO

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "s3-fifo": S3FIFO,
    "expected-reuse": ExpectedReuse,
}
DEFAULT_POLICY = "expected-reuse"
"""What a node uses."""

__all__ = ["DEFAULT_POLICY", "POLICIES", "S3FIFO", "EvictionPolicy", "ExpectedReuse", "LeastRecentlyUsed", "Prospect"]
