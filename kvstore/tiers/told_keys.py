"""Telling which pages an index has: those that are there a few at a time, those that come and go meanwhile at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.segments.index import PageIndex, Rows
from kvstore.tiers.tier import HeldKeys


class ToldKeys:
    """Tells one listener of the pages of a catalog's index.

    Args:
        lock: the catalog's. Whoever calls :meth:`came` and :meth:`left` holds it.
        at_once: most pages that are told under one hold of it.
    """

    def __init__(self, lock: threading.Lock, at_once: int) -> None:
        self._lock = lock
        self._at_once = at_once
        self._held: HeldKeys | None = None
        self._rows = 0
        """Pages in rows below it are known to ``_held``; the others are still to be told."""

    def tell(self, index: PageIndex, held: HeldKeys, stop: threading.Event) -> bool:
        """See :meth:`kvstore.tiers.tier.KnownTier.tell_keys`."""
        with self._lock:
            self._held, self._rows = held, 0
        while not stop.is_set():
            with self._lock:
                if self._held is not held:
                    return False
                held.came(index.keys(index.rows_between(self._rows, self._rows + self._at_once)))
                self._rows += self._at_once
                if self._rows >= index.end_of_rows:
                    self._rows = sys.maxsize  # what comes into other rows from now on is told when it comes
                    return True
            time.sleep(0)  # whoever waits for the lock goes first
        return False

    def end(self) -> None:
        """Tell nobody any more. The caller holds the lock."""
        self._held = None

    def came(self, rows: Rows, keys: Sequence[bytes], new: npt.NDArray[np.bool_]) -> None:
        """Pages are in these rows now; ``new``: which of them were in none before."""
        if self._held is not None:
            self._held.came(_some(keys, new & (rows < self._rows)))

    def left(self, rows: Rows, keys: Sequence[bytes]) -> None:
        """These pages, which were in these rows, are out of the index."""
        if self._held is not None:
            self._held.left(_some(keys, rows < self._rows))


def _some(keys: Sequence[bytes], chosen: npt.NDArray[np.bool_]) -> Sequence[bytes]:
    return keys if chosen.all() else [keys[at] for at in np.flatnonzero(chosen).tolist()]
