"""Leftovers: what earlier nodes left behind of namespaces that are no more, or that nobody asks for.

A node may be killed while it drops a namespace: the next one brings that to its end. And a tier may hold pages of a
namespace that no register knows, since that could not be read: they are kept for a while, as an engine that opens the
namespace finds them again; then they leave, or a model that changed would keep its place for ever.
"""

from __future__ import annotations

import logging
import time

from kvstore.below import Below
from kvstore.books import Books
from kvstore.bytesize import format_size
from kvstore.dropping import Dropping
from kvstore.errors import ResourceError

UNCLAIMED_SECONDS = 3600.0
"""How long after the start pages wait for somebody who opens their namespace."""
_log = logging.getLogger(__name__)


class Leftovers:
    """What is to leave that was there before this node. Made before it serves; then for one thread.

    Args:
        books: of the arena, from which such pages are gone already.
        below: what is this node's own there is looked through at once, so that nobody finds what was dropped.
        dropping: drops.
    """

    def __init__(self, books: Books, below: Below, dropping: Dropping) -> None:
        self._namespaces = books.namespaces
        self._below = below
        self._dropping = dropping
        self._unfinished = self._namespaces.leaving()
        self._started = time.monotonic()
        for leaving in self._unfinished:
            pages = dropping.drop_all(leaving.fingerprint, below.own)
            _log.info(
                "namespace %r was being dropped when the node ended: %d pages of it left now", leaving.name, pages
            )
        here = {fingerprint for tier in below.own for fingerprint in tier.fingerprints()}
        self._unclaimed = {fingerprint for fingerprint in here if self._namespaces.get(fingerprint) is None}
        for fingerprint in self._unclaimed:
            _log.warning(
                "%s on disk belong to namespace %s, which no register knows: they leave in an hour, unless an engine"
                " opens it",
                format_size(self._used_by(fingerprint)),
                fingerprint.hex()[:12],
            )

    def drop(self) -> None:
        """Drop what is overdue; what can't be dropped now is logged, and left to the next call."""
        for leaving in list(self._unfinished):
            try:
                if leaving.shared and self._below.shared is not None:
                    self._dropping.drop_all(leaving.fingerprint, self._below.all())
            except ResourceError as error:
                _log.warning("namespace %r was being dropped when the node ended: %s", leaving.name, error)
                continue
            self._unfinished.remove(leaving)
            self._namespaces.has_left(leaving)
        if self._unclaimed and time.monotonic() - self._started > UNCLAIMED_SECONDS:
            for fingerprint in self._unclaimed:
                if self._namespaces.get(fingerprint) is None:
                    size = self._used_by(fingerprint)
                    pages = self._dropping.drop_all(fingerprint, self._below.own)
                    _log.warning(
                        "nobody opened namespace %s: dropped, with %d pages (%s)",
                        fingerprint.hex()[:12],
                        pages,
                        format_size(size),
                    )
            self._unclaimed.clear()

    def _used_by(self, fingerprint: bytes) -> int:
        return sum(tier.used_by(fingerprint) for tier in self._below.own)
