"""How long a prefix is a hit when several cache groups have to agree on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

NumSkipped = Callable[[int], int]
"""How many leading tokens a group does not need any more when so many are computed: 0 for full attention, those before
the window of the next token for a sliding window."""


def longest_hit(
    presence: Sequence[Sequence[bool]],
    block_sizes: Sequence[int],
    num_skipped: Sequence[NumSkipped],
    num_local: int,
    limit: int,
) -> int:
    """Tokens of the longest prefix that the engine's own blocks and kvstore's pages make together.

    Args:
        presence: for each group whether kvstore has the page of each block, from the first one on.
        block_sizes: tokens a block, by group.
        num_skipped: by group.
        num_local: leading tokens that the engine has itself: blocks of every group that these tokens need.
        limit: most tokens that may be a hit.

    Returns:
        At least ``num_local``; where it is more, a multiple of all block sizes, and kvstore has the pages of every
        block behind ``num_local`` that is needed to go on from there.
    """
    # Missing pages before each block: a range of blocks lacks none when both its ends have the same number.
    missing = [list(accumulate((not here for here in of_group), initial=0)) for of_group in presence]
    step = math.lcm(*block_sizes)
    for num_tokens in range(limit // step * step, num_local, -step):
        for gaps, block_size, skipped in zip(missing, block_sizes, num_skipped, strict=True):
            end = num_tokens // block_size
            start = max(num_local, skipped(num_tokens)) // block_size
            if end >= len(gaps) or (start < end and gaps[start] != gaps[end]):
                break
        else:
            return num_tokens
    return num_local


def leading(present: Sequence[bool]) -> int:
    """How many leading values are True."""
    for index, here in enumerate(present):
        if not here:
            return index
    return len(present)
