import pytest

from kvstore.connector.blocks.cache_config import KVCacheConfig, KVCacheGroupSpec, first_spec
from kvstore.connector.blocks.specs import (
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvstore.errors import ConfigError

SMALL = FullAttentionSpec(block_size=16, token_bytes=8)
LARGE = FullAttentionSpec(block_size=16, token_bytes=24, page_size_padded=512)
WINDOW = SlidingWindowSpec(block_size=32, token_bytes=8, sliding_window=40)
MAMBA = MambaSpec(block_size=48, state_bytes=100, page_size_padded=256)


def test_a_page_of_kvstore_has_no_padding():
    assert KVCacheGroupSpec(("a", "b"), MAMBA).page_bytes == 200


def test_pages_of_several_sizes_are_added_up():
    group = KVCacheGroupSpec(
        ("a", "b"), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": SMALL, "b": LARGE})
    )
    assert group.layer_specs == (SMALL, LARGE)
    assert group.page_bytes == 128 + 384
    assert first_spec(group) == SMALL


def test_a_group_without_layers_takes_no_memory():
    specs = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": SMALL, "b": LARGE})
    for spec in (MAMBA, specs):
        group = KVCacheGroupSpec((), spec)
        assert (group.layer_specs, group.page_bytes) == ((), 0)


def test_hashes_fit_into_every_block_and_hits_end_at_whole_ones():
    config = KVCacheConfig(
        10,
        (
            KVCacheGroupSpec(("a",), SMALL),
            KVCacheGroupSpec(("b",), WINDOW),
            KVCacheGroupSpec(("c",), MAMBA),
        ),
    )
    assert config.block_sizes() == (16, 32, 48)
    assert config.hash_block_size() == 16
    assert config.scheduler_block_size() == 96


def test_context_parallelism_lengthens_the_blocks_that_ranks_share():
    config = KVCacheConfig(10, (KVCacheGroupSpec(("a",), SMALL), KVCacheGroupSpec(("b",), MAMBA)))
    assert config.block_sizes(4) == (64, 48)
    assert (config.hash_block_size(4), config.scheduler_block_size(4)) == (16, 192)


def test_a_model_without_attention_has_hashes_of_single_tokens():
    config = KVCacheConfig(1, ())
    assert (config.block_sizes(), config.hash_block_size(), config.scheduler_block_size()) == ((), 1, 1)


def test_a_layer_is_in_one_group_once_and_has_a_spec():
    with pytest.raises(ConfigError, match="a layer occurs twice in a group"):
        KVCacheGroupSpec(("a", "a"), SMALL)
    with pytest.raises(ConfigError, match="no spec for layer b"):
        KVCacheGroupSpec(("a", "b"), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": SMALL}))
    with pytest.raises(ConfigError, match="layer b is in two groups"):
        KVCacheConfig(10, (KVCacheGroupSpec(("a", "b"), SMALL), KVCacheGroupSpec(("b",), WINDOW)))


def test_there_is_always_the_null_block():
    with pytest.raises(ConfigError, match="num_blocks must be an integer of at least 1, got 0"):
        KVCacheConfig(0, ())
