"""Pins: pages that an operator keeps in the arena, in step with the catalog and written down."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.errors import InvalidRequestError
from kvstore.limits import LONGEST_LEASE, LONGEST_PIN
from kvstore.namespaces.pin_table import PINNED_SHARE, PinTable
from kvstore.store.leases import NODE
from kvstore.store.loads import Loads
from kvstore.store.quotas import NamespaceQuotas
from kvstore.store.state import PAGES_A_STEP, PAUSE_SECONDS, StoreState
from kvstore.tiers.tier import FINGERPRINT_BYTES

_log = logging.getLogger(__name__)


class Pins:
    """The pins of a store. Safe for threads; the store's lock guards ``table``."""

    def __init__(self, state: StoreState, loads: Loads, quotas: NamespaceQuotas, table: PinTable) -> None:
        self._state = state
        self._lock = state.lock
        self._catalog = state.catalog
        self._namespaces = state.namespaces
        self._loads = loads
        self._quotas = quotas
        self._table = table
        self._saving = threading.Lock()
        """Held while the table is written, and taken before the store's lock."""
        state.residency.pins = table

    def pin(self, fingerprint: bytes, hashes: Sequence[bytes], seconds: float) -> int:
        """Promote the leading pages and keep them in the arena. Returns how many are pinned."""
        known = self._state.known(fingerprint)
        if not 0 < seconds <= LONGEST_PIN:
            raise InvalidRequestError(
                f"a pin lasts above 0 and at most {LONGEST_PIN} seconds (366 days), not {seconds:g}"
            )
        keys = self._state.keys(known, hashes)
        until = time.monotonic() + seconds
        pinned, size = 0, self._state.batch_pages(known)
        frames = frames_for(known.layout.page_bytes)
        quota = self._quotas.quotas(known).get("arena", self._state.arena.arena_bytes)
        most = quota // FRAME_BYTES // PINNED_SHARE // frames
        while pinned < len(keys):
            batch = hashes[pinned : pinned + size]
            held = self._loads.prepare_load(NODE, fingerprint, batch, LONGEST_LEASE)
            with self._lock:
                here = keys[pinned : pinned + len(held.frames)]
                # A pin of what is cleared meanwhile would stay for nothing.
                taken = self._table.add(here, until, frames, most) if self._namespaces.is_open(known.number) else 0
                for slot in self._catalog.find_here(here[:taken]):
                    self._catalog.pin(slot)
            if held.lease:
                self._loads.complete_load(NODE, held.lease)
            pinned += taken
            if taken < len(batch):
                break
        self.save()
        return pinned

    def unpin(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """End pins. Returns how many there were."""
        ended = self.end(self._state.keys(self._state.known(fingerprint), hashes))
        self.save()
        return ended

    def end(self, keys: Sequence[bytes], until: float = math.inf) -> int:
        """End the pins that there are of these pages until then, and say how many; ``save`` comes behind it."""
        number = 0
        for at in range(0, len(keys), PAGES_A_STEP):
            if at:
                time.sleep(PAUSE_SECONDS)
            with self._lock:
                ended = self._table.remove(keys[at : at + PAGES_A_STEP], until)
                for slot in self._catalog.find_here(ended):  # they may leave again
                    self._catalog.unpin(slot)
            number += len(ended)
        return number

    def end_overdue(self) -> bool:
        """End the pins whose time is over, and log it. Whether there were any: then ``save`` comes behind it."""
        now = time.monotonic()
        with self._lock:
            overdue = self._table.overdue(now)
        ended = self.end(overdue, now)
        for fingerprint, pages in Counter(key[:FINGERPRINT_BYTES] for key in overdue).items():
            known = self._namespaces.get(fingerprint)
            name = known.name if known is not None else fingerprint.hex()[:12]
            _log.info("namespace %r: the time of %d pins is over", name, pages)
        return bool(ended)

    def unpinned(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of these pages that are not pinned."""
        found: list[bytes] = []
        for at in range(0, len(keys), PAGES_A_STEP):
            with self._lock:
                found += [key for key in keys[at : at + PAGES_A_STEP] if key not in self._table]
        return found

    def pages_of(self, fingerprint: bytes) -> int:
        """Pinned pages of one namespace; the caller holds the lock."""
        return self._table.pages_of(fingerprint)

    def keys(self, fingerprint: bytes) -> list[bytes]:
        """Their keys; the caller holds the lock."""
        return self._table.keys(fingerprint)

    def save(self) -> None:
        """Write the table down, unless the store is being closed."""
        with self._saving:
            with self._lock:
                table = None if self._state.closed else self._table.copy()
            if table is not None:
                self._table.save(table, time.time() - time.monotonic())
