"""Blocks by cache group: what the manager hands out and takes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

from kvstore.connector.blocks.block import Block
from kvstore.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks by cache group, in the order of a request's tokens. Not to be changed by who gets it."""

    blocks: tuple[Sequence[Block], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(tuple((*mine, *others) for mine, others in zip(self.blocks, other.blocks, strict=True)))

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(self, allow_none: Literal[True]) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """The blocks' ids, one list a group; None, where allowed, instead of nothing but empty lists."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """The ids of the blocks that carry no hash, for engines with one group.

        Raises:
            InvalidRequestError: there are several groups.
        """
        if len(self.blocks) != 1:
            raise InvalidRequestError(f"unhashed ids in one list are of one group, there are {len(self.blocks)}")
        (group,) = self.blocks
        return [block.block_id for block in group if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """The ids of the blocks that carry no hash, one list a group, without the null block."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, of as many groups."""
        return KVCacheBlocks(((),) * len(self.blocks))
