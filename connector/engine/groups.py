"""An engine's cache groups, as far as they decide on hits, loads and stores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.connector.hits import NumSkipped


@dataclass(frozen=True, slots=True)
class Group:
    """One of the engine's cache groups."""

    block_size: int
    keeps: bool
    """Whether blocks stay with their request until its end, unlike those before a window."""
    num_skipped: NumSkipped
    most_blocks: int | None = None
    """That a request has at a time, however long it is; None: as many as its tokens fill."""
    is_state: bool = False
    """What a block holds is the state behind its last token, of all tokens before."""
    is_offered: bool = False
    """Of states: the engine tells which block holds which of them (``boundary_state_offloads``), and block tables do
    not: there a state moves on from block to block."""


def fails_by_block(groups: Sequence[Group]) -> bool:
    """Whether an engine can go on in front of a block that was not loaded. Only with one group of which it has all
    blocks: otherwise it has to begin again, since what it needs there was not kept, or a block's number is one of
    several groups'."""
    return len(groups) == 1 and groups[0].keeps


def hash_block_size(block_sizes: Sequence[int]) -> int:
    """Tokens between two hashes, so that each group's blocks have some."""
    return math.gcd(*block_sizes)
