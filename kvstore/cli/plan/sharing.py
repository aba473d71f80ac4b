"""What one node of a simulation has to offer and to tell Redis. No events here, and no time.

As in a node (:mod:`kvstore.store.write_back`): one thread tells which pages were used, those of many requests at once,
and offers new ones, oldest first, in batches. What was used and is in Redis no longer is offered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence

from kvstore.store.write_back import MOST_UNSHARED_PAGES, SHARE_BYTES, SHARE_PAGES

_FEWEST = 8
"""Blocks that are taken at once: where each is several writes of a node, these are one event."""
Offered = tuple[Sequence[int], list[int]]
"""A prompt, and some of its blocks."""


class Sharing:
    """A node's queue, and what it has not told yet.

    Args:
        arena_bytes: of the node.
        block_bytes: of a block.
        pages_per_block: pages of the engines in it.
    """

    def __init__(self, arena_bytes: int, block_bytes: int, pages_per_block: int) -> None:
        most_bytes = min(SHARE_BYTES, arena_bytes // 8)
        self._at_once = max(_FEWEST, min(most_bytes // block_bytes, SHARE_PAGES // pages_per_block))
        self._most = max(1, MOST_UNSHARED_PAGES // pages_per_block)
        self._queue: deque[tuple[int, Sequence[int]]] = deque()
        self._queued: set[int] = set()
        self._used: dict[int, Sequence[int]] = {}
        self.busy = False
        """Whether its thread waits for Redis."""
        self.awaited = False
        """Whether it will look again by itself."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._queue or self._used)

    def __len__(self) -> int:
        """How many blocks wait to be offered."""
        return len(self._queue)

    @property
    def offers(self) -> bool:
        """Whether there are pages to offer."""
        return bool(self._queue)

    def set_aside(self, blocks: Iterable[int]) -> None:
        """Blocks that were taken, and that nobody is to queue until they are put back."""
        self._queued.update(blocks)

    def put_back(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """What was set aside is the first to be taken."""
        self._queue.extendleft((block, prompt) for block in reversed(blocks))

    def use(self, prompt: Sequence[int], hits: int) -> None:
        """The leading blocks of a prompt were read in the arena."""
        for block in prompt[:hits]:
            self._used[block] = prompt

    def offer(self, prompt: Sequence[int], blocks: Iterable[int]) -> int:
        """Blocks are new in the arena. Returns how many older ones are passed over for them."""
        for block in blocks:
            if block not in self._queued:
                self._queued.add(block)
                self._queue.append((block, prompt))
        over = max(0, len(self._queue) - self._most)
        for _ in range(over):
            self._queued.discard(self._queue.popleft()[0])
        return over

    def take_used(self) -> dict[int, Sequence[int]]:
        """What was used since the last call, each block with a prompt that has it."""
        used, self._used = self._used, {}
        return used

    def take(self, arena: Container[int]) -> tuple[list[Offered], int]:
        """The oldest blocks in the queue that are in the arena still, as many as one write takes; and how many were
        gone."""
        taken: list[Offered] = []
        gone = left = 0
        while self._queue and left < self._at_once:
            block, prompt = self._queue.popleft()
            self._queued.discard(block)
            if block not in arena:
                gone += 1
                continue
            left += 1
            if taken and taken[-1][0] is prompt:
                taken[-1][1].append(block)
            else:
                taken.append((prompt, [block]))
        return taken, gone
