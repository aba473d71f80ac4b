"""Stack distances of a request trace: the smallest cache that hits each use of a block, in one pass.

Least recently used keeps in a larger cache all that it keeps in a smaller one, so each use of a block has one smallest
cache that hits it: its place in the stack of all blocks by last use (R. L. Mattson, J. Gecsei, D. R. Slutz and I. L.
Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970). In a prompt, a block is hit
only where those before it are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

NEVER = 0
"""A first use: no cache hits it."""
_STEP = 256


class _Counter:
    """How many marks stand at or behind a place; a Fenwick tree."""

    def __init__(self, places: int) -> None:
        self._sums = [0] * (places + 1)
        self.marks = 0

    def add(self, place: int, amount: int) -> None:
        self.marks += amount
        sums, size = self._sums, len(self._sums)
        place += 1
        while place < size:
            sums[place] += amount
            place += place & -place

    def before(self, place: int) -> int:
        sums, total = self._sums, 0
        while place > 0:
            total += sums[place]
            place &= place - 1
        return total


def needed_pages(prompts: Sequence[Sequence[int]], progress: Callable[[int], None]) -> list[list[int]]:
    """For each block of each prompt, the fewest pages of a cache that hits it; ``NEVER`` from the first new block on.

    Args:
        prompts: the blocks of each prompt, head first, each once.
        progress: told now and then how many prompts more are done.
    """
    last: dict[int, int] = {}
    counter = _Counter(sum(map(len, prompts)))
    place = 0
    needed = []
    for number, blocks in enumerate(prompts, 1):
        fewest = 0
        row = []
        for block in blocks:
            before = last.get(block)
            if before is None:
                break
            fewest = max(fewest, counter.marks - counter.before(before))
            row.append(fewest)
        needed.append(row + [NEVER] * (len(blocks) - len(row)))
        for block in reversed(blocks):  # the head was used last
            if block in last:
                counter.add(last[block], -1)
            last[block] = place
            counter.add(place, 1)
            place += 1
        if not number % _STEP:
            progress(_STEP)
    progress(len(prompts) % _STEP)
    return needed
