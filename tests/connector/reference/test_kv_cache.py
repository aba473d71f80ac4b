from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.connector.blocks import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstore.connector.reference.kv_cache import KVCache
from kvstore.errors import ConfigError

FULL = FullAttentionSpec(block_size=4, token_bytes=64)
WINDOW = SlidingWindowSpec(block_size=8, token_bytes=32, sliding_window=10)
STATE = MambaSpec(block_size=4, state_bytes=40, page_size_padded=256, mamba_cache_mode="all")


def make_cache(*groups: KVCacheGroupSpec) -> KVCache:
    return KVCache(KVCacheConfig(6, groups))


@pytest.fixture
def cache() -> KVCache:
    return make_cache(
        KVCacheGroupSpec(("a", "b"), FULL), KVCacheGroupSpec(("c", "d"), WINDOW), KVCacheGroupSpec(("e",), STATE)
    )


def test_layers_have_a_row_a_block(cache: KVCache) -> None:
    assert {name: tuple(rows.shape) for name, rows in cache.rows.items()} == {
        "a": (6, 64), "b": (6, 64), "c": (6, 64), "d": (6, 64), "e": (6, 10)
    }  # fmt: skip
    assert cache.group_of == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}


def test_groups_share_the_memory_of_a_block_and_layers_of_one_group_do_not(cache: KVCache) -> None:
    cache.rows["a"][3] = 1.0

    assert (cache.rows["c"][3] == 1.0).all()
    assert (cache.rows["e"][3] == 1.0).all()
    assert not cache.rows["b"].any()
    assert all(not cache.rows[name][block].any() for name in "ace" for block in (0, 1, 2, 4, 5))


@pytest.mark.parametrize(("group", "layers"), [(0, "ab"), (1, "cd"), (2, "e")])
def test_a_page_is_the_rows_of_its_layers_in_turn(cache: KVCache, group: int, layers: str) -> None:
    for name in layers:
        cache.rows[name][:] = torch.randn(cache.rows[name].shape)
    pages = cache.pages(group)
    page = np.zeros(pages.page_bytes, np.uint8)

    pages.gather([2], [page])
    expected = torch.cat([cache.rows[name][2] for name in layers])
    assert page.tobytes() == expected.numpy().tobytes()
    assert pages.page_bytes == cache.groups[group].page_bytes

    before = cache.rows[layers[-1]].clone()
    pages.scatter([page], [5])
    assert all(torch.equal(cache.rows[name][5], cache.rows[name][2]) for name in layers)
    assert torch.equal(cache.rows[layers[-1]][:5], before[:5])


def test_pages_of_several_sizes_can_not_share_memory() -> None:
    with pytest.raises(ConfigError, match=r"pages of one size a layer, got \[128, 256\] bytes"):
        make_cache(
            KVCacheGroupSpec(("a",), FULL), KVCacheGroupSpec(("b",), FullAttentionSpec(block_size=4, token_bytes=32))
        )
    with pytest.raises(ConfigError, match="a page of 42 bytes"):
        make_cache(KVCacheGroupSpec(("a",), MambaSpec(block_size=4, state_bytes=42)))
