"""The two digests: block hashes, which name pages by their prefix, and the checksum of a page's bytes.

A block's hash is SHA-256 over its parent's hash, its token ids (little-endian 32-bit) and its extra keys. The chain
starts from a constant of the block size. There is no random seed anywhere: every process on every machine agrees.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import cast

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequestError

HASH_BYTES = 32
"""Length of every block hash, in bytes."""

ExtraKey = str | int | bytes
"""One thing besides the tokens that a block's KV depends on: LoRA name, multimodal identifier, salt."""

TaggedKey = tuple[ExtraKey, ...]
"""Several that belong together, the first of them saying what they are: ``("lora", name, path)``."""

_KEY_TYPES = (str, int, bytes)

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
        ids = token_ids if isinstance(token_ids, list | tuple) else list(token_ids)
    except TypeError as error:
        raise InvalidRequestError(f"token ids must be a sequence of integers, got {token_ids!r}") from error
    try:
        # Piece by piece: what is unpacked for the call then never leaves the processor's caches.
        data = b"".join([_pack(ids[start : start + 1024]) for start in range(0, len(ids), 1024)])
    except struct.error:
        data = b""
    # Ascii: no id's last byte has its highest bit set, which is the sign.
    if len(data) != 4 * len(ids) or not data[3::4].isascii():
        wrong = next(token for token in ids if not _is_token(token))
        raise InvalidRequestError(f"token ids must be integers between 0 and 2147483647, got {wrong!r}")
    return data


def encode_extra_keys(keys: Sequence[ExtraKey | TaggedKey]) -> bytes:
    """A canonical encoding of one block's extra keys: one MessagePack array, tagged keys arrays in it. Empty for none.

    Raises:
        InvalidRequestError: a key is neither str, int, bytes nor a tuple of them, or can't be encoded.
    """
    return next(encode_by_block([keys]))


def encode_by_block(keys_by_block: Iterable[Sequence[ExtraKey | TaggedKey]]) -> Iterator[bytes]:
    """:func:`encode_extra_keys` for many blocks in turn, each when it is asked for."""
    pack = msgpack.Packer(use_bin_type=True).pack
    for keys in keys_by_block:
        if not keys:
            yield b""
            continue
        for key in keys:
            for part in key if isinstance(key, tuple) else (key,):
                if not isinstance(part, _KEY_TYPES):
                    raise InvalidRequestError(f"an extra key must be str, int, bytes or a tuple of them, got {key!r}")
        try:
            yield pack(tuple(keys))
        except (OverflowError, ValueError) as error:  # more than 64 bits; half of a surrogate pair
            raise InvalidRequestError(f"extra keys {list(keys)!r} can't be encoded: {error}") from error


def hash_partial(parent: bytes, packed_tokens: bytes, extra: bytes, bound_to: bytes) -> bytes:
    """The name of a block that is not full, for those alone who know what it is bound to. No full block has it.

    Args:
        parent: the hash of the block before it.
        packed_tokens: its tokens so far.
        extra: its extra keys, encoded.
        bound_to: the 16 bytes of a ticket's id.
    """
    return hashlib.sha256(b"kvstore/partial/1\n" + bound_to + parent + packed_tokens + extra).digest()


def hash_run(parent: bytes, packed_tokens: bytes, block_bytes: int, extras: Iterable[bytes]) -> list[bytes]:
    """The chained hashes of full blocks in a row.

    Args:
        parent: the hash of the block before them.
        packed_tokens: theirs, as :func:`pack_tokens` gives them: a multiple of ``block_bytes``.
        block_bytes: packed tokens a block.
        extras: for each of them, as :func:`encode_extra_keys` gives it; what is beyond them is left alone.
    """
    hashes: list[bytes] = []
    add = hashes.append
    new = hashlib.sha256().copy  # OpenSSL starts faster from a copy
    # Extras come second: none is asked for when the tokens are at their end.
    for (tokens,), extra in zip(struct.iter_unpack(f"{block_bytes}s", packed_tokens), extras, strict=False):
        state = new()
        state.update(parent + tokens + extra)
        parent = state.digest()
        add(parent)
    return hashes


def hash_blocks(
    token_ids: TokenIds,
    block_size: int,
    extra_keys: Sequence[ExtraKey] | Sequence[Sequence[ExtraKey | TaggedKey]] = (),
) -> list[bytes]:
    """The chained hashes of a prompt's full blocks.

    Args:
        token_ids: the prompt: integers from 0 to 2³¹-1, or an array of any integer dtype and shape ``(tokens,)``.
            Tokens behind the last full block are left out.
        block_size: tokens a block, from 1 to 2³¹-1.
        extra_keys: what besides tokens the KV depends on. A flat sequence (``("lora-a", "salt")``) holds for the
            whole prompt; a sequence of sequences gives the keys of each block in turn (``[[("lora", "a", "/a")]]``),
            blocks behind its end have none.

    Returns:
        One hash of 32 bytes for each of the ``len(token_ids) // block_size`` full blocks.

    Raises:
        InvalidRequestError: a block size or a token id out of its range, or an extra key of another type.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 0 < block_size < 1 << 31:
        raise InvalidRequestError(f"block_size must be an integer from 1 to {(1 << 31) - 1}, got {block_size!r}")
    data = pack_tokens(token_ids)
    width = 4 * block_size
    full = len(data) - len(data) % width
    return hash_run(root_hash(block_size), data[:full], width, _encoded(extra_keys))


def parse_hashes(words: Iterable[str]) -> list[bytes]:
    """Block hashes as people write them: 64 hexadecimal digits each.

    Raises:
        InvalidRequestError: not such a word; the message has it.
    """
    found = []
    for word in words:
        if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * HASH_BYTES}}}", word):
            raise InvalidRequestError(f"a block hash is {2 * HASH_BYTES} hexadecimal digits, got {word!r}")
        found.append(bytes.fromhex(word))
    return found


def hash_check() -> bytes:
    """The hash of blocks that everybody knows (32 bytes): processes in which it differs find none of each other's."""
    keys: list[list[ExtraKey | TaggedKey]] = [[("lora", "name"), 7], ["salt", b"bytes"]]
    return hash_blocks(range(32), 16, keys)[-1]


def _pack(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def _is_token(value: int) -> bool:
    try:
        return struct.pack("<i", value)[3] < 0x80
    except struct.error:
        return False


def _encoded(extra_keys: Sequence[ExtraKey] | Sequence[Sequence[ExtraKey | TaggedKey]]) -> Iterator[bytes]:
    """Encoded keys of each block, without an end."""
    if isinstance(extra_keys, str | bytes):
        raise InvalidRequestError(f"extra_keys must be a sequence of keys, not one key: {extra_keys!r}")
    if not isinstance(extra_keys, Sequence):
        raise InvalidRequestError(f"extra_keys must be a sequence of keys, got {extra_keys!r}")
    scalars = sum(isinstance(key, str | int | bytes) for key in extra_keys)
    if scalars == len(extra_keys):
        return repeat(encode_extra_keys(cast("Sequence[ExtraKey]", extra_keys)))
    if scalars or not all(isinstance(keys, Sequence) for keys in extra_keys):
        raise InvalidRequestError("extra_keys must be str, int or bytes (whole prompt) or sequences of them (by block)")
    by_block = list(encode_by_block(cast("Sequence[Sequence[ExtraKey | TaggedKey]]", extra_keys)))
    return chain(by_block, repeat(b""))


RunningChecksum = xxhash.xxh3_64
"""The same of a payload that comes in pieces."""


def checksum_of(payload: npt.NDArray[np.uint8]) -> int:
    """xxh3_64 of a payload, unsigned."""
    return xxhash.xxh3_64_intdigest(payload.data)
