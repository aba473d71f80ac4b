"""A batch: what one forward pass of the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchedSequence:
    """One request's share of a batch: some tokens right behind a context that is in its blocks already."""

    token_ids: Sequence[int]
    """The tokens to compute, at least 1."""
    context_len: int
    """Tokens before them whose KV, or the state behind which, is in the blocks."""
    block_ids: Sequence[Sequence[int]]
    """By cache group, the request's blocks in the order of its tokens; enough for context and new tokens. 0, the null
    block, stands where the new tokens need none."""
