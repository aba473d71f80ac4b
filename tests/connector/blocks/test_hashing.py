import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.connector.blocks import BlockHashChain, MultimodalInput, PrefixKeys, SharedPrefix
from kvstore.errors import InvalidRequestError
from kvstore.hashing import hash_blocks

tokens = st.integers(0, 2**31 - 1)


@given(st.lists(st.lists(tokens, max_size=9), max_size=8), st.integers(1, 5), st.sampled_from([(), ("lora-a", 7)]))
def test_hashes_do_not_depend_on_the_pieces_in_which_tokens_arrive(pieces, block_size, extra_keys):
    chain = BlockHashChain(block_size, extra_keys)
    for piece in pieces:
        chain.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert chain.num_tokens == len(whole)
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


texts = st.sampled_from(["", "a", "b", "\u00e9"])
inputs = st.lists(
    st.builds(MultimodalInput, identifier=st.sampled_from("ab"), offset=st.integers(0, 20), length=st.integers(1, 9)),
    max_size=3,
).map(lambda items: tuple(sorted(items, key=lambda item: item.offset)))
embeds = st.none() | st.integers(0, 9).map(lambda rows: np.arange(2 * rows, dtype=np.float16).reshape(rows, 2))
shared = st.none() | st.builds(SharedPrefix, identifier=st.sampled_from("pq"), num_tokens=st.integers(1, 12))
prefix_keys = st.builds(
    PrefixKeys,
    lora_name=st.sampled_from("ab"),
    lora_path=texts,
    multimodal=inputs,
    cache_salt=texts,
    shared_prefix=shared,
    prompt_embeds=embeds,
) | st.builds(PrefixKeys, multimodal=inputs, cache_salt=texts, shared_prefix=shared, prompt_embeds=embeds)


def hashes_of(token_ids, keys, block_size=2):
    chain = BlockHashChain(block_size, keys)
    chain.extend(token_ids)
    return chain.hashes


@given(st.lists(st.lists(tokens, max_size=9), max_size=8), st.integers(1, 5), prefix_keys)
def test_with_keys_by_block_pieces_do_not_matter_either(pieces, block_size, keys):
    chain = BlockHashChain(block_size, keys)
    for piece in pieces:
        chain.extend(piece)
    whole = [token for piece in pieces for token in piece]
    by_block = [keys.of_block(at, at + block_size) for at in range(0, len(whole), block_size)]
    assert chain.hashes == hashes_of(whole, keys, block_size) == hash_blocks(whole, block_size, by_block)


@given(st.integers(1, 12), st.integers(1, 5), prefix_keys, prefix_keys)
def test_equal_hash_equal_keys_so_far(num_tokens, block_size, one, other):
    token_ids = list(range(num_tokens))
    pairs = zip(hashes_of(token_ids, one, block_size), hashes_of(token_ids, other, block_size), strict=True)
    same = True
    for index, (a, b) in enumerate(pairs):
        block = index * block_size, (index + 1) * block_size
        same = same and one.of_block(*block) == other.of_block(*block)
        assert (a == b) == same


def test_no_keys_hash_as_no_keys():
    assert hashes_of(range(6), PrefixKeys()) == hashes_of(range(6), ()) == hash_blocks(range(6), 2)


def test_a_salt_changes_all_hashes_though_it_is_in_the_first_block_alone():
    plain, salted = hashes_of(range(6), ()), hashes_of(range(6), PrefixKeys(cache_salt="s"))
    assert not set(plain) & set(salted)
    assert salted == hash_blocks(range(6), 2, [[("salt", "s")]])


def test_salts_part_behind_a_shared_prefix():
    prefix = SharedPrefix(identifier="p", num_tokens=5)
    mine, yours = (hashes_of(range(8), PrefixKeys(cache_salt=salt, shared_prefix=prefix)) for salt in ("a", "b"))
    assert mine[:2] == yours[:2] == hash_blocks(range(8), 2, [[("shared", "p")]])[:2]
    assert not set(mine[2:]) & set(yours[2:])
    assert not set(mine) & set(hashes_of(range(8), ()) + hashes_of(range(8), PrefixKeys(cache_salt="a")))


def test_blocks_before_an_image_are_shared():
    cat, dog = (
        hashes_of(range(6), PrefixKeys(multimodal=(MultimodalInput(identifier=name, offset=2, length=2),)))
        for name in ("cat", "dog")
    )
    assert cat[0] == dog[0] == hashes_of(range(6), ())[0]
    assert cat[1] != dog[1]
    assert cat[2] != dog[2]


def test_what_looks_alike_is_told_apart():
    variants = [
        PrefixKeys(lora_name="x"),
        PrefixKeys(lora_name="x", lora_path="x"),
        PrefixKeys(cache_salt="x"),
        PrefixKeys(lora_name="x", cache_salt="x"),
        PrefixKeys(lora_name="lora", lora_path="x"),
        PrefixKeys(multimodal=(MultimodalInput(identifier="x", offset=0, length=2),)),
        PrefixKeys(multimodal=(MultimodalInput(identifier="x", offset=1, length=1),)),
        PrefixKeys(prompt_embeds=np.zeros((2, 1))),
        PrefixKeys(prompt_embeds=np.zeros((1, 1))),
        ["x"],
        ["lora", "x", ""],
        [],
    ]
    assert len({hashes_of([1, 2], keys)[0] for keys in variants}) == len(variants)


ALL_KINDS = PrefixKeys(
    lora_name="sql",
    lora_path="/adapters/sql",
    multimodal=(MultimodalInput(identifier="cat\u00e9", offset=3, length=130),),
    cache_salt="tenant-a",
    prompt_embeds=np.arange(8, dtype="<f4").reshape(4, 2),
)


def test_hashes_with_keys_never_change():
    """Pages outlive this version under these hashes."""
    first, second = hashes_of([1, 2, 3, 4], ALL_KINDS)
    assert first.hex() == "56066711b1901d9a91ff77ea022c7a0eaff2cc59017f7274ba6e17d8515223aa"
    assert second.hex() == "db530f92e10b5398bac7a68927eb90efa55f74d99a7e04c993a90932e07002a8"
    salted = b"\x92\x93\xa4lora\xa3sql\xad/adapters/sql\x92\xa4salt\xa8tenant-a"
    data = bytes([1, 0, 0, 0, 2, 0, 0, 0])
    keys = PrefixKeys(lora_name="sql", lora_path="/adapters/sql", cache_salt="tenant-a")
    root = hashlib.sha256(b"kvstore/block-hash/1/2").digest()
    assert hashes_of([1, 2], keys) == [hashlib.sha256(root + data + salted).digest()]


@pytest.mark.parametrize("seed", ["0", "1234"])
def test_every_process_agrees(seed):
    program = (
        "import numpy as np\n"
        "from kvstore.connector.blocks import BlockHashChain, MultimodalInput, PrefixKeys\n"
        "keys = PrefixKeys(lora_name='sql', lora_path='/adapters/sql', cache_salt='tenant-a',\n"
        "    multimodal=(MultimodalInput(identifier='cat\\u00e9', offset=3, length=130),),\n"
        "    prompt_embeds=np.arange(8, dtype='<f4').reshape(4, 2))\n"
        "chain = BlockHashChain(2, keys)\n"
        "chain.extend(range(300))\n"
        "print(chain.hashes[-1].hex())\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert answer.strip() == hashes_of(range(300), ALL_KINDS)[-1].hex()


def test_a_bad_token_leaves_a_chain_with_keys_as_it_was():
    chain = BlockHashChain(2, ALL_KINDS)
    chain.extend([1, 2, 3])
    with pytest.raises(InvalidRequestError, match="-5"):
        chain.extend([4, 5, -5])
    chain.extend([4])
    assert chain.hashes == hashes_of([1, 2, 3, 4], ALL_KINDS)


@pytest.mark.parametrize("keys", ["salt", b"salt", [("lora", "a")], [1.5], [None]])
def test_keys_that_do_not_hold_for_the_whole_request_are_refused(keys):
    with pytest.raises(InvalidRequestError, match="key"):
        BlockHashChain(2, keys)
