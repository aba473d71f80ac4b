"""How long blocks stay, and how they are used meanwhile, of a sample of blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from kvstore.errors import ConfigError

_RECENT_ACCESSES = 4
"""Accesses of a block that are remembered, the newest ones: some blocks are hit all day."""

_MAX_UNTAKEN = 10_000
"""Residencies that are kept until someone asks, the newest ones."""


@dataclass(frozen=True, slots=True)
class BlockResidency:
    """The stay of one block that was then given to someone else. In seconds."""

    lifetime: float
    """From when it was given out to when it was to be given out again, or evicted otherwise."""
    idle: float
    """Since its last hit; its lifetime when there was none."""
    reuse_gaps: tuple[float, ...]
    """Between one hit and the next, of the last few hits, oldest first. None with fewer than two hits."""


class ResidencySampler:
    """Follows some of the blocks from when they are given out until their place is wanted.

    Args:
        sample_rate: share of the blocks given out that are followed, above 0 and at most 1.
        clock: seconds that never go back.
        random: decides which blocks are followed: one draw for each block given out. A seeded one follows the same
            blocks again.

    Raises:
        ConfigError: ``sample_rate`` out of its range.
    """

    def __init__(
        self,
        sample_rate: float = 0.01,
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Random | None = None,
    ) -> None:
        if not 0 < sample_rate <= 1:
            raise ConfigError(f"sample_rate must be above 0 and at most 1, got {sample_rate!r}")
        self._sample_rate = sample_rate
        self._clock = clock
        self._random = random if random is not None else Random()  # noqa: S311 (a sample, no secret)
        self._followed: dict[int, _Stay] = {}
        self._untaken: deque[BlockResidency] = deque(maxlen=_MAX_UNTAKEN)

    def on_allocated(self, block_id: int) -> None:
        """A block was given out as new."""
        if self._random.random() < self._sample_rate:
            self._followed[block_id] = _Stay(self._clock())

    def on_accessed(self, block_id: int) -> None:
        """A block was hit."""
        stay = self._followed.get(block_id)
        if stay is not None:
            stay.hits.append(self._clock())

    def on_evicted(self, block_id: int) -> None:
        """A block is about to be given out again, or can't be hit any longer."""
        stay = self._followed.pop(block_id, None)
        if stay is not None:
            self._untaken.append(stay.ends(self._clock()))

    def reset(self) -> None:
        """Forgets every block that is followed, and what was not taken: the cache was emptied, which is no eviction."""
        self._followed.clear()
        self._untaken.clear()

    def take(self) -> list[BlockResidency]:
        """Stays that have ended since the last call, in the order of their ends; of very many the newest."""
        taken = list(self._untaken)
        self._untaken.clear()
        return taken


@dataclass(slots=True)
class _Stay:
    began: float
    hits: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_ACCESSES))

    def ends(self, now: float) -> BlockResidency:
        hits = list(self.hits)
        return BlockResidency(
            lifetime=now - self.began,
            idle=now - (hits[-1] if hits else self.began),
            reuse_gaps=tuple(later - earlier for earlier, later in pairwise(hits)),
        )
