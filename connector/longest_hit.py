"""The longest hit: the prefix that all cache groups of a model can go on from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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
    step = math.lcm(*block_sizes)
    num_tokens = limit
    while (hit := num_tokens // step * step) > num_local:
        num_tokens = hit
        for here, block_size, skipped in zip(presence, block_sizes, num_skipped, strict=True):
            num_blocks = _without_gap(here, block_size, skipped, num_local, num_tokens // block_size)
            num_tokens = num_blocks * block_size
        if num_tokens == hit:
            return hit
    return num_local


def _without_gap(here: Sequence[bool], block_size: int, skipped: NumSkipped, num_local: int, end: int) -> int:
    """The most blocks, ``end`` of them or fewer, that a group may agree to.

    A shorter prefix needs its blocks from the same one on, or from an earlier one on: so it ends before the first block
    that is missing there. It does not end behind another one that is missing either, unless it does not need its last
    block: at the start of a chunk of attention it needs none.

    Args:
        here: whether kvstore has each block's page.
        block_size: in tokens.
        skipped: of the group.
        num_local: tokens of the engine's own.
        end: blocks of the prefix.
    """
    local = num_local // block_size
    if end > len(here):
        return max(local, len(here))
    try:
        end = here.index(False, max(num_local, skipped(end * block_size)) // block_size, end)
    except ValueError:
        return end
    checked = end  # prefixes that end behind it need their last block
    while end > local and not here[end - 1]:
        if end == checked:
            start = skipped(end * block_size)
            # A chunk that begins there needs nothing before it; the start of a window does, at any length.
            checked = start // block_size if skipped(start) == start else local
            if checked == end:
                break
        end -= 1
    return end


def leading(present: Sequence[bool]) -> int:
    """How many leading values are True."""
    for index, here in enumerate(present):
        if not here:
            return index
    return len(present)
