"""Admission of a client's stores: no more bytes under way at once than fit into the arena together.

The node refuses what passes half of its arena.
"""

from __future__ import annotations

import threading
import time
import weakref

from kvstore.host.cutting import check_going
from kvstore.host.forking import register_forked

_LOOK_SECONDS = 0.001
"""How often a store looks that waits for another one."""


class Share:
    """The bytes of one store under way. Without this object they count no more: the store may be interrupted before it
    can give it back.
    """

    def __init__(self, size: int) -> None:
        self.size = size


class StoreAdmission:
    """Lets stores in one after the other where the arena is too small for all of them. Safe for threads.

    ``limit``: bytes that they may have under way together; a store that is larger is alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shares: list[weakref.ref[Share]] = []
        self._lock = threading.Lock()
        register_forked(self)

    def forked(self) -> None:
        """In a child: the stores under way are its parent's."""
        self._shares = []
        self._lock = threading.Lock()

    @property
    def is_tight(self) -> bool:
        """Whether there is too little for as much again."""
        return 2 * self._taken() > self._limit

    def take(self, share: Share, deadline: float) -> None:
        """Wait until the share fits, but not past the deadline: then the node decides."""
        while not self._take(share, force=time.monotonic() >= deadline):
            check_going()
            time.sleep(_LOOK_SECONDS)

    def give_back(self, share: Share) -> None:
        """What was taken, if it was, is free again."""
        with self._lock:
            self._shares = [each for each in self._shares if each() not in (None, share)]

    def _take(self, share: Share, *, force: bool) -> bool:
        with self._lock:
            taken = self._taken()
            if taken and taken + share.size > self._limit and not force:
                return False
            self._shares.append(weakref.ref(share))
            return True

    def _taken(self) -> int:
        return sum(share.size for share in (each() for each in self._shares) if share is not None)
