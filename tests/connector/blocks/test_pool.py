import pytest

from connector.blocks.hashing import BlockHash
from connector.blocks.pool import BlockPool
from kvstore.errors import InvalidRequestError


def a_hash(text: str) -> BlockHash:
    return BlockHash(text.encode().ljust(32))


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_block_0_is_the_null_block_and_is_never_given_out():
    pool = BlockPool(4)
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    assert pool.null_block.block_id == 0
    assert pool.num_free_blocks == 0
    with pytest.raises(InvalidRequestError, match="1 blocks asked for, 0 are free"):
        pool.get_new_blocks(1)


def test_the_null_block_can_stand_in_for_any_block():
    pool = BlockPool(3)
    pool.touch([pool.null_block])
    pool.cache_full_blocks([pool.null_block], [a_hash("x")])
    pool.free_blocks([pool.null_block])
    pool.check_integrity()
    assert pool.get_cached_block(a_hash("x")) is None
    assert pool.free_block_ids() == [1, 2]


def test_hashed_blocks_wait_at_the_end_and_others_leave_first():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks[:2], [a_hash("one"), a_hash("two")])
    pool.free_blocks(reversed(blocks))
    # 5 was never used; 4 and 3 hold nothing that could be hit; 2 is the tail of the chain 1, 2.
    assert pool.free_block_ids() == [4, 3, 5, 2, 1]


def test_a_block_that_is_given_to_someone_else_is_found_no_longer():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block], [a_hash("old")])
    pool.free_blocks([block])
    assert pool.get_cached_block(a_hash("old")) is block
    pool.get_new_blocks(1)
    assert pool.get_cached_block(a_hash("old")) is None
    pool.check_integrity()


def test_of_several_blocks_with_one_hash_the_oldest_is_found_until_it_is_gone():
    pool = BlockPool(5)
    first, second, third = pool.get_new_blocks(3)
    for block in (first, second, third):
        pool.cache_full_blocks([block], [a_hash("same")])
    pool.check_integrity()
    assert pool.num_cached_blocks == 1
    found = []
    while (block := pool.get_cached_block(a_hash("same"))) is not None:
        found.append(block)
        pool.evict_blocks([block.block_id])
        pool.check_integrity()
    assert found == [first, second, third]


def test_touch_takes_a_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [a_hash(str(number)) for number in range(3)])
    pool.free_blocks(blocks)
    pool.touch([blocks[1]])
    assert pool.free_block_ids() == [4, 1, 3]
    pool.touch([blocks[1]])
    pool.free_blocks([blocks[1]])
    assert blocks[1].ref_cnt == 1
    pool.check_integrity()


def test_eviction_leaves_holders_alone_and_refuses_unknown_ids_before_it_changes_anything():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [a_hash("a"), a_hash("b")])
    with pytest.raises(InvalidRequestError, match="between 0 and 2, got 3"):
        pool.evict_blocks([1, 3])
    assert pool.get_cached_block(a_hash("a")) is blocks[0]
    pool.evict_blocks([1])
    assert pool.get_cached_block(a_hash("a")) is None
    assert blocks[0].ref_cnt == 1
    pool.free_blocks(blocks)
    assert pool.free_block_ids() == [1, 2]


def test_without_caching_nothing_is_found():
    pool = BlockPool(3, enable_caching=False)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(blocks, [a_hash("a"), a_hash("b")])
    assert pool.get_cached_block(a_hash("a")) is None
    assert pool.usage == 1.0


class TestIntegrityCheck:
    """It finds each kind of damage: a check that can't fail is worth nothing."""

    @pytest.fixture
    def pool(self) -> BlockPool:
        pool = BlockPool(6)
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(blocks[:2], [a_hash("a"), a_hash("b")])
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
        with pytest.raises(AssertionError, match="3 blocks carry a hash, 2 can be found"):
            pool.check_integrity()

    def test_a_block_found_by_another_hash(self, pool):
        pool.blocks[1].block_hash = a_hash("c")
        with pytest.raises(AssertionError, match="block 1 is found by a hash that it does not carry"):
            pool.check_integrity()

    def test_a_broken_link(self, pool):
        pool.blocks[5].prev_free = pool.blocks[1]
        with pytest.raises(AssertionError, match="does not point back"):
            pool.check_integrity()

    def test_a_wrong_count(self, pool):
        pool._free._length += 1
        with pytest.raises(AssertionError, match="counts"):
            pool.check_integrity()

    def test_a_used_null_block(self, pool):
        pool.null_block.block_hash = a_hash("z")
        with pytest.raises(AssertionError):
            pool.check_integrity()
