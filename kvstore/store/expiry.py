"""Expiry: namespaces that nobody has used for long are dropped, so that a model that changed leaves nothing behind.

A tier that nodes share knows when any of them used a namespace there last. What is in use there stays, and so does what
it can't tell of; the namespace then stays known here, without pages, and is looked at again, unless too many are.
"""

from __future__ import annotations

import logging
import threading
import time

from kvstore.errors import KVStoreError, UnknownNamespaceError
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.pins import Pins
from kvstore.store.quotas import NamespaceQuotas
from kvstore.store.removal import Expired, Removal
from kvstore.store.state import StoreState
from kvstore.units import format_duration

_LONGEST_WAIT = 60.0
_SHORTEST_WAIT = 0.25
_SAVE_SECONDS = 3600.0
"""How often it is written down how long namespaces were not used: after a kill, they count as younger by so much."""
_log = logging.getLogger(__name__)


class Expiry:
    """Drops what was not used for as long as its rule says; a namespace with pinned pages stays. For one thread of the
    node."""

    def __init__(self, state: StoreState, quotas: NamespaceQuotas, pins: Pins, removal: Removal) -> None:
        self._lock = state.lock
        self._namespaces = state.namespaces
        self._quotas = quotas
        self._pins = pins
        self._removal = removal
        self._saved = time.monotonic()
        self._unsure: set[int] = set()
        """Numbers of namespaces of which the shared tier could not tell, when it was asked last."""

    @property
    def wait_seconds(self) -> float:
        """How long to wait before the next look."""
        shortest = self._quotas.shortest_life
        return max(_SHORTEST_WAIT, min(_LONGEST_WAIT, shortest / 8)) if shortest else _LONGEST_WAIT

    def expire(self, stop: threading.Event) -> int:
        """Drop what is overdue. Returns how many pages of this node that were; they are counted as ``expired``."""
        dropped = 0
        self._unsure = {number for number in self._unsure if self._namespaces.is_open(number)}
        for known in sorted(self._namespaces.known(), key=self._namespaces.idle_seconds, reverse=True):
            life = self._quotas.life_of(known)
            idle = self._namespaces.idle_seconds(known)
            if stop.is_set() or not life or idle <= life:
                continue
            with self._lock:
                pinned = self._pins.pages_of(known.fingerprint)
            if pinned:
                continue
            crowded = self._namespaces.is_crowded(known.layout.tenant)
            try:
                done = self._removal.expire(known, life, stop, crowded=crowded)
            except UnknownNamespaceError:  # cleared just now
                continue
            except KVStoreError as error:
                _log.warning("namespace %r can't be dropped: %s", known.name, error)
                continue
            dropped += done.pages
            self._tell(known, idle, life, done, crowded=crowded)
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self._saved = time.monotonic()
            self._namespaces.save()
        return dropped

    def _tell(self, known: KnownNamespace, idle: float, life: float, done: Expired, *, crowded: bool) -> None:
        if crowded and done.shared is None:
            _log.warning(
                "namespace %r is overdue and forgotten, since there are nearly as many namespaces as there may be; what"
                " the shared tier has of it stays until nobody has used it there for a week%s",
                known.name,
                f" ({done.why})" if done.why else "",
            )
        elif done.why and known.number not in self._unsure:
            _log.warning("namespace %r is overdue, but %s; it is tried again", known.name, done.why)
        (self._unsure.add if done.why else self._unsure.discard)(known.number)
        if done.pages or done.shared is not None:
            _log.info(
                "namespace %r was not used for %s, its rule allows %s: dropped, with %d pages of this node%s",
                known.name,
                format_duration(idle),
                format_duration(life),
                done.pages,
                f" and {done.shared} in the shared tier" if done.shared else "",
            )
