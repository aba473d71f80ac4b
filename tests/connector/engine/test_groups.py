"""What is read out of an engine's cache groups."""

from __future__ import annotations

import pytest
from engine_objects import (
    CacheConfig,
    CacheGroup,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SilentCacheConfig,
    group_of_shapes,
)

from kvstore.connector.engine.groups import group_of, heads_in_common, layers_of, touches_early
from kvstore.errors import ConfigError

ONE = [CacheGroup(FullAttentionSpec(1))]


def test_layers_of_one_size_lie_beside_each_other_and_else_in_the_engines_order() -> None:
    assert [name for name, _ in layers_of(group_of_shapes([4, 2, 4, 6, 2]))] == ["0", "2", "1", "4", "3"]
    assert [name for name, _ in layers_of(group_of_shapes([4, 4, 4]))] == ["0", "1", "2"]
    alike = CacheGroup(FullAttentionSpec(4), ["b", "a", "c"])
    assert [name for name, _ in layers_of(alike)] == ["b", "a", "c"]


def test_blocks_can_be_cut_by_the_heads_that_all_layers_have_in_common() -> None:
    assert heads_in_common([CacheGroup(FullAttentionSpec(8), ["a", "b"])]) == 8
    assert heads_in_common([group_of_shapes([4, 6, 4]), CacheGroup(FullAttentionSpec(8))]) == 2
    assert heads_in_common([CacheGroup(MLAAttentionSpec(1)), CacheGroup(MLAAttentionSpec(1))]) == 0
    for other in (MambaSpec(), MLAAttentionSpec(1)):
        with pytest.raises(ConfigError, match=r"kv_parts: state \(.* has no KV heads to cut by"):
            heads_in_common([CacheGroup(FullAttentionSpec(8), ["a"]), CacheGroup(other, ["state"])])


@pytest.mark.parametrize(
    ("config", "hash_block_size", "early"),
    [
        (CacheConfig(ONE), 8, False),
        (CacheConfig([*ONE, CacheGroup(FullAttentionSpec(2))]), 8, False),
        (CacheConfig(ONE, needs_kv_cache_zeroing=True), 8, True),
        (SilentCacheConfig(ONE), 8, True),
        (CacheConfig([*ONE, CacheGroup(MambaSpec())]), 8, True),
        (CacheConfig(ONE), 4, True),  # hits may end inside a block, which is copied then
    ],
)
def test_whether_blocks_may_be_touched_before_they_are_told_of(
    config: SilentCacheConfig, hash_block_size: int, early: bool
) -> None:
    assert touches_early(config, hash_block_size, True) is early
    assert touches_early(config, hash_block_size, False) is False


def test_ranks_that_share_blocks_have_longer_ones_together() -> None:
    assert group_of(CacheGroup(FullAttentionSpec(block_size=8)), dcp_size=4).block_size == 32
    assert group_of(CacheGroup(FullAttentionSpec(block_size=8, dcp_sharded=False)), dcp_size=4).block_size == 8
    assert not touches_early(CacheConfig(ONE), 32, True, 4)  # hits end where their blocks do
    assert touches_early(CacheConfig(ONE), 8, True, 4)
