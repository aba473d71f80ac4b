from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.connector.blocks.block import KVCacheBlock
from kvstore.connector.blocks.cached_blocks import BlockHashToBlockMap
from kvstore.connector.blocks.hashing import BlockHash

HASHES = [BlockHash(bytes([number]) * 32) for number in range(3)]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=40))
@settings(deadline=None)
def test_it_finds_what_a_list_of_pairs_finds(moves):
    blocks = [KVCacheBlock(number) for number in range(5)]
    cached = BlockHashToBlockMap()
    model: list[tuple[BlockHash, KVCacheBlock]] = []  # in the order of insertion
    for number, hash_number in moves:
        block = blocks[number]
        carried = next((pair for pair in model if pair[1] is block), None)
        if carried is not None:
            cached.remove(*carried)
            model.remove(carried)
        else:
            cached.insert(HASHES[hash_number], block)
            model.append((HASHES[hash_number], block))
        for block_hash in HASHES:
            assert cached.get(block_hash) is next((found for key, found in model if key == block_hash), None)
        assert sorted(cached, key=lambda pair: pair[1].block_id) == sorted(model, key=lambda pair: pair[1].block_id)


def test_leading_blocks_end_at_the_first_hash_without_one():
    cached = BlockHashToBlockMap()
    first, twin, last = (KVCacheBlock(number) for number in range(3))
    cached.insert(HASHES[0], first)
    cached.insert(HASHES[0], twin)
    cached.insert(HASHES[2], last)
    assert cached.get_leading(HASHES) == [first]
    assert cached.get_leading([HASHES[2], HASHES[0]]) == [last, first]
    assert cached.get_leading([]) == []


def test_inserting_a_block_twice_makes_it_no_other_block():
    cached = BlockHashToBlockMap()
    block = KVCacheBlock(1)
    cached.insert(HASHES[0], block)
    cached.insert(HASHES[0], block)
    assert list(cached) == [(HASHES[0], block)]


def test_clearing_forgets_everything():
    cached = BlockHashToBlockMap()
    cached.insert(HASHES[0], KVCacheBlock(1))
    cached.insert(HASHES[0], KVCacheBlock(2))
    cached.clear()
    assert list(cached) == []
