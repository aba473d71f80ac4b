"""Jitter: what a thousand nodes do every so many seconds, they do not all do in the same one."""

from __future__ import annotations

import random

MEAN = 0.75
"""Of the seconds that are given, on average."""


def jittered(seconds: float) -> float:
    """Somewhat less than so many seconds, anew each time: half of them at the least."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - nobody gains by guessing it
