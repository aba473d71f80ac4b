"""Copies of blocks that are to be made before a step writes: copy-on-write of blocks that are hit inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.connector.blocks.block import KVCacheBlock


@dataclass(frozen=True, slots=True)
class KVCacheBlockCopy:
    """The whole content of one block, to be copied to another in each layer of their group."""

    source: KVCacheBlock
    destination: KVCacheBlock
    group_id: int


class BlockCopies:
    """The copies that the next step has to make, and those that it is making. It counts; the pool holds the blocks."""

    def __init__(self) -> None:
        self._pending: list[KVCacheBlockCopy] = []
        self._under_way: list[KVCacheBlockCopy] = []

    @property
    def has_pending(self) -> bool:
        """Whether copies wait to be taken."""
        return bool(self._pending)

    def add(self, copy: KVCacheBlockCopy) -> None:
        """A copy that the next step has to make. Source and destination are held for it."""
        self._pending.append(copy)

    def take(self) -> list[KVCacheBlockCopy]:
        """The copies that wait, group after group."""
        taken, self._pending = sorted(self._pending, key=lambda copy: copy.group_id), []
        self._under_way += taken
        return taken

    def end(self, copies: Sequence[KVCacheBlockCopy]) -> bool:
        """These have been made. False, and nothing has changed: one of them is not under way."""
        left = list(self._under_way)
        for copy in copies:
            if copy not in left:
                return False
            left.remove(copy)
        self._under_way = left
        return True

    def held(self) -> list[KVCacheBlock]:
        """Each block as often as it is held for a copy."""
        copies = self._pending + self._under_way
        return [block for copy in copies for block in (copy.source, copy.destination)]
