"""Lookups: which tier has a page, why a page is absent, and which pages were used. No page is held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.errors import LimitExceededError
from kvstore.limits import MOST_LOOKED_UP, MOST_LOOKUP_PAGES, MOST_QUERIES
from kvstore.page_codes import Explanation, PageTier
from kvstore.store.state import StoreState
from kvstore.store.write_back import WriteBack
from kvstore.tiers.lower_tiers import LOOKS, left_meanwhile


class Lookups:
    """What a store says of pages, and is told of their use. Safe for threads."""

    def __init__(self, state: StoreState, write_back: WriteBack) -> None:
        self._state = state
        self._lock = state.lock
        self._catalog = state.catalog
        self._namespaces = state.namespaces
        self._lower_tiers = state.lower_tiers
        self._write_back = write_back

    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[bytes]:
        """Which tier has each page."""
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
            lower = self._lower_tiers.find(asked, self._state.are_here)
            with self._lock:
                here = [self._catalog.find_all(keys) >= 0 for keys in asked]
            if not any(map(left_meanwhile, before, map(np.ndarray.tolist, here), lower)):
                break
        return [
            np.where(in_arena, np.uint8(PageTier.ARENA), np.frombuffer(tiers, np.uint8)).tobytes()
            for in_arena, tiers in zip(here, lower, strict=True)
        ]

    def explain(self, fingerprint: bytes, hashes: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Which tier has each page, and why none has it."""
        known = self._state.known(fingerprint, used=False)
        if len(hashes) > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"{len(hashes)} pages to explain, the limit is {MOST_LOOKUP_PAGES}")
        keys = self._state.keys(known, hashes)
        [tiers] = self._where([keys])
        why = bytearray([Explanation.HERE]) * len(keys)
        unknown, evicted = Explanation.UNKNOWN, Explanation.EVICTED
        with self._lock:
            for place, (key, tier) in enumerate(zip(keys, tiers, strict=True)):
                if not tier:
                    remembered = self._catalog.remembers(key, known.number, known.layout.page_bytes)
                    why[place] = evicted if remembered else unknown
        return tiers, bytes(why)

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes]) -> int:
        """Mark pages as used. Returns how many are in the arena."""
        keys = self._state.keys(self._state.known(fingerprint), hashes)
        with self._lock:
            slots = self._catalog.find_here(keys)
            self._catalog.touch(slots)
            self._write_back.note_use(slots)
            return len(slots)

    def note_lookups(self, fingerprint: bytes, asked: int, found: Sequence[int]) -> None:
        """A client says what its lookups asked for, and what they found."""
        known = self._namespaces.get(fingerprint)
        if known is None or not asked:
            return
        self._namespaces.note_use(known)
        left = asked = min(asked, MOST_LOOKED_UP)
        counted = []
        for pages in found:
            counted.append(min(pages, left))
            left -= counted[-1]
        with self._lock:
            if self._namespaces.is_open(known.number):
                self._state.usage.looked_up(known.number, asked, counted)

    def note_use(self, fingerprint: bytes, hashes: Sequence[bytes], *, read: bool, missed: int) -> int:
        """A client says which pages it used without a call."""
        known = self._namespaces.get(fingerprint)
        if known is None:
            return 0
        self._namespaces.note_use(known)
        if len(hashes) > MOST_LOOKUP_PAGES:
            raise LimitExceededError(f"{len(hashes)} pages in one report, the limit is {MOST_LOOKUP_PAGES}")
        missed = min(missed, MOST_LOOKUP_PAGES)
        keys = self._state.keys(known, hashes)
        with self._lock:
            slots = self._catalog.find_here(keys)
            if read:
                self._catalog.use(slots)
                self._state.count_loaded(known, keys, bytes([PageTier.ARENA]) * len(keys), missed)
                self._write_back.note_use(slots, read=True)
            else:  # a prefix of several batches once more, as a whole: lower tiers heard of each, or get it as new
                self._catalog.touch(slots)
            return len(slots)
