from dataclasses import FrozenInstanceError

import pytest

from kvstore.connector.blocks import KVCacheBlocks, MambaSpec
from kvstore.connector.blocks.block import Block
from kvstore.connector.blocks.hashing import BlockHash
from kvstore.errors import InvalidRequestError


def hashed(block_id: int) -> Block:
    return Block(block_id, block_hash=BlockHash(bytes(32)))


NULL = Block(0, is_null=True)


def test_it_can_not_be_changed():
    blocks = KVCacheBlocks(((Block(1),),))
    with pytest.raises(FrozenInstanceError):
        blocks.blocks = ((),)


def test_results_are_added_group_by_group_and_neither_changes():
    one, other = KVCacheBlocks(([Block(1)], [])), KVCacheBlocks(([Block(2)], (Block(3), Block(4))))
    assert (one + other).get_block_ids() == ([1, 2], [3, 4])
    assert one.get_block_ids() == ([1], [])
    assert other.get_block_ids() == ([2], [3, 4])


def test_results_of_different_models_do_not_add_up():
    with pytest.raises(ValueError, match="zip"):
        KVCacheBlocks(((),)) + KVCacheBlocks(((), ()))


def test_no_blocks_are_empty_lists_or_where_allowed_none():
    nothing = KVCacheBlocks(((), ()))
    assert nothing.get_block_ids() == ([], [])
    assert nothing.get_block_ids(allow_none=True) is None
    assert KVCacheBlocks(((), (Block(1),))).get_block_ids(allow_none=True) == ([], [1])


def test_unhashed_ids_are_those_of_blocks_that_no_one_can_find():
    blocks = KVCacheBlocks(((hashed(1), Block(2), Block(3)),))
    assert blocks.get_unhashed_block_ids() == [2, 3]
    assert blocks.get_unhashed_block_ids_all_groups() == [[2, 3]]


def test_unhashed_ids_by_group_leave_the_null_block_out():
    blocks = KVCacheBlocks(((NULL, hashed(1), Block(2)), (Block(3),), ()))
    assert blocks.get_unhashed_block_ids_all_groups() == [[2], [3], []]


def test_unhashed_ids_without_groups_need_one_group():
    with pytest.raises(InvalidRequestError, match="one group, there are 2"):
        KVCacheBlocks(((), ())).get_unhashed_block_ids()


def test_a_new_empty_result_has_as_many_groups():
    assert KVCacheBlocks(((Block(1),), (Block(2),))).new_empty() == KVCacheBlocks(((), ()))


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
    assert added.get_unhashed_block_ids_all_groups() == [[]]  # cached, in this step
