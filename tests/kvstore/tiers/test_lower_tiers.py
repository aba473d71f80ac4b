"""The lower tiers, asked as one."""

from collections.abc import Sequence

from memory_tier import MemoryTier
from tiny_stores import page_hash, page_hashes

from kvstore.page_codes import PageTier
from kvstore.tiers.lower_tiers import LowerTiers


def test_the_shared_tier_is_asked_for_the_heads_of_all_lists_first() -> None:
    """It may not get to the end in time, and a prefix must be there in every group."""

    class Hurried(MemoryTier):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            return [place < 5 for place in range(len(keys))]

    groups = [page_hashes(range(start, start + 5)) for start in (0, 100, 200)]
    found = LowerTiers([], Hurried()).find(groups, lambda keys: [key == page_hash(100) for key in keys])
    assert found == [
        bytes([PageTier.REDIS, PageTier.REDIS, 0, 0, 0]),
        bytes([0, PageTier.REDIS, 0, 0, 0]),
        bytes([PageTier.REDIS, PageTier.REDIS, 0, 0, 0]),
    ]
