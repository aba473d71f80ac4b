"""The block hashes of one request, growing as its tokens arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import NewType, cast

from kvstore.connector.blocks.extra_keys import PrefixKeys
from kvstore.errors import InvalidRequestError
from kvstore.hashing import (
    ExtraKey,
    TaggedKey,
    TokenIds,
    encode_by_block,
    encode_extra_keys,
    hash_partial,
    hash_run,
    pack_tokens,
    root_hash,
)

BlockHash = NewType("BlockHash", bytes)
"""32 bytes that name a full block and everything before it. A type of its own, so that no other bytes pass for one."""


class BlockHashChain:
    """Hashes each block of a request once, when its last token arrives.

    After the same tokens, in pieces of any length, :attr:`hashes` equals ``kvstore.hash_blocks`` over all of them,
    with the same flat keys, or with what :meth:`PrefixKeys.of_block` says of each block.

    Args:
        block_size: tokens a block, at least 1.
        keys: what besides tokens the KV depends on. A flat sequence of keys holds for each block of the request.

    Raises:
        InvalidRequestError: a block size below 1, or a key that is neither str, int nor bytes.
    """

    def __init__(self, block_size: int, keys: PrefixKeys | Sequence[ExtraKey] = ()) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise InvalidRequestError(f"block_size must be an integer of at least 1, got {block_size!r}")
        self.hashes: list[BlockHash] = []
        """One for each full block so far. Grows in place: a request may hand it out as its ``block_hashes``."""
        self._block_size = block_size
        self._block_bytes = len(pack_tokens([0])) * block_size
        self._parent = root_hash(block_size)
        self._tail = b""  # packed tokens of the block that is not full yet
        self._keys = keys if isinstance(keys, PrefixKeys) else _encode_flat(keys)

    @property
    def num_tokens(self) -> int:
        """So many it has taken."""
        return len(self.hashes) * self._block_size + len(self._tail) * self._block_size // self._block_bytes

    def extend(self, token_ids: TokenIds) -> None:
        """Takes the request's next tokens.

        Raises:
            InvalidRequestError: an id is not an integer between 0 and 2³¹-1; then none of the tokens was taken.
        """
        data = self._tail + pack_tokens(token_ids)
        full = len(data) - len(data) % self._block_bytes
        if full:
            hashes = hash_run(self._parent, data[:full], self._block_bytes, self._extras())
            self.hashes += cast("list[BlockHash]", hashes)
            self._parent = hashes[-1]
        self._tail = data[full:]

    def partial(self, start: int, token_ids: TokenIds, bound_to: bytes) -> BlockHash:
        """The name of a block that is not full, for whoever knows what it is bound to.

        Args:
            start: how many tokens lie before it: whole blocks, which the chain has.
            token_ids: its own.
            bound_to: see :func:`kvstore.hashing.hash_partial`.
        """
        parent = self.hashes[start // self._block_size - 1] if start else root_hash(self._block_size)
        keys = self._keys
        extra = keys if isinstance(keys, bytes) else encode_extra_keys(keys.of_block(start, start + len(token_ids)))
        return BlockHash(hash_partial(parent, pack_tokens(token_ids), extra, bound_to))

    def _extras(self) -> Iterator[bytes]:
        """Encoded keys of the blocks behind those that are hashed, without an end."""
        if isinstance(self._keys, bytes):
            return repeat(self._keys)
        keys = self._keys.from_block(len(self.hashes) * self._block_size, self._block_size)
        if not self._keys.is_uniform:
            return encode_by_block(keys)
        first, others = islice(encode_by_block(keys), 2)
        return chain([first], repeat(others))


def _encode_flat(keys: Sequence[ExtraKey | TaggedKey]) -> bytes:
    if isinstance(keys, str | bytes):
        raise InvalidRequestError(f"keys must be a sequence of keys, not one key: {keys!r}")
    for key in keys:
        if isinstance(key, tuple):  # kvstore.hash_blocks would take it for all keys of one block
            raise InvalidRequestError(f"an extra key of the whole request must be str, int or bytes, got {key!r}")
    return encode_extra_keys(keys)
