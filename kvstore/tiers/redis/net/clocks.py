"""Detects jumps of the servers' clocks, by which it is measured how long nobody used a namespace."""

from __future__ import annotations

import logging

from kvstore.units import format_duration

LEAST_JUMP = 60.0
"""Seconds. By less than that clocks are set now and then, and answers are late."""
_log = logging.getLogger(__name__)


class Clocks:
    """What this node saw of the servers' clocks, beside its own, which only grows. Decides; does no I/O.

    One that jumps ahead makes everything there look unused for so long. What nobody may have used then counts from the
    jump on. (One that jumps back makes it look used until that time has come again, which does no harm.)
    """

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}
        """By server: how far its clock is ahead of this node's."""
        self._jumped: float | None = None

    def saw(self, server: int, theirs: float, here: float) -> None:
        """A server said what time it is.

        Args:
            server: any number of it.
            theirs: its seconds since 1970.
            here: this node's seconds, which only grow.
        """
        ahead = theirs - here
        jump = ahead - self._ahead.get(server, ahead)
        self._ahead[server] = ahead
        if jump > LEAST_JUMP:
            told = self._jumped is not None and here - self._jumped < LEAST_JUMP  # of another server just now
            self._jumped = here
            if told:
                return
            _log.warning(
                "Redis' clock went ahead by %s: from now on it counts anew how long nobody used a namespace there",
                format_duration(jump),
            )

    def idle(self, said: float, here: float) -> float:
        """For how many seconds certainly nobody used something, where a server says it was so many."""
        return said if self._jumped is None else min(said, here - self._jumped)
