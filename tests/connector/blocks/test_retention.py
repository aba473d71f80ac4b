"""Sparse retention: windows and recurrent states that are kept only where a prompt ends, where prompts part, and once
in an interval. Blocks hold 4 tokens; a request's text has one token a letter.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.connector.blocks import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstore.errors import ConfigError

FULL = FullAttentionSpec(block_size=4, token_bytes=8)
WINDOW = SlidingWindowSpec(block_size=4, token_bytes=8, sliding_window=5)
STATES = MambaSpec(block_size=4, state_bytes=32, mamba_cache_mode="all")

PROMPT = "SSSS pppp qqqq rrrr tttt"


def manager_of(*specs: KVCacheSpec, interval: int | None, use_eagle: bool = False) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"layer {index}",), spec) for index, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(41, groups, interval), 1000, use_eagle=use_eagle, enable_kv_cache_events=True)


def kept(manager: KVCacheManager, block_ids: Sequence[int]) -> list[int]:
    """Places of the blocks that others can find."""
    blocks = manager.pool.blocks
    return [place for place, block_id in enumerate(block_ids) if blocks[block_id].block_hash is not None]


@pytest.mark.parametrize("spec", [WINDOW, STATES], ids=["window", "states"])
@pytest.mark.parametrize(("interval", "places"), [(None, [0, 1, 2, 3, 4]), (0, [3]), (8, [1, 3]), (12, [2, 3])])
def test_what_is_kept_is_the_end_of_the_prompt_and_one_place_an_interval(new_request, prefill, spec, interval, places):
    manager = manager_of(spec, interval=interval)
    ((*block_ids,),) = prefill(manager, new_request("a", PROMPT))
    assert kept(manager, block_ids) == places
    (event,) = manager.take_events()
    assert len(event.block_hashes) == len(places)


def test_the_same_prompt_again_and_a_longer_one_hit_with_a_drafting_head(new_request, prefill, hit_tokens):
    manager = manager_of(WINDOW, interval=0, use_eagle=True)
    prefill(manager, new_request("a", PROMPT))
    assert hit_tokens(manager, new_request("b", PROMPT)) == 12
    assert hit_tokens(manager, new_request("c", PROMPT + "uuuu")) == 16


@pytest.mark.parametrize("spec", [WINDOW, STATES], ids=["window", "states"])
def test_where_prompts_part_is_kept_by_the_second_for_the_third(new_request, prefill, hit_tokens, spec):
    manager = manager_of(FULL, spec, interval=0)
    prefill(manager, new_request("a", PROMPT + "x"))
    second = new_request("b", "SSSS pppp uuuu vvvv x")
    assert hit_tokens(manager, second) == 0
    assert manager.get_shared_prefix_boundary(second) == 8
    second.shared_prefix_boundary = 8
    _, block_ids = prefill(manager, second)
    assert kept(manager, block_ids) == [1, 3]
    third = new_request("c", "SSSS pppp wwww x")
    assert hit_tokens(manager, third) == 8
    assert manager.get_shared_prefix_boundary(third) == 0


def test_a_request_that_skips_the_lookup_parts_from_no_one(new_request, prefill):
    manager = manager_of(FULL, STATES, interval=0)
    prefill(manager, new_request("a", PROMPT + "x"))
    assert manager.get_shared_prefix_boundary(new_request("b", "SSSS pppp x", skip_reading=True)) == 0


def test_full_attention_keeps_everything(new_request, prefill):
    manager = manager_of(FULL, interval=0)
    ((*block_ids,),) = prefill(manager, new_request("a", PROMPT))
    assert kept(manager, block_ids) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("specs", "interval", "message"),
    [
        ((FULL,), 8, "no group has a window or recurrent states"),
        ((FULL, WINDOW), 6, "a multiple of the 4 tokens at which hits may end, got 6"),
        ((FULL, WINDOW), -4, "prefix_cache_retention_interval must be an integer of at least 0, got -4"),
    ],
)
def test_an_interval_without_a_meaning_is_refused(specs, interval, message):
    with pytest.raises(ConfigError, match=message):
        manager_of(*specs, interval=interval)
