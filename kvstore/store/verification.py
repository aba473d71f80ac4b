"""Verification: the pages of an arena that was taken over are compared with their checksums, in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import chain

from kvstore.hashing import checksum_of
from kvstore.store.state import StoreState

TRIES = 3
"""How often a page is tried that can't be verified."""
PAUSE_SECONDS = 1.0
"""Before each further try: where memory or threads ran out, they may be there again."""
_log = logging.getLogger(__name__)


class Verification:
    """Looks once through all pages that have a checksum. Safe for threads."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._lock = state.lock
        self._catalog = state.catalog
        self._residency = state.residency

    def verify(self, stop: threading.Event) -> int:
        """Check every page against its checksum, and drop those that are damaged.

        One that can't be checked holds the others up no longer than it takes to fail. It is tried again behind them,
        ``TRIES`` times in all; then it is counted as ``unverified`` and stays: that nobody could look says nothing
        against its bytes.
        """
        damaged = 0
        left: list[int] | None = None
        for tries_left in reversed(range(TRIES)):
            failed: list[int] = []
            why: Exception | None = None
            try:
                for stamp in self._all() if left is None else left:
                    if stop.is_set():
                        return damaged
                    try:
                        damaged += self._drop_if_damaged(stamp)
                    except Exception as error:  # noqa: BLE001 - whatever it is, the other pages are looked at
                        failed.append(stamp)
                        why = error
                left = failed
            except Exception as error:  # noqa: BLE001 - no page's, but the walk's: it begins anew
                why = error
            if why is None:
                return damaged
            if not tries_left:
                self._give_up(left, why)
            else:
                _log.warning("%s could not be verified, and are tried again: %r", _name(left), why)
                if stop.wait(PAUSE_SECONDS):
                    return damaged
        return damaged

    def _all(self) -> Iterator[int]:
        return chain.from_iterable(self._state.pages_here())

    def _give_up(self, left: list[int] | None, why: Exception) -> None:
        """No more tries; ``left`` is None where the walk did not come to its end."""
        with self._lock:
            self._state.arena.count("unverified", len(self._state.still_here(left or [])))
        _log.error("%s could not be verified in %d tries, and stay as they are", _name(left), TRIES, exc_info=why)

    def _drop_if_damaged(self, stamp: int) -> bool:
        """Whether the page is damaged; it is gone then."""
        with self._lock:
            slots = self._state.still_here([stamp])
            checksum = self._residency.checksum(slots[0]) if slots else None
            if checksum is None:
                return False
            view = self._residency.view(slots[0])
            self._catalog.hold(slots)
        right = True
        try:
            right = checksum_of(view) == checksum
        finally:
            with self._lock:
                damaged = not right and self._catalog.slots.is_resident(slots[0])
                if damaged:
                    self._state.arena.count("corrupt")
                    self._residency.drop(slots[0])
                self._catalog.release(slots)
        return damaged


def _name(stamps: list[int] | None) -> str:
    return f"{'some' if stamps is None else len(stamps)} pages of the arena that was taken over"
