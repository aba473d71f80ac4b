"""Replays of request traces: how many blocks a cache of so many pages would have hit.

A request hits its longest resident prefix, as an engine does; then all of its blocks are stored, those that are here
already are touched, and pages of this request don't leave for it. That is what a node does for one request after the
other: ``Store.prepare_load``, ``prepare_store``, ``complete_store``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from kvstore.catalog.policies import EvictionPolicy

_STEP = 256


class Replay:
    """A cache of ``capacity`` pages under one policy, and what its requests hit."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self._policy = policy
        self._slots: dict[int, int] = {}
        self._blocks: list[int] = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def request(self, blocks: Sequence[int]) -> int:
        """Look a prompt up, load what is here, store the rest. Returns how many leading blocks were here."""
        slots = self._slots
        present = [slots[block] for block in blocks if block in slots]
        hit = 0
        for block in blocks:
            if block not in slots:
                break
            hit += 1
        policy = self._policy
        if hit:
            policy.use(present[:hit])
        new = [block for block in blocks if block not in slots] if len(present) < len(blocks) else []
        del new[self._make_room(len(new), set(present)) :]
        before = dict(zip(blocks[1:], blocks, strict=False))
        for block in new:
            slot = self._free.pop()
            slots[block] = slot
            self._blocks[slot] = block
            policy.insert(slot, block.to_bytes(8, "big"), slots.get(before.get(block, -1)))
        policy.touch([slots[block] for block in blocks if block in slots])
        return hit

    def _make_room(self, pages: int, held: set[int]) -> int:
        """Let others leave until so many pages fit. Returns how many do."""
        while len(self._free) < pages:
            victim = next((slot for slot in self._policy.victims() if slot not in held), None)
            if victim is None:
                return len(self._free)
            self._policy.remove(victim)
            del self._slots[self._blocks[victim]]
            self._free.append(victim)
        return pages


def hit_blocks(
    requests: Sequence[Sequence[int]],
    capacity: int,
    policy: EvictionPolicy,
    progress: Callable[[int], None] = lambda requests: None,
) -> int:
    """How many blocks of all requests a cache of ``capacity`` pages would have had.

    Args:
        requests: the blocks of each prompt, head first, each once.
        capacity: at least 1.
        policy: a fresh one.
        progress: told now and then how many requests more are done.
    """
    cache = Replay(policy, capacity)
    hits = 0
    for number, blocks in enumerate(requests, 1):
        hits += cache.request(blocks)
        if not number % _STEP:
            progress(_STEP)
    progress(len(requests) % _STEP)
    return hits


def hit_blocks_offline(
    requests: Sequence[Sequence[int]], capacity: int, progress: Callable[[int], None] = lambda requests: None
) -> int:
    """The same for one who knows the future: the block that is wanted again last leaves, or is not kept at all.

    This is Belady's rule (IBM Systems Journal 5(2), 1966) on single blocks, the tail first among blocks that are wanted
    again at the same time. What is a bound for single blocks is, for prefixes, a very good schedule.
    """
    never = len(requests)
    upcoming: dict[int, int] = {}
    next_use: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        next_use.append([upcoming.get(block, never) for block in requests[number]])
        upcoming.update(dict.fromkeys(requests[number], number))
    next_use.reverse()
    resident: dict[int, tuple[int, int]] = {}
    order: list[tuple[int, int, int]] = []
    hits = 0
    for number, blocks in enumerate(requests):
        whole = True
        for block in blocks:
            whole = whole and block in resident
            hits += whole
        for depth, (block, again) in enumerate(zip(blocks, next_use[number], strict=True)):
            resident.pop(block, None)
            if again < never:
                resident[block] = (-again, -depth)
                heapq.heappush(order, (-again, -depth, block))
        while len(resident) > capacity:
            again, depth, block = heapq.heappop(order)
            if resident.get(block) == (again, depth):
                del resident[block]
        if not (number + 1) % _STEP:
            progress(_STEP)
    progress(len(requests) % _STEP)
    return hits
