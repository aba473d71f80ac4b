from dataclasses import FrozenInstanceError

import pytest

from kvstore.connector.blocks import KVCacheBlocks, MambaSpec
from kvstore.connector.blocks.block import KVCacheBlock


def test_it_can_not_be_changed():
    blocks = KVCacheBlocks(((KVCacheBlock(1),),))
    with pytest.raises(FrozenInstanceError):
        blocks.blocks = ((),)


def test_ids_are_listed_by_group():
    assert KVCacheBlocks(([KVCacheBlock(1)], (), (KVCacheBlock(3), KVCacheBlock(2)))).get_block_ids() == (
        [1],
        [],
        [3, 2],
    )


def test_a_manager_that_finds_nothing_answers_with_the_same_empty_result_each_time(new_manager, new_request):
    manager = new_manager(4)
    nothing, _ = manager.get_computed_blocks(new_request("a", "SSSS p"))
    assert nothing is manager.get_computed_blocks(new_request("b", "TTTT t"))[0]
    assert nothing.blocks == ((),)


def test_what_a_request_holds_does_not_change_behind_its_readers_back(new_manager, new_request, prefill, compute):
    manager = new_manager(4)
    request = new_request("a", "SSSS")
    prefill(manager, request)
    held = manager.get_blocks("a")
    request.append([1])
    assert compute(manager, request) == ([2],)
    assert held.get_block_ids() == ([1],)
    manager.free(request)
    assert held.get_block_ids() == ([1],)


def test_the_added_blocks_of_recurrent_states_may_be_null(new_manager, new_request):
    manager = new_manager(4, MambaSpec(block_size=4, state_bytes=8, mamba_cache_mode="align"))
    added = manager.allocate_slots(new_request("a", "SSSS pppp qqqq"), 12)
    assert added.get_block_ids() == ([0, 0, 1],)
