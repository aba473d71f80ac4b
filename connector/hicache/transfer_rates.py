"""How many pages went each way, and how fast, since somebody asked last."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

MOST = 1024
"""Calls that are remembered for whoever asks; without metrics nobody does."""


class Rates(NamedTuple):
    """Of each call that moved something, in their order."""

    pages: list[int]
    gigabytes_a_second: list[float]


class TransferRates:
    """Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: deque[tuple[int, float]] = deque(maxlen=MOST)
        self._stores: deque[tuple[int, float]] = deque(maxlen=MOST)

    def loaded(self, pages: int, nbytes: int, seconds: float) -> None:
        """A call has copied pages out of the arena."""
        self._add(self._loads, pages, nbytes, seconds)

    def stored(self, pages: int, nbytes: int, seconds: float) -> None:
        """A call has copied pages into the arena."""
        self._add(self._stores, pages, nbytes, seconds)

    def take(self) -> tuple[Rates, Rates]:
        """Of loads and of stores; they are forgotten."""
        with self._lock:
            loads, stores = list(self._loads), list(self._stores)
            self._loads.clear()
            self._stores.clear()
        return _rates(loads), _rates(stores)

    def _add(self, calls: deque[tuple[int, float]], pages: int, nbytes: int, seconds: float) -> None:
        if pages:
            with self._lock:
                calls.append((pages, nbytes / max(seconds, 1e-9) / 1e9))


def _rates(calls: list[tuple[int, float]]) -> Rates:
    return Rates([pages for pages, _ in calls], [rate for _, rate in calls])
