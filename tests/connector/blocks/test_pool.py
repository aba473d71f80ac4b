import pytest

from kvstore.connector.blocks.events import AllBlocksCleared, BlockRemoved
from kvstore.connector.blocks.hashing import BlockHash
from kvstore.connector.blocks.pool import BlockPool, check_counts
from kvstore.errors import InvalidRequestError


def a_hash(text: str) -> BlockHash:
    return BlockHash(text.encode().ljust(32))


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def cache(pool, blocks, *texts, group=0) -> None:
    pool.cache_full_blocks(blocks, [a_hash(text) for text in texts], group)


def test_block_0_is_the_null_block_and_is_never_given_out():
    pool = BlockPool(4)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.null_block.block_id == 0
    assert pool.num_free_blocks == 0
    with pytest.raises(InvalidRequestError, match="1 blocks asked for, 0 are free"):
        pool.get_new_blocks(1)


def test_the_null_block_can_stand_in_for_any_block_that_is_freed():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.free_blocks([pool.null_block, blocks[0], pool.null_block, blocks[1]])
    pool.check_integrity()
    assert pool.free_block_ids() == [1, 2, 3]


def test_evicting_the_null_block_changes_nothing():
    pool = BlockPool(2)
    pool.evict_blocks([0])
    pool.check_integrity()
    assert pool.free_block_ids() == [1]


def test_a_pool_of_the_null_block_alone_has_no_block_to_give():
    pool = BlockPool(1)
    assert pool.num_free_blocks == 0
    assert pool.reset_prefix_cache()
    pool.check_integrity()


def test_hashed_blocks_wait_at_the_end_and_others_leave_first():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(4)
    cache(pool, blocks[:2], "one", "two")
    pool.free_blocks(reversed(blocks))
    # 5 was never used; 4 and 3 hold nothing that could be hit; 2 is the tail of the chain 1, 2.
    assert pool.free_block_ids() == [4, 3, 5, 2, 1]


def test_a_block_that_is_given_to_someone_else_is_found_no_longer():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block], "old")
    pool.free_blocks([block])
    assert pool.get_cached_block(a_hash("old")) is block
    pool.get_new_blocks(1)
    assert pool.get_cached_block(a_hash("old")) is None
    pool.check_integrity()


def test_a_block_that_is_found_keeps_its_hash():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block], "first")
    cache(pool, [block], "second")
    pool.check_integrity()
    assert pool.get_cached_block(a_hash("first")) is block
    assert pool.get_cached_block(a_hash("second")) is None


def test_of_several_blocks_with_one_hash_the_oldest_is_found_until_it_is_gone():
    pool = BlockPool(5)
    first, second, third = pool.get_new_blocks(3)
    for block in (first, second, third):
        cache(pool, [block], "same")
    pool.check_integrity()
    assert [block for _, block in pool.cached[0]] == [first, second, third]
    found = []
    while (block := pool.get_cached_block(a_hash("same"))) is not None:
        found.append(block)
        pool.evict_blocks([block.block_id])
        pool.check_integrity()
    assert found == [first, second, third]


def test_groups_find_blocks_apart_from_each_other():
    pool = BlockPool(4, num_groups=2)
    one, other = pool.get_new_blocks(2)
    cache(pool, [one], "same", group=0)
    cache(pool, [other], "same", group=1)
    pool.check_integrity()
    assert pool.get_cached_block(a_hash("same"), 0) is one
    assert pool.get_cached_block(a_hash("same"), 1) is other
    pool.evict_blocks([one.block_id])
    assert pool.get_cached_block(a_hash("same"), 0) is None
    assert pool.get_cached_block(a_hash("same"), 1) is other


def test_a_block_moves_to_another_group_when_it_is_given_out_again():
    pool = BlockPool(2, num_groups=2)
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block], "old", group=0)
    pool.free_blocks([block])
    (block,) = pool.get_new_blocks(1)
    cache(pool, [block], "new", group=1)
    pool.check_integrity()
    assert pool.get_cached_block(a_hash("new"), 0) is None
    assert pool.get_cached_block(a_hash("new"), 1) is block


def test_touch_takes_a_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(3)
    cache(pool, blocks, "0", "1", "2")
    pool.free_blocks(blocks)
    pool.touch([blocks[1]])
    assert pool.free_block_ids() == [4, 1, 3]
    pool.touch([blocks[1]])
    pool.free_blocks([blocks[1]])
    assert blocks[1].ref_cnt == 1
    pool.check_integrity()


def test_a_block_that_is_freed_by_no_holder_is_noticed():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is freed by someone who does not hold it"):
        pool.free_blocks([pool.blocks[1]])


def test_eviction_leaves_holders_alone_and_refuses_unknown_ids_before_it_changes_anything():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    cache(pool, blocks, "a", "b")
    with pytest.raises(InvalidRequestError, match="between 0 and 2, got 3"):
        pool.evict_blocks([1, 3])
    assert pool.get_cached_block(a_hash("a")) is blocks[0]
    pool.evict_blocks([1])
    assert pool.get_cached_block(a_hash("a")) is None
    assert blocks[0].ref_cnt == 1
    pool.free_blocks(blocks)
    assert pool.free_block_ids() == [1, 2]


def test_a_reset_is_refused_while_a_block_is_held_and_forgets_everything_when_none_is():
    pool = BlockPool(4, num_groups=2)
    blocks = pool.get_new_blocks(3)
    cache(pool, blocks[:1], "a", group=0)
    cache(pool, blocks[1:], "b", "c", group=1)
    pool.free_blocks(blocks[:2])
    assert not pool.reset_prefix_cache()
    assert [len(list(cached)) for cached in pool.cached] == [1, 2]
    pool.free_blocks(blocks[2:])
    assert pool.reset_prefix_cache()
    assert not any(map(list, pool.cached))
    pool.check_integrity()


class TestEvents:
    @pytest.fixture
    def pool(self) -> BlockPool:
        pool = BlockPool(4, num_groups=2, enable_kv_cache_events=True)
        cache(pool, pool.get_new_blocks(1), "a", group=1)
        return pool

    def test_a_block_is_removed_when_it_is_given_out_again(self, pool):
        pool.free_blocks([pool.blocks[1]])
        pool.get_new_blocks(3)
        assert pool.take_events() == [BlockRemoved(a_hash("a"), 1)]
        assert pool.take_events() == []

    def test_a_block_is_removed_when_it_is_evicted_and_only_once(self, pool):
        pool.evict_blocks([1, 2])
        pool.evict_blocks([1])
        assert pool.take_events() == [BlockRemoved(a_hash("a"), 1)]

    def test_a_reset_clears_and_a_refused_one_says_nothing(self, pool):
        assert not pool.reset_prefix_cache()
        assert pool.take_events() == []
        pool.free_blocks([pool.blocks[1]])
        assert pool.reset_prefix_cache()
        assert pool.take_events() == [AllBlocksCleared()]

    def test_nothing_is_noted_unless_it_is_asked_for(self):
        pool = BlockPool(2)
        cache(pool, pool.get_new_blocks(1), "a")
        pool.evict_blocks([1])
        assert pool.take_events() == []


class TestIntegrityCheck:
    """It finds each kind of damage: a check that can't fail is of no use."""

    @pytest.fixture
    def pool(self) -> BlockPool:
        pool = BlockPool(6, num_groups=2)
        blocks = pool.get_new_blocks(3)
        cache(pool, blocks[:2], "a", "b")
        pool.free_blocks([blocks[1]])
        pool.check_integrity()
        return pool

    def test_a_lost_block(self, pool):
        pool.blocks[1].ref_cnt = 0
        with pytest.raises(AssertionError, match="block 1 is lost"):
            pool.check_integrity()

    def test_a_free_block_that_is_held(self, pool):
        pool.blocks[4].ref_cnt = 1
        with pytest.raises(AssertionError, match="block 4 is free and held"):
            pool.check_integrity()

    def test_a_hash_that_can_not_be_found(self, pool):
        pool.blocks[3].block_hash = a_hash("c")
        with pytest.raises(AssertionError, match="blocks carry 3 hashes, 2 can be found"):
            pool.check_integrity()

    def test_a_block_found_by_another_hash(self, pool):
        pool.blocks[1].block_hash = a_hash("c")
        with pytest.raises(AssertionError, match="block 1 is found in group 0 by a hash that it does not carry"):
            pool.check_integrity()

    def test_a_block_found_in_another_group(self, pool):
        pool.blocks[1].group_id = 1
        with pytest.raises(AssertionError, match="block 1 is found in group 0 by a hash that it does not carry there"):
            pool.check_integrity()

    def test_a_block_of_another_pool(self, pool):
        other = BlockPool(2).blocks[1]
        other.block_hash = a_hash("c")
        pool.cached[0].insert(a_hash("c"), other)
        with pytest.raises(AssertionError, match="block 1 is cached but not of this pool"):
            pool.check_integrity()

    def test_a_broken_link(self, pool):
        pool.blocks[5].prev_free = pool.blocks[1]
        with pytest.raises(AssertionError, match="does not point back"):
            pool.check_integrity()

    def test_a_link_of_a_held_block(self, pool):
        pool.blocks[1].prev_free = pool.blocks[4]
        with pytest.raises(AssertionError, match="block 1 is held and linked as free"):
            pool.check_integrity()

    def test_a_wrong_count(self, pool):
        pool._free._length += 1
        with pytest.raises(AssertionError, match="counts"):
            pool.check_integrity()

    def test_a_used_null_block(self, pool):
        pool.null_block.block_hash = a_hash("z")
        with pytest.raises(AssertionError):
            pool.check_integrity()

    def test_a_free_null_block(self, pool):
        pool._free.append_n([pool.null_block])
        with pytest.raises(AssertionError, match="the null block is free"):
            pool.check_integrity()

    def test_a_used_stand_in_for_remote_pages(self, pool):
        pool.touch([pool.blocks[1]])
        pool.remote_block.ref_cnt = 1
        with pytest.raises(AssertionError, match="remote pages has been used"):
            pool.check_integrity()

    def test_a_block_that_counts_more_holders_than_it_has(self, pool):
        check_counts([0, 1, 0, 1, 0, 0], pool)
        pool.blocks[1].ref_cnt = 2
        pool.check_integrity()
        with pytest.raises(AssertionError, match="block 1 counts 2 holders, 1 hold it"):
            check_counts([0, 1, 0, 1, 0, 0], pool)
