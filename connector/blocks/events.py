"""KV cache events: what changed in the prefix cache, for those who route requests by it."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.connector.blocks.extra_keys import EventKey
from kvstore.connector.blocks.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one request can be hit from now on."""

    block_hashes: tuple[BlockHash, ...]
    """In the order of the tokens. Blocks that can never serve a hit (outside a window, say) are left out; none may be
    left."""
    parent_block_hash: BlockHash | None
    """Of the block before ``token_ids``; None at the start of a prompt."""
    token_ids: tuple[int, ...]
    """Tokens of all blocks from the first to the last one, those left out included."""
    block_size: int
    lora_name: str | None
    extra_keys: tuple[tuple[EventKey, ...] | None, ...]
    """For each of ``block_hashes`` what besides tokens it depends on."""
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block can't be hit any longer. Another one may still carry the same hash."""

    block_hash: BlockHash
    group_idx: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be hit any longer."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
