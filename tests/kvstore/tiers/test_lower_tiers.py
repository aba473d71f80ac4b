"""The tiers below the arena, asked as one."""

from collections.abc import Sequence
from types import SimpleNamespace

from kvstore.limits import REDIS
from kvstore.tiers.lower_tiers import LowerTiers


def test_the_shared_tier_is_asked_for_the_heads_of_all_lists_first(kv: SimpleNamespace) -> None:
    """It may not get to the end in time, and a prefix must be there in every group."""

    class Hurried(kv.MemoryTier):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            return [place < 5 for place in range(len(keys))]

    groups = [kv.hashes_of(range(start, start + 5)) for start in (0, 100, 200)]
    found = LowerTiers([], Hurried()).find(groups, lambda keys: [key == kv.hash_of(100) for key in keys])
    assert found == [bytes([REDIS, REDIS, 0, 0, 0]), bytes([0, REDIS, 0, 0, 0]), bytes([REDIS, REDIS, 0, 0, 0])]
