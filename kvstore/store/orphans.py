"""Orphans: pages that earlier nodes left in lower tiers, of namespaces that were dropped or that no register knows.

A node may be killed while it drops a namespace: the next one brings that to its end. And a tier may hold pages of a
namespace that no register knows, since that could not be read: they are kept for a while, as an engine that opens the
namespace finds them again; then they leave, or a model that changed would keep its place for ever.

What is stored once a namespace was opened again must never leave by this. So opening it ends its leaving
(:mod:`kvstore.namespaces.registry`), and in a tier that nodes share it stays where another node has used it since. What
is left of the old pages then is found again: they have the bytes that their keys stand for.
"""

from __future__ import annotations

import logging
import threading
import time

from kvstore.errors import ResourceError
from kvstore.namespaces.registry import Leaving
from kvstore.store.pins import Pins
from kvstore.store.removal import Removal
from kvstore.store.state import StoreState
from kvstore.units import format_size

UNCLAIMED_SECONDS = 3600.0
"""How long after the start pages wait for somebody who opens their namespace."""
_log = logging.getLogger(__name__)


class Orphans:
    """What is to leave that was there before this node. Made before it serves; then for one thread.

    They are gone from the arena already. The node's own tiers are looked through at once, so that nobody finds what was
    dropped; pinned pages wait for their namespace as long as they are pinned.
    """

    def __init__(self, state: StoreState, pins: Pins, removal: Removal) -> None:
        self._lock = state.lock
        self._namespaces = state.namespaces
        self._lower_tiers = state.lower_tiers
        self._pins = pins
        self._removal = removal
        self._unfinished = self._namespaces.leaving()
        self._started = time.monotonic()
        for leaving in self._unfinished:
            pages = removal.drop_own(leaving.fingerprint, threading.Event())
            _log.info(
                "namespace %r was being dropped when the node ended: %d pages of it left now", leaving.name, pages
            )
        here = {fingerprint for tier in state.lower_tiers.own for fingerprint in tier.fingerprints()}
        self._unclaimed = {fingerprint for fingerprint in here if self._namespaces.get(fingerprint) is None}
        for fingerprint in self._unclaimed:
            _log.warning(
                "%s on disk belong to namespace %s, which no register knows: they leave in an hour, unless an engine"
                " opens it",
                format_size(self._used_by(fingerprint)),
                fingerprint.hex()[:12],
            )

    def drop(self, stop: threading.Event) -> None:
        """Drop what is overdue; what can't be dropped now is logged, and left to the next call. So is what is left once
        ``stop`` is set: pages that are to be written back can't wait for it."""
        for leaving in list(self._unfinished):
            if stop.is_set():
                return
            if self._namespaces.get(leaving.fingerprint) is None and leaving.shared:
                try:
                    self._drop_shared(leaving, stop)
                except ResourceError as error:
                    _log.warning("namespace %r was being dropped when the node ended: %s", leaving.name, error)
                    continue
            self._unfinished.remove(leaving)
            self._namespaces.has_left(leaving)
        if time.monotonic() - self._started > UNCLAIMED_SECONDS:
            for fingerprint in list(self._unclaimed):
                if stop.is_set():
                    return
                with self._lock:
                    pinned = self._pins.pages_of(fingerprint)
                if self._namespaces.get(fingerprint) is None:
                    if pinned:
                        continue
                    size = self._used_by(fingerprint)
                    pages = self._removal.drop_own(fingerprint, stop)
                    _log.warning(
                        "nobody opened namespace %s: dropped, with %d pages (%s)",
                        fingerprint.hex()[:12],
                        pages,
                        format_size(size),
                    )
                self._unclaimed.remove(fingerprint)

    def _drop_shared(self, leaving: Leaving, stop: threading.Event) -> None:
        since = time.monotonic() - self._started
        if self._removal.drop_shared(leaving.fingerprint, since, stop) is None:
            _log.warning(
                "namespace %r was being dropped when the node ended, but is in use again: it stays in the shared tier",
                leaving.name,
            )

    def _used_by(self, fingerprint: bytes) -> int:
        return sum(tier.used_by(fingerprint) for tier in self._lower_tiers.own)
