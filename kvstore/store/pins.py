"""Keeping: pages that an operator wants in the arena."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvstore.arena.format import FRAME_BYTES, frames_for
from kvstore.errors import InvalidRequestError
from kvstore.limits import LONGEST_TICKET
from kvstore.namespaces.pin_table import LONGEST_PIN, PINNED_SHARE, PinTable
from kvstore.store.leases import NODE
from kvstore.store.loads import Loads
from kvstore.store.quotas import NamespaceQuotas
from kvstore.store.state import PAGES_A_STEP, PAUSE_SECONDS, StoreState
from kvstore.tiers.tier import FINGERPRINT_BYTES

_log = logging.getLogger(__name__)


class Pins:
    """The pins of a store, in step with the catalog and written down. Safe for threads.

    Args:
        books: of the arena.
        loading: brings pages up.
        granting: knows quotas.
        table: of pins; the books' lock guards it.
    """

    def __init__(self, state: StoreState, loading: Loads, quotas: NamespaceQuotas, table: PinTable) -> None:
        self._state = state
        self._loading = loading
        self._quotas = quotas
        self._table = table
        self._saving = threading.Lock()
        """Held while the table is written, and taken before the books' lock."""
        state.residency.pins = table

    def pin(self, fingerprint: bytes, hashes: Sequence[bytes], seconds: float) -> int:
        """Bring the leading pages up and keep them in the arena, whatever else wants their room. Blocks on I/O.

        Pinned pages take at most a quarter of the arena, and of their namespace's quota there. The pin outlives the
        node, and a page that is dropped all the same (by ``evict``) loses it.

        Args:
            fingerprint: the namespace.
            hashes: head of the prefix first.
            seconds: how long, from now; a longer pin of the same page stays.

        Returns:
            How many leading pages are pinned: fewer than asked for when one is nowhere, or the quota is full.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes, or a time that is not above 0 and at most 366 days.
        """
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
            held = self._loading.prepare_load(NODE, fingerprint, batch, LONGEST_TICKET)
            with self._state.lock:
                here = keys[pinned : pinned + len(held.frames)]
                # A pin of what is cleared meanwhile would stay for nothing.
                taken = (
                    self._table.add(here, until, frames, most) if self._state.namespaces.is_open(known.number) else 0
                )
                for slot in self._state.catalog.find_here(here[:taken]):
                    self._state.catalog.pin(slot)
            if held.ticket:
                self._loading.complete_load(NODE, held.ticket)
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
            with self._state.lock:
                ended = self._table.remove(keys[at : at + PAGES_A_STEP], until)
                for slot in self._state.catalog.find_here(ended):  # they may leave again
                    self._state.catalog.unpin(slot)
            number += len(ended)
        return number

    def end_overdue(self) -> bool:
        """End the pins whose time is over, and log it. Whether there were any: then ``save`` comes behind it."""
        now = time.monotonic()
        with self._state.lock:
            overdue = self._table.overdue(now)
        ended = self.end(overdue, now)
        for fingerprint, pages in Counter(key[:FINGERPRINT_BYTES] for key in overdue).items():
            known = self._state.namespaces.get(fingerprint)
            name = known.layout.name if known is not None else fingerprint.hex()[:12]
            _log.info("namespace %r: the time of %d pins is over", name, pages)
        return bool(ended)

    def pages_of(self, fingerprint: bytes) -> int:
        """Pinned pages of one namespace; the caller holds the lock."""
        return self._table.pages_of(fingerprint)

    def keys(self, fingerprint: bytes) -> list[bytes]:
        """Their keys; the caller holds the lock."""
        return self._table.keys(fingerprint)

    def save(self) -> None:
        """Write the table down, unless the store is being closed."""
        with self._saving:
            with self._state.lock:
                table = None if self._state.closed else self._table.copy()
            if table is not None:
                self._table.save(table, time.time() - time.monotonic())
