"""A node's arena in a simulation: which blocks it has, in the order of a real eviction policy."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.catalog.policies import EvictionPolicy


class SimulatedArena:
    """Blocks under one policy, with what a store does to them: look up, load, store.

    Args:
        policy: a fresh one.
        capacity: blocks that fit.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self._policy = policy
        self._slots: dict[int, int] = {}
        self._blocks: list[int] = []
        self._free: list[int] = []
        self._capacity = capacity

    def __contains__(self, block: object) -> bool:
        return block in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def prefix(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here."""
        for place, block in enumerate(blocks):
            if block not in self._slots:
                return place
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> None:
        """A load has read these leading blocks of a prompt."""
        self._policy.use([self._slots[block] for block in blocks if block in self._slots])

    def store(self, blocks: Sequence[int], *, first: int = 0) -> tuple[list[int], list[int]]:
        """Take the blocks of a prompt that are not here, from place ``first`` on.

        Returns:
            Those that came, and those that left for them.
        """
        wanted = [(place, block) for place, block in enumerate(blocks) if place >= first and block not in self._slots]
        left: list[int] = []
        room = self._make_room(len(wanted), {self._slots[block] for block in blocks if block in self._slots}, left)
        came: list[int] = []
        for place, block in wanted[:room]:
            slot = self._free.pop() if self._free else len(self._blocks)
            if slot == len(self._blocks):
                self._blocks.append(block)
            self._blocks[slot] = block
            self._slots[block] = slot
            parent = self._slots.get(blocks[place - 1]) if place else None
            self._policy.insert(slot, block.to_bytes(16, "big", signed=True), parent)
            came.append(block)
        self._policy.touch([self._slots[block] for block in blocks[first:] if block in self._slots])
        return came, left

    def _make_room(self, blocks: int, held: set[int], left: list[int]) -> int:
        """Let others leave until so many fit; returns how many do. ``left`` gets those that left."""
        while self._capacity - len(self._slots) < blocks:
            victim = next((slot for slot in self._policy.victims() if slot not in held), None)
            if victim is None:
                return self._capacity - len(self._slots)
            self._policy.remove(victim)
            left.append(self._blocks[victim])
            del self._slots[self._blocks[victim]]
            self._free.append(victim)
        return blocks
