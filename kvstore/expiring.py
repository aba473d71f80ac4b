"""Expiring: namespaces that nobody has used for long are dropped, so that a model that changed leaves nothing behind.

What they have in a tier that nodes share stays: another node may use it, and it goes by its own time to live.
"""

from __future__ import annotations

import logging
import threading
import time

from kvstore.books import Books
from kvstore.dropping import Dropping
from kvstore.duration import format_duration
from kvstore.errors import KVStoreError, UnknownNamespaceError
from kvstore.granting import Granting
from kvstore.keeping import Keeping

_LONGEST_WAIT = 60.0
_SHORTEST_WAIT = 0.25
_SAVE_SECONDS = 3600.0
"""How often it is written down how long namespaces were not used: after a kill, they count as younger by so much."""
_log = logging.getLogger(__name__)


class Expiring:
    """Drops what was not used for as long as its rule says. For one thread of the node.

    Args:
        books: of the arena.
        granting: knows the rules.
        keeping: a namespace with pinned pages stays.
        dropping: drops.
    """

    def __init__(self, books: Books, granting: Granting, keeping: Keeping, dropping: Dropping) -> None:
        self._books = books
        self._granting = granting
        self._keeping = keeping
        self._dropping = dropping
        self._saved = time.monotonic()

    @property
    def wait_seconds(self) -> float:
        """How long to wait before the next look."""
        shortest = self._granting.shortest_life
        return max(_SHORTEST_WAIT, min(_LONGEST_WAIT, shortest / 8)) if shortest else _LONGEST_WAIT

    def expire(self, stop: threading.Event) -> int:
        """Drop what is overdue. Returns how many pages that were; they are counted as ``expired``."""
        dropped = 0
        namespaces = self._books.namespaces
        for known in namespaces.known():
            life = self._granting.life_of(known)
            idle = namespaces.idle_seconds(known)
            if stop.is_set() or not life or idle <= life:
                continue
            with self._books.lock:
                pinned = self._keeping.pages_of(known.fingerprint)
            if pinned:
                continue
            try:
                pages = self._dropping.expire(known)
            except UnknownNamespaceError:  # cleared just now
                continue
            except KVStoreError as error:
                _log.warning("namespace %r can't be dropped: %s", known.layout.name, error)
                continue
            dropped += pages
            _log.info(
                "namespace %r was not used for %s, its rule allows %s: it is dropped, with %d pages of this node",
                known.layout.name,
                format_duration(idle),
                format_duration(life),
                pages,
            )
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self._saved = time.monotonic()
            namespaces.save()
        return dropped
