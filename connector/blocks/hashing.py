"""The block hashes of one request, growing as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

from kvstore.errors import InvalidRequestError
from kvstore.hashing import ExtraKey, TokenIds, encode_extra_keys, hash_block, pack_tokens, root_hash

BlockHash = NewType("BlockHash", bytes)
"""32 bytes that name a full block and everything before it. A type of its own, so that no other bytes pass for one."""


class BlockHashChain:
    """Hashes each block of a request once, when its last token arrives.

    After the same tokens, in pieces of any length, :attr:`hashes` equals ``kvstore.hash_blocks`` over all of them.

    Args:
        block_size: tokens a block, at least 1.
        extra_keys: what besides tokens the KV of the whole request depends on (LoRA name, salt).

    Raises:
        InvalidRequestError: a block size below 1, or an extra key that is neither str, int nor bytes.
    """

    def __init__(self, block_size: int, extra_keys: Sequence[ExtraKey] = ()) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise InvalidRequestError(f"block_size must be an integer of at least 1, got {block_size!r}")
        self.hashes: list[BlockHash] = []
        """One for each full block so far. Grows in place: a request may hand it out as its ``block_hashes``."""
        self._block_bytes = len(pack_tokens([0])) * block_size
        self._extra = encode_extra_keys(extra_keys)
        self._parent = root_hash(block_size)
        self._tail = b""  # packed tokens of the block that is not full yet

    def extend(self, token_ids: TokenIds) -> None:
        """Takes the request's next tokens.

        Raises:
            InvalidRequestError: an id is not an integer between 0 and 2³¹-1; then none of the tokens was taken.
        """
        data = self._tail + pack_tokens(token_ids)
        width = self._block_bytes
        full = len(data) - len(data) % width
        for start in range(0, full, width):
            self._parent = hash_block(self._parent, data[start : start + width], self._extra)
            self.hashes.append(BlockHash(self._parent))
        self._tail = data[full:]
