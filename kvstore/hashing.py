"""Block hashes: equal hash, equal prefix.

A block's hash is SHA-256 over its parent's hash, its token ids (little-endian 32-bit) and its extra keys. The chain
starts from a constant of the block size. There is no random seed anywhere: every process on every machine agrees.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import cast

import msgpack
import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequestError

HASH_BYTES = 32
"""Length of every block hash, in bytes."""

ExtraKey = str | int | bytes
"""One thing besides the tokens that a block's KV depends on: LoRA name, multimodal identifier, salt."""

TokenIds = Sequence[int] | npt.NDArray[np.integer]


def root_hash(block_size: int) -> bytes:
    """The parent of every first block of ``block_size`` tokens (32 bytes)."""
    return hashlib.sha256(b"kvstore/block-hash/1/%d" % block_size).digest()


def pack_tokens(token_ids: TokenIds) -> bytes:
    """Token ids as little-endian signed 32-bit integers, 4 bytes each.

    Raises:
        InvalidRequestError: an id is not an integer between 0 and 2³¹-1.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"token ids must be integers in one dimension, got {token_ids.dtype} of shape {token_ids.shape}"
            )
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() > 0x7FFFFFFF):
            raise InvalidRequestError("token ids must lie between 0 and 2147483647")
        return token_ids.astype("<i4").tobytes()
    try:
        # Bytes are token ids as well, one each; array() would take them for numbers that are packed already.
        packed = array("i", list(token_ids) if isinstance(token_ids, bytes | bytearray) else token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"token ids must be integers between 0 and 2147483647: {error}") from error
    if packed and min(packed) < 0:
        raise InvalidRequestError(f"token ids must lie between 0 and 2147483647, got {min(packed)}")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def encode_extra_keys(keys: Sequence[ExtraKey]) -> bytes:
    """A canonical encoding of one block's extra keys; empty for none.

    Raises:
        InvalidRequestError: a key is neither str, int nor bytes, or can't be encoded.
    """
    if not keys:
        return b""
    for key in keys:
        if not isinstance(key, str | int | bytes):
            raise InvalidRequestError(f"an extra key must be str, int or bytes, got {key!r}")
    try:
        return cast("bytes", msgpack.packb(list(keys), use_bin_type=True))
    except (OverflowError, ValueError) as error:  # more than 64 bits; half of a surrogate pair
        raise InvalidRequestError(f"extra keys {list(keys)!r} can't be encoded: {error}") from error


def hash_block(parent: bytes, packed_tokens: bytes, extra: bytes = b"") -> bytes:
    """The hash of one block: SHA-256 over parent, tokens and extra keys, as the other functions encode them."""
    return hashlib.sha256(parent + packed_tokens + extra).digest()


def hash_blocks(
    token_ids: TokenIds,
    block_size: int,
    extra_keys: Sequence[ExtraKey] | Sequence[Sequence[ExtraKey]] = (),
) -> list[bytes]:
    """The chained hashes of a prompt's full blocks.

    Args:
        token_ids: the prompt. Tokens behind the last full block are left out.
        block_size: tokens a block, at least 1.
        extra_keys: what besides tokens the KV depends on. A flat sequence (``("lora-a", "salt")``) holds for the
            whole prompt; a sequence of sequences gives the keys of each block in turn, blocks behind its end have none.

    Returns:
        One hash of 32 bytes for each of the ``len(token_ids) // block_size`` full blocks.

    Raises:
        InvalidRequestError: a block size below 1, a token id outside 0 … 2³¹-1, or an extra key of another type.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise InvalidRequestError(f"block_size must be an integer of at least 1, got {block_size!r}")
    by_block = _keys_by_block(extra_keys)
    data = pack_tokens(token_ids)
    width = 4 * block_size
    parent = root_hash(block_size)
    hashes: list[bytes] = []
    for block, start in enumerate(range(0, len(data) - width + 1, width)):
        extra = by_block[min(block, len(by_block) - 1)] if by_block else b""
        parent = hash_block(parent, data[start : start + width], extra)
        hashes.append(parent)
    return hashes


def _keys_by_block(extra_keys: Sequence[ExtraKey] | Sequence[Sequence[ExtraKey]]) -> list[bytes]:
    """Encoded keys by block; the last entry holds for every block behind it."""
    if isinstance(extra_keys, str | bytes):
        raise InvalidRequestError(f"extra_keys must be a sequence of keys, not one key: {extra_keys!r}")
    if not extra_keys:
        return []
    scalars = sum(isinstance(key, str | int | bytes) for key in extra_keys)
    if scalars == len(extra_keys):
        return [encode_extra_keys(cast("Sequence[ExtraKey]", extra_keys))]
    if scalars or not all(isinstance(keys, Sequence) for keys in extra_keys):
        raise InvalidRequestError("extra_keys must be str, int or bytes (whole prompt) or sequences of them (by block)")
    return [encode_extra_keys(keys) for keys in cast("Sequence[Sequence[ExtraKey]]", extra_keys)] + [b""]
