"""Block hashes: equal hash, equal prefix, in every process."""

import hashlib
import struct
from collections import deque

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequestError
from kvstore.hashing import encode_extra_keys, hash_blocks, pack_tokens, root_hash

tokens = st.lists(st.integers(0, (1 << 31) - 1), max_size=40)
block_sizes = st.integers(1, 9)


def test_the_format() -> None:
    """The hashes are in files that outlive this version: they never change."""
    root = hashlib.sha256(b"kvstore/block-hash/1/2").digest()
    first = hashlib.sha256(root + struct.pack("<2i", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 3, 2**31 - 1)).digest()
    assert hash_blocks([1, 2, 3, 2**31 - 1, 5], 2) == [first, second]
    extra = msgpack.packb(["lora", 7, b"salt"])
    salted = hashlib.sha256(root + struct.pack("<2i", 1, 2) + extra).digest()
    assert hash_blocks([1, 2], 2, ["lora", 7, b"salt"]) == [salted]
    assert hash_blocks(range(32), 16)[1].hex() == "143c74e14b5c3abb6bf3495a358895847730ef0c4f0499f9a468f9b1bb3e0ff3"


@given(tokens, tokens, block_sizes)
def test_equal_hash_equal_prefix(one: list[int], other: list[int], size: int) -> None:
    for place, (a, b) in enumerate(zip(hash_blocks(one, size), hash_blocks(other, size), strict=False)):
        end = (place + 1) * size
        assert (a == b) == (one[:end] == other[:end])


@given(tokens, block_sizes)
def test_one_hash_for_each_full_block(ids: list[int], size: int) -> None:
    hashes = hash_blocks(ids, size)
    assert len(hashes) == len(set(hashes)) == len(ids) // size
    assert hash_blocks(ids[: len(ids) // size * size], size) == hashes


@given(tokens, block_sizes)
def test_block_by_block_is_the_same(ids: list[int], size: int) -> None:
    parent, chain = root_hash(size), []
    for start in range(0, len(ids) - size + 1, size):
        parent = hashlib.sha256(parent + pack_tokens(ids[start : start + size])).digest()
        chain.append(parent)
    assert hash_blocks(ids, size) == chain


def test_block_sizes_do_not_mix() -> None:
    assert hash_blocks([1, 2], 1)[0] != hash_blocks([1], 1)[0] or root_hash(1) != root_hash(2)
    assert not set(hash_blocks(range(64), 16)) & set(hash_blocks(range(64), 32))


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16, np.uint64, ">i4"])
def test_arrays_hash_as_lists_do(kind: str) -> None:
    ids = [0, 1, 65535, 42]
    assert hash_blocks(np.array(ids, kind), 2) == hash_blocks(ids, 2)


def test_anything_with_integers_in_it_will_do() -> None:
    assert hash_blocks(np.array([]), 2) == []
    assert hash_blocks((1, 2), 2) == hash_blocks(range(1, 3), 2) == hash_blocks([np.int64(1), np.uint8(2)], 2)
    assert hash_blocks(deque([1, 2]), 2) == hash_blocks([1, 2], 2)
    long = range(5000, 8000)
    assert pack_tokens(long) == pack_tokens(list(long)) == np.array(long, "<i4").tobytes()
    assert hash_blocks(np.arange(8)[::2], 2) == hash_blocks([0, 2, 4, 6], 2)


def test_bytes_are_token_ids_one_each() -> None:
    assert hash_blocks(b"abcd", 2) == hash_blocks([97, 98, 99, 100], 2) == hash_blocks(bytearray(b"abcd"), 2)


@pytest.mark.parametrize(
    "ids",
    [
        [1, -1],
        [1 << 31],
        [1 << 70],
        [1.5],
        ["1"],
        "12",
        [None],
        np.array([1, -1]),
        np.array([1 << 31]),
        np.array([1 << 63], np.uint64),
        np.array([1.0, 2.0]),
        np.array([True]),
        np.array([[1, 2], [3, 4]]),
        np.array(7),
    ],
)
def test_what_is_no_token_is_refused(ids: object) -> None:
    with pytest.raises(InvalidRequestError, match="token ids"):
        hash_blocks(ids, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "16", None])
def test_what_is_no_block_size_is_refused(size: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"block_size .* got {size!r}"):
        hash_blocks([1], size)  # type: ignore[arg-type]


def test_flat_extra_keys_hold_for_the_whole_prompt() -> None:
    plain, salted = hash_blocks(range(6), 2), hash_blocks(range(6), 2, ["salt"])
    assert not set(plain) & set(salted)
    assert salted == hash_blocks(range(6), 2, [["salt"], ["salt"], ["salt"]])


def test_extra_keys_by_block_hold_for_theirs() -> None:
    plain = hash_blocks(range(6), 2)
    image = hash_blocks(range(6), 2, [[], ["image"]])
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    assert image[2] != plain[2], "a block behind another prefix"
    assert image[2] != hash_blocks(range(6), 2, [[], ["image"], ["image"]])[2], "keys behind the end are none"


def test_tagged_keys() -> None:
    tagged = [[("lora", "a", "/a"), ("salt", "s")], [("mm", "cat", -2)]]
    first = hashlib.sha256(root_hash(1) + struct.pack("<i", 5) + msgpack.packb(tagged[0])).digest()
    second = hashlib.sha256(first + struct.pack("<i", 6) + b"\x91\x93\xa2mm\xa3cat\xfe").digest()
    third = hashlib.sha256(second + struct.pack("<i", 7)).digest()
    assert hash_blocks([5, 6, 7], 1, tagged) == [first, second, third]


def test_extra_keys_of_other_types_and_splits_differ() -> None:
    variants = [["1"], [1], [b"1"], ["1", ""], ["", "1"], ["11"], ["1", "1"], [True], []]
    variants += [[("1",)], [("1", "")], [("1",), ()], [("1", "1")], [("1",), "1"], [("1",), ("1",)], [()]]
    hashes = [hash_blocks([5], 1, [keys])[0] for keys in variants]
    assert len(set(hashes)) == len(variants)
    assert encode_extra_keys([]) == b""


@pytest.mark.parametrize(
    "keys",
    ["salt", b"salt", ["a", ["b"]], ["a", ("b",)], [1.5], [[1.5]], [None], [["a"], [None]], [[["a"]]], [[((),)]]],
)
def test_what_is_no_extra_key_is_refused(keys: object) -> None:
    with pytest.raises(InvalidRequestError, match="extra"):
        hash_blocks([1, 2], 1, keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [1 << 64, -(1 << 63) - 1, "\ud800"])
def test_extra_keys_that_cannot_be_encoded_are_refused(key: object) -> None:
    with pytest.raises(InvalidRequestError, match="can't be encoded"):
        hash_blocks([1], 1, [key])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [-1, 1 << 31, 1 << 70, 1.5, "1", None])
def test_a_wrong_token_is_named(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"got {wrong!r}$"):
        pack_tokens([*range(3000), wrong, 5])  # type: ignore[list-item]
