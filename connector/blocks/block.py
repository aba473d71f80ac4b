"""A KV cache block: the engine's place for the KV of ``block_size`` consecutive tokens, in each layer of one group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.connector.blocks.hashing import BlockHash


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """What the pool knows of one block. Blocks are compared by identity: there is one for each id.

    A block is *free* when ``ref_cnt`` is 0 and *cached* when it has a hash. A block may be both: it can still be hit
    until it is given to someone else.
    """

    block_id: int
    """Its place in the engine's KV tensors, 0 … number of blocks - 1. -1: a page that is in kvstore, not here."""
    ref_cnt: int = 0
    """How many requests hold it. Not counted for the null block."""
    block_hash: BlockHash | None = None
    """Set while the block is full and may be found by this hash."""
    group_id: int = 0
    """In which group it is found by its hash; says nothing without one."""
    tail_tokens: int = 0
    """Where ``block_hash`` is that of a prompt's tail, and not of the full block: the prompt's tokens up to there."""
    more_hashes: tuple[BlockHash, ...] = ()
    """Tails that it is found by besides ``block_hash``."""
    is_null: bool = False
    """The null block stands for tokens that need no block. It is never cached, freed or given to a request as new."""

    prev_free: KVCacheBlock | None = field(default=None, repr=False)
    """Neighbours in the free queue, which alone may change them; None while the block is not in it."""
    next_free: KVCacheBlock | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks by cache group, in the order of a request's tokens: what the manager hands out and takes back.

    Not to be changed by who gets it.
    """

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The blocks' ids, one list a group."""
        return tuple([block.block_id for block in group] for group in self.blocks)
