"""Which loads may hold blocks of the engine at the same time.

A request holds blocks from the moment its load is planned until the engine computes the rest of it, and nobody can take
them back meanwhile. vLLM keeps free what such requests still need, but counts too little in groups with windows: from
the few blocks that a request may have there at a time it subtracts the places before the window, which have none. Two
loads could take nearly all blocks, and each then wait for those of the other, for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from connector.groups import Group


@dataclass(frozen=True, slots=True)
class Claim:
    """What a load takes of the engine's blocks, all groups together."""

    held: int
    """While it lasts, at most."""
    needed: int
    """Beside these, to go on from there, at most."""


class Room:
    """The requests that hold blocks for a load, on the scheduler's thread.

    A load is admitted while the blocks of all of them and those that any one still needs fit together: then the engine
    can go on with whichever it takes first once nothing else runs, and what runs ends, or gives its blocks back.

    Args:
        groups: the model's cache groups.
        num_blocks: that the engine can give to requests.
        lookahead: tokens behind those of a request that it takes blocks for: such as it guesses.
    """

    def __init__(self, groups: Sequence[Group], num_blocks: int, lookahead: int = 0) -> None:
        self._groups = tuple(groups)
        self._num_blocks = num_blocks
        self._lookahead = lookahead
        self._claims: dict[str, Claim] = {}
        self._refused: set[str] = set()
        self._next = ""  # was refused first, and goes before all others

    @property
    def holders(self) -> AbstractSet[str]:
        """Requests whose load was planned, and that did not leave since."""
        return self._claims.keys()

    def admits(self, request_id: str, num_tokens: int, hit: int) -> bool:
        """Whether a load may begin now. One that nobody is beside always may.

        Args:
            request_id: whose load.
            num_tokens: of the request.
            hit: leading tokens that the engine has behind the load.
        """
        if not self._claims:
            return True
        if not self._next:
            claims = [*self._claims.values(), self._claim(num_tokens, hit)]
            if sum(each.held for each in claims) + max(each.needed for each in claims) <= self._num_blocks:
                return True
            self._next = request_id
        self._refused.add(request_id)
        return False

    def waits(self, request_id: str) -> bool:
        """Whether it was refused and would be again, whatever the answer for its prefix: one before it waits, too."""
        return request_id in self._refused and bool(self._claims) and self._next not in ("", request_id)

    def enter(self, request_id: str, num_tokens: int, hit: int) -> None:
        """Its load is planned; arguments as for :meth:`admits`."""
        self._claims[request_id] = self._claim(num_tokens, hit)

    def leave(self, request_id: str) -> bool:
        """It runs, has given its blocks back, has ended, or asks anew. Returns whether it held blocks."""
        self._refused.discard(request_id)
        if self._next == request_id:
            self._next = ""
        return self._claims.pop(request_id, None) is not None

    def _claim(self, num_tokens: int, hit: int) -> Claim:
        held = needed = 0
        for group in self._groups:
            end, size = -(-hit // group.block_size), group.block_size
            held += end - group.num_skipped(hit) // size
            rest = max(0, -(-(num_tokens + self._lookahead) // size) - end)
            needed += rest if group.most_blocks is None else min(rest, group.most_blocks)
        return Claim(held, needed)
