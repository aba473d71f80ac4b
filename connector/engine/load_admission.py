"""Admission of loads: which of them may hold blocks of the engine at the same time.

A request holds blocks from the moment its load is planned until the engine computes the rest of it, and nobody can take
them back meanwhile. vLLM keeps free what such requests still need, but counts too little in groups with windows: from
the few blocks that a request may have there at a time it subtracts the places before the window, which have none. Two
loads could take nearly all blocks, and each then wait for those of the other, for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvstore.connector.engine.groups import Group


@dataclass(frozen=True, slots=True)
class _Claim:
    held: frozenset[int]
    needed: int


class LoadAdmission:
    """The requests that hold blocks for a load, on the scheduler's thread.

    A load is admitted while the blocks of all of them and those that any one still needs fit together: then the engine
    can go on with whichever it takes first once nothing else runs, and what runs ends, or gives its blocks back. Models
    without windows are left to the engine. ``num_blocks`` is how many it can give to requests; it takes blocks for
    ``lookahead`` more tokens than a request has: such as it guesses.
    """

    def __init__(self, groups: Sequence[Group], num_blocks: int, lookahead: int = 0) -> None:
        self._groups = tuple(groups)
        self._num_blocks = num_blocks
        self._lookahead = lookahead
        self._has_windows = any(not group.keeps and not group.is_state for group in groups)
        self._claims: dict[str, _Claim] = {}
        self._held: Counter[int] = Counter()  # by block, how many of them: requests share what the engine had itself
        self._refused: set[str] = set()
        self._next = ""  # was refused first, and goes before all others

    @property
    def holders(self) -> AbstractSet[str]:
        """Requests whose load was planned, and that did not give their blocks back, or run, since."""
        return self._claims.keys()

    def admits(self, request_id: str, num_tokens: int, hit: int) -> bool:
        """Whether a load may begin now. One that nobody is beside always may.

        Args:
            request_id: whose load.
            num_tokens: of the request.
            hit: leading tokens that the engine has behind the load.
        """
        if not self._claims or not self._has_windows:
            return True
        if self._next in ("", request_id):
            needed = max(self._needed(num_tokens, hit), *(claim.needed for claim in self._claims.values()))
            if len(self._held) + self._places(hit) + needed <= self._num_blocks:
                return True
            self._next = request_id
        self._refused.add(request_id)
        return False

    def waits(self, request_id: str) -> bool:
        """Whether it was refused and would be again, whatever the answer for its prefix: one before it waits, too."""
        return request_id in self._refused and bool(self._claims) and self._next not in ("", request_id)

    def enter(self, request_id: str, num_tokens: int, hit: int, block_ids: Collection[int]) -> None:
        """Its load is planned.

        Args:
            request_id: whose load, with ``num_tokens`` and ``hit`` as for :meth:`admits`.
            block_ids: all that it has.
        """
        self.leave(request_id)
        if not self._claims:
            self._next = ""  # the engine has taken another one first
        held = frozenset(block_ids if self._has_windows else ())
        self._claims[request_id] = _Claim(held, self._needed(num_tokens, hit))
        self._held.update(held)

    def release(self, request_id: str) -> bool:
        """It holds no blocks, or it runs. Returns whether it held some for a load."""
        claim = self._claims.pop(request_id, None)
        if claim is None:
            return False
        for block_id in claim.held:
            self._held[block_id] -= 1
            if not self._held[block_id]:
                del self._held[block_id]
        return True

    def leave(self, request_id: str) -> bool:
        """The same, and it waits for no load either."""
        self._refused.discard(request_id)
        if self._next == request_id:
            self._next = ""
        return self.release(request_id)

    def _places(self, hit: int) -> int:
        """Blocks that a load holds, at most: some of them others may hold as well."""
        return sum(-(-hit // group.block_size) - group.num_skipped(hit) // group.block_size for group in self._groups)

    def _needed(self, num_tokens: int, hit: int) -> int:
        """Blocks that it needs beside these to go on, at most."""
        needed = 0
        for group in self._groups:
            rest = max(0, -(-(num_tokens + self._lookahead) // group.block_size) - -(-hit // group.block_size))
            needed += rest if group.most_blocks is None else min(rest, group.most_blocks)
        return needed
