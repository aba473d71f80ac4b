"""The free block queue: blocks that no request holds, in order of eviction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstore.connector.blocks.block import KVCacheBlock


class FreeKVCacheBlockQueue:
    """Free blocks in order of eviction: the first one goes first.

    Callers keep the order: a request's blocks are appended tail first, so that of blocks last used together the end
    of their chain leaves first: the head can be hit without the tail, not the other way round.

    It is a doubly linked list and no ``deque``, because a hit takes a block out of the *middle*, and a deque needs a
    search for that. The links are in the blocks themselves, so that nothing is allocated on the way. One block that is
    not in the pool closes the list to a ring, and no operation has to treat an end as a special case.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._ends = KVCacheBlock(block_id=-1)
        self._ends.prev_free = self._ends.next_free = self._ends
        self._length = 0
        self.append_n(list(blocks))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks, the one that leaves first first. The queue must not change meanwhile."""
        block = self._ends.next_free
        while block is not self._ends:
            assert block is not None
            yield block
            block = block.next_free

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes the first ``n`` blocks out. The queue must hold that many."""
        assert n <= self._length, f"{n} blocks wanted of {self._length}"
        taken: list[KVCacheBlock] = []
        block = self._ends.next_free
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._ends.next_free, block.prev_free = block, self._ends
        self._length -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Takes one block out, wherever it stands. It must be in the queue."""
        before, behind = block.prev_free, block.next_free
        assert before is not None and behind is not None, f"block {block.block_id} is not in the free queue"
        before.next_free, behind.prev_free = behind, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Puts blocks behind all others, in the order given. None of them may be in the queue."""
        before = self._ends.prev_free
        assert before is not None
        self._insert_n(before, blocks, self._ends)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Puts blocks before all others: the first one given is the next to leave. None of them may be in the queue."""
        behind = self._ends.next_free
        assert behind is not None
        self._insert_n(self._ends, blocks, behind)

    def _insert_n(self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], behind: KVCacheBlock) -> None:
        for block in blocks:
            before.next_free, block.prev_free = block, before
            before = block
        before.next_free, behind.prev_free = behind, before
        self._length += len(blocks)
