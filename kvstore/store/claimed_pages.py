"""Pages that another node is sending to the shared tier: when to look whether it has. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.jitter import jittered
from kvstore.tiers.tier import CLAIM_PAUSE, LONGEST_CLAIM_PAUSE


@dataclass(slots=True, eq=False)
class ClaimedPages:
    """Those of one claim."""

    name: bytes
    """Of the claim."""
    stamps: list[int]
    """Of the pages: they may leave while they wait."""
    ends_at: float
    """Then it is over, whoever holds it. On the clock of ``time.monotonic``, as all here."""
    due: float = 0.0
    """When to look."""
    pause: float = CLAIM_PAUSE


class Claims:
    """All that is waited for. The store's lock guards it."""

    def __init__(self) -> None:
        self._waiting: list[ClaimedPages] = []

    @property
    def due(self) -> float:
        """When to look next; infinite: there is nothing to wait for."""
        return min((claimed.due for claimed in self._waiting), default=math.inf)

    def wait(self, claimed: ClaimedPages, now: float) -> None:
        """Wait for a claim, or wait on: the next look is twice as far away."""
        claimed.due = now + jittered(claimed.pause)  # or all who wait would ask at once
        claimed.pause = min(2 * claimed.pause, LONGEST_CLAIM_PAUSE)
        self._waiting.append(claimed)

    def take(self, now: float) -> list[ClaimedPages]:
        """Take out those that are to be looked at now."""
        taken = [claimed for claimed in self._waiting if claimed.due <= now]
        self._waiting = [claimed for claimed in self._waiting if claimed.due > now]
        return taken
