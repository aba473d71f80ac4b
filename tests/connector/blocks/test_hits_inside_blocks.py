"""Hits that end inside a block: who goes on there writes to a copy, or leaves one to those who find the block.

Full attention and recurrent states of ``"align"``: blocks of 4 tokens, a hash for each 2. A request's text has one
token a letter. The prompts end at token 7, so that the last hash is that of token 6, inside the second block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.connector.blocks import (
    BlockStored,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    PageManager,
    SlidingWindowSpec,
)
from kvstore.errors import ConfigError, InvalidRequestError

FULL = FullAttentionSpec(block_size=4, token_bytes=8)
STATES = MambaSpec(block_size=4, state_bytes=32, mamba_cache_mode="align")
PROMPT = "SSSS ppx"


def manager_of(*specs: KVCacheSpec, unit: int | None = 2) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"layer {index}",), spec) for index, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(21, groups, prefix_match_unit=unit), 1000, enable_kv_cache_events=True)


@pytest.fixture
def manager() -> KVCacheManager:
    return manager_of(FULL, STATES)


@pytest.fixture
def request_of(new_request: Callable[..., Any]) -> Callable[[str, str], Any]:
    return lambda request_id, text: new_request(request_id, text, hash_block_size=2)


def next_step(manager: KVCacheManager) -> list[tuple[int, int]]:
    """Ends a step that was scheduled: the copies that it made."""
    copies = manager.take_kv_cache_block_copies()
    manager.check_integrity()
    manager.free_copied(copies)
    manager.new_step_starts()
    manager.check_integrity()
    return [(copy.source.block_id, copy.destination.block_id) for copy in copies]


def compute_prompt(manager: KVCacheManager, request: Any) -> list[tuple[int, int]]:
    """In two steps, the first of which ends at the last hash of the prompt: the copies of the second one."""
    assert manager.allocate_slots(request, 6) is not None
    request.num_computed_tokens = 6
    assert next_step(manager) == []
    assert manager.allocate_slots(request, request.num_tokens - 6) is not None
    request.num_computed_tokens = request.num_tokens
    return next_step(manager)


def test_who_goes_on_inside_its_own_block_stays_there_and_leaves_a_copy(manager, request_of):
    first = request_of("a", PROMPT)
    ((source, copy),) = compute_prompt(manager, first)
    _, states = manager.get_block_ids("a")
    assert states == [0, source]
    blocks = manager.pool.blocks
    assert (blocks[source].block_hash, blocks[copy].block_hash) == (None, first.block_hashes[2])
    manager.free(first)
    hit, length = manager.get_computed_blocks(request_of("b", PROMPT))
    assert length == 6
    assert hit.get_block_ids()[1] == [0, copy]


def test_who_hits_inside_a_block_gets_a_copy_in_its_place(manager, request_of):
    first = request_of("a", PROMPT)
    compute_prompt(manager, first)
    second = request_of("b", PROMPT + "yz")
    hit, length = manager.get_computed_blocks(second)
    assert length == 6
    shared = [ids[1] for ids in hit.get_block_ids()]
    added = manager.allocate_slots(second, 3, length, hit)
    own = [ids[1] for ids in manager.get_block_ids("b")]
    assert [ids[0] for ids in added.get_block_ids()] == own
    assert not set(shared) & set(own)
    assert next_step(manager) == list(zip(shared, own, strict=True))
    assert manager.get_block_ids("a")[0][1] == shared[0]


def test_an_engine_of_pages_makes_the_same_copies(manager):
    pages, tokens = PageManager(manager), [1, 2, 3, 4, 5, 6, 7]
    pages.get_computed_pages("a", tokens)
    pages.allocate_pages("a", 6)
    pages.set_computed_tokens("a", 6)
    pages.free_copied(pages.take_page_copies())
    pages.new_step_starts()
    pages.finish("a")
    hit, length = pages.get_computed_pages("b", tokens)
    pages.allocate_pages("b", 1, length, hit)
    copies = pages.take_page_copies()
    assert [copy.source.block_id for copy in copies] == [ids[1] for ids in hit.get_block_ids()]
    assert [copy.destination.block_id for copy in copies] == [ids[1] for ids in pages.get_page_ids("b")]
    pages.free_copied(copies)
    pages.finish("b")
    assert pages.usage == 0.0


def test_both_blocks_are_kept_until_the_copy_is_made(manager, request_of):
    first = request_of("a", PROMPT)
    compute_prompt(manager, first)
    manager.free(first)
    second = request_of("b", PROMPT)
    hit, length = manager.get_computed_blocks(second)
    manager.allocate_slots(second, 1, length, hit)
    copies = manager.take_kv_cache_block_copies()
    manager.free(second)
    held = {copy.source.block_id for copy in copies} | {copy.destination.block_id for copy in copies}
    assert len(held) == 4
    assert not held & set(manager.pool.free_block_ids())
    assert not manager.reset_prefix_cache()
    manager.free_copied(copies)
    assert manager.usage == 0.0
    with pytest.raises(InvalidRequestError, match="among 2 copies is one that is not under way"):
        manager.free_copied(copies)


def test_copies_that_nobody_makes_are_no_secret(manager, request_of):
    first = request_of("a", PROMPT)
    manager.allocate_slots(first, 6)
    first.num_computed_tokens = 6
    manager.new_step_starts()
    manager.allocate_slots(first, 1)
    with pytest.raises(InvalidRequestError, match="take_kv_cache_block_copies"):
        manager.new_step_starts()
    next_step(manager)


def test_a_state_of_this_step_is_hit_in_the_next_one(manager, request_of):
    first, second = request_of("a", PROMPT), request_of("b", PROMPT)
    manager.allocate_slots(first, 6)
    first.num_computed_tokens = 6
    hit, length = manager.get_computed_blocks(second)
    assert length == 6
    assert manager.allocate_slots(second, 1, length, hit) is None
    assert manager.allocate_slots(second, 1, length, hit, full_sequence_must_fit=True) is None
    next_step(manager)
    assert manager.allocate_slots(second, 1, length, hit) is not None
    next_step(manager)


def test_pages_follow_whole_blocks_alone(manager, request_of):
    first = request_of("a", "SSSS ppx")
    compute_prompt(manager, first)
    second = request_of("b", "SSSS ppqq rrrr x")
    blocks, local, external = manager.get_computed_blocks_with(second, {0: [True] * 3, 1: [False, False, True]})
    assert (local, external) == (4, 8)
    assert blocks.get_block_ids() == ([manager.get_block_ids("a")[0][0], -1, -1], [0, 0, -1])
    hit, length = manager.get_computed_blocks(second)
    assert length == 6
    with pytest.raises(InvalidRequestError, match="6 computed tokens end inside a block: no external tokens"):
        manager.allocate_slots(second, 0, 6, hit, num_external_computed_tokens=6, delay_cache_blocks=True)


def test_a_hit_that_is_told_again_is_told_block_by_block(manager, request_of):
    compute_prompt(manager, request_of("a", PROMPT))
    manager.take_events()
    second = request_of("b", PROMPT)
    second.kv_cache_report_mode = "full"
    manager.get_computed_blocks(second)
    events = manager.take_events()
    assert all(isinstance(event, BlockStored) for event in events)
    assert [event.token_ids for event in events] == [tuple(second.token_ids[:4])] * 2


@pytest.mark.parametrize(
    ("window_block", "alignment"), [(2, 2), (4, 4)], ids=["as short as the hashes' step", "longer"]
)
def test_windows_are_not_hit_inside_a_block(window_block, alignment):
    window = SlidingWindowSpec(block_size=window_block, token_bytes=8, sliding_window=3)
    assert manager_of(FULL, window, STATES).cache_hit_alignment_tokens == alignment


@pytest.mark.parametrize(
    ("specs", "unit", "message"),
    [
        ((FULL, STATES), 3, "got 3 for blocks of \\[4, 4\\] tokens"),
        ((FULL, STATES), 8, "got 8 for blocks of"),
        ((FULL,), 2, "got 2 for blocks of \\[4\\] tokens"),
        ((FULL, STATES), 0, "prefix_match_unit must be an integer of at least 1, got 0"),
    ],
)
def test_a_unit_that_does_not_fit_is_refused(specs, unit, message):
    with pytest.raises(ConfigError, match=message):
        manager_of(*specs, unit=unit)
