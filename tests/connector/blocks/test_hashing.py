import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.blocks import BlockHashChain
from kvstore.errors import InvalidRequestError
from kvstore.hashing import hash_blocks

tokens = st.integers(0, 2**31 - 1)


@given(st.lists(st.lists(tokens, max_size=9), max_size=8), st.integers(1, 5), st.sampled_from([(), ("lora-a", 7)]))
def test_hashes_do_not_depend_on_the_pieces_in_which_tokens_arrive(pieces, block_size, extra_keys):
    chain = BlockHashChain(block_size, extra_keys)
    for piece in pieces:
        chain.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert chain.hashes == hash_blocks(whole, block_size, extra_keys)


def test_hashes_grow_in_place():
    chain = BlockHashChain(2)
    seen_by_the_request = chain.hashes
    chain.extend([1, 2, 3])
    assert len(seen_by_the_request) == 1
    chain.extend([4])
    assert len(seen_by_the_request) == 2


def test_a_block_is_sha256_over_parent_tokens_and_keys():
    chain = BlockHashChain(2)
    chain.extend([1, 2, 3, 4])
    first = hashlib.sha256(
        hashlib.sha256(b"kvstore/block-hash/1/2").digest() + bytes([1, 0, 0, 0, 2, 0, 0, 0])
    ).digest()
    assert chain.hashes == [first, hashlib.sha256(first + bytes([3, 0, 0, 0, 4, 0, 0, 0])).digest()]


def test_a_bad_token_leaves_the_chain_as_it_was():
    chain = BlockHashChain(2)
    chain.extend([1])
    with pytest.raises(InvalidRequestError, match="-5"):
        chain.extend([2, -5])
    chain.extend([2])
    assert chain.hashes == hash_blocks([1, 2], 2)


@pytest.mark.parametrize("block_size", [0, -1, True, 1.5])
def test_a_block_size_below_one_is_refused(block_size):
    with pytest.raises(InvalidRequestError, match=str(block_size)):
        BlockHashChain(block_size)
