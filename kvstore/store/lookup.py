"""Finding: which pages are here, and which of them were used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.errors import LimitExceededError
from kvstore.limits import (
    ABSENT,
    ARENA,
    EVICTED,
    HERE,
    MOST_LOOKUP_PAGES,
    MOST_QUERIES,
    UNKNOWN,
)
from kvstore.store.state import StoreState
from kvstore.store.write_back import WriteBack
from kvstore.tiers.lower_tiers import LOOKS, LowerTiers, left_meanwhile


class Lookups:
    """What a store says of pages, and is told of their use, without holding them. Safe for threads.

    Args:
        books: of the arena.
        below: asked for what the arena lacks.
        write_behind: told of what is used.
    """

    def __init__(self, state: StoreState, below: LowerTiers, write_back: WriteBack) -> None:
        self._state = state
        self._below = below
        self._write_behind = write_back

    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[bytes]:
        """Which pages are here: for each (fingerprint, hashes) one byte a page, ``ABSENT``, ``ARENA`` or ``DISK``.

        Raises:
            UnknownNamespaceError: the namespace was not opened, or was cleared.
            InvalidRequestError: a hash that has not 32 bytes.
            LimitExceededError: more than ``MOST_LOOKUP_PAGES`` pages, or ``MOST_QUERIES`` queries.
        """
        if len(queries) > MOST_QUERIES:
            raise LimitExceededError(f"a lookup in {len(queries)} namespaces, the limit is {MOST_QUERIES}")
        pages = sum(len(hashes) for _, hashes in queries)
        if pages > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"a lookup of {pages} pages, the limit is {MOST_LOOKUP_PAGES}")
        return self._where(
            [self._state.keys(self._state.known(fingerprint), hashes) for fingerprint, hashes in queries]
        )

    def _where(self, asked: Sequence[Sequence[bytes]]) -> list[bytes]:
        for _ in range(LOOKS):
            before = [self._state.are_here(keys) for keys in asked]
            below = self._below.find(asked, self._state.are_here)
            with self._state.lock:
                here = [self._state.catalog.find_all(keys) >= 0 for keys in asked]
            if not any(map(left_meanwhile, before, map(np.ndarray.tolist, here), below)):
                break
        return [
            np.where(above, np.uint8(ARENA), np.frombuffer(under, np.uint8)).tobytes()
            for above, under in zip(here, below, strict=True)
        ]

    def explain(self, fingerprint: bytes, hashes: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Which pages are here, as ``lookup`` says it, and why not: for each ``HERE``, ``UNKNOWN`` or ``EVICTED``.

        It does not count as a use of the namespace. Errors are those of ``lookup``.
        """
        known = self._state.known(fingerprint, used=False)
        if len(hashes) > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"{len(hashes)} pages to explain, the limit is {MOST_LOOKUP_PAGES}")
        keys = self._state.keys(known, hashes)
        [tiers] = self._where([keys])
        why = bytearray(len(keys))
        with self._state.lock:
            for place, (key, tier) in enumerate(zip(keys, tiers, strict=True)):
                if tier != ABSENT:
                    why[place] = HERE
                elif self._state.catalog.remembers(key, known.number, known.layout.page_bytes):
                    why[place] = EVICTED
                else:
                    why[place] = UNKNOWN
        return tiers, bytes(why)

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """Mark pages as used, head of the prefix first. Returns how many are in the arena."""
        keys = self._state.keys(self._state.known(fingerprint), hashes)
        with self._state.lock:
            slots = self._state.catalog.find_here(keys)
            self._state.catalog.touch(slots)
            self._write_behind.note_use(slots)
            return len(slots)

    def note_use(self, fingerprint: bytes, hashes: Sequence[bytes], *, read: bool, missed: int) -> int:
        """A client read pages without a call, or says in what order pages are wanted that it read before.

        Args:
            fingerprint: the namespace; one that was dropped meanwhile is passed over.
            hashes: of a prefix, head first.
            read: whether this is how the node learns that they were read; pages are counted then.
            missed: pages of the same call that were not here; not more are counted than a lookup may name.

        Raises:
            LimitExceededError: more than ``MOST_LOOKUP_PAGES`` pages.

        Returns:
            How many of them are still in the arena.
        """
        known = self._state.namespaces.get(fingerprint)
        if known is None:
            return 0
        self._state.namespaces.note_use(known)
        if len(hashes) > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"{len(hashes)} pages in one report, the limit is {MOST_LOOKUP_PAGES}")
        missed = min(missed, MOST_LOOKUP_PAGES)
        keys = self._state.keys(known, hashes)
        with self._state.lock:
            slots = self._state.catalog.find_here(keys)
            if read:
                self._state.catalog.use(slots)
                self._state.count_loaded(known, keys, bytes([ARENA]) * len(keys), missed)
            else:
                self._state.catalog.touch(slots)
            self._write_behind.note_use(slots)
            return len(slots)
