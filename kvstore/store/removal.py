"""Removal: pages, or a whole namespace with them, leave the arena and every lower tier because somebody says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.errors import ResourceError
from kvstore.namespaces.registry import KnownNamespace
from kvstore.store.archive import Archive
from kvstore.store.pins import Pins
from kvstore.store.quotas import NamespaceQuotas
from kvstore.store.state import PAGES_A_STEP, PAUSE_SECONDS, StoreState
from kvstore.store.write_back import WriteBack
from kvstore.tiers.tier import Tier

_KEYS_AT_ONCE = 16_384
"""Between so many it is looked whether the node stops, and others may write to the tier."""


class Expired(NamedTuple):
    """What was dropped of a namespace that nobody uses."""

    pages: int
    """Of this node."""
    shared: int | None
    """Pages of the shared tier; None: it keeps them, or may."""
    why: str
    """Why that can't be said; empty where they are in use."""


class Removal:
    """Drops pages. Safe for threads; the locks of ``write_back`` and ``archive`` keep lower tiers from getting them
    meanwhile."""

    def __init__(
        self, state: StoreState, write_back: WriteBack, archive: Archive, pins: Pins, quotas: NamespaceQuotas
    ) -> None:
        self._state = state
        self._lock = state.lock
        self._catalog = state.catalog
        self._namespaces = state.namespaces
        self._lower_tiers = state.lower_tiers
        self._write_back = write_back
        self._archive = archive
        self._pins = pins
        self._quotas = quotas

    def evict(self, fingerprint: bytes, hashes: Sequence[bytes], *, pinned: bool) -> int:
        """Drop pages from every tier; those that are pinned only if that is said. Returns how many were somewhere."""
        self._state.check_open()
        keys = self._state.keys(self._state.known(fingerprint), hashes)
        if not pinned:
            keys = self._pins.unpinned(keys)
        elif self._pins.end(keys):
            self._pins.save()
        return self._drop(keys, self._lower_tiers.all())

    def clear(self, fingerprint: bytes) -> int:
        """Drop every page of a namespace, and the namespace. Returns how many pages were somewhere."""
        self._state.check_open()
        return self._clear(self._state.known(fingerprint), self._lower_tiers.all())

    def expire(self, known: KnownNamespace, seconds: float, stop: threading.Event, *, crowded: bool = False) -> Expired:
        """Drop a namespace that this node has not used for so long: from what is its own, and from the shared tier
        unless another node has used it there within that time.

        It stays known while the shared tier may have some of it: to be looked at again, or nobody would. Unless there
        are too many namespaces (``crowded``): then that leaves by its time to live. Once ``stop`` is set, the shared
        tier is left alone: pages that are to be written back can't wait for it.

        Raises:
            UnknownNamespaceError: it was cleared just now.
        """
        self._state.check_open()
        shared: int | None = 0
        why = ""
        if self._lower_tiers.all_shared():
            try:
                shared = self._expire_shared(known.fingerprint, seconds, stop)
            except ResourceError as error:
                why = str(error)
                shared = None
        if shared is None and not crowded:
            keys, _ = self._keys_of(known, self._lower_tiers.own)
            pages = self._drop(sorted(keys), self._lower_tiers.own)
        else:
            pages = self._clear(known, self._lower_tiers.own)
        with self._lock:
            self._state.arena.count("expired", pages)
        return Expired(pages, shared, why)

    def drop_own(self, fingerprint: bytes, stop: threading.Event) -> int:
        """Drop every page of a namespace that is not known from this node's own tiers, and its pins, until ``stop`` is
        set. Returns how many pages that were."""
        self._end_pins(fingerprint)
        keys = sorted({key for tier in self._lower_tiers.own for key in tier.keys(fingerprint)})
        pages = 0
        for at in range(0, len(keys), _KEYS_AT_ONCE):
            if stop.is_set():
                break
            pages += self._drop(keys[at : at + _KEYS_AT_ONCE], self._lower_tiers.own)
        return pages

    def drop_shared(self, fingerprint: bytes, seconds: float, stop: threading.Event) -> int | None:
        """Drop every page of a namespace from the shared tier, unless it is known here or a node has used it there.

        Args:
            fingerprint: of the namespace.
            seconds: within which a use counts.
            stop: once it is set, what is still there is left.

        Returns:
            How many pages; None: it is in use, and stays.

        Raises:
            ResourceError: the tier could not be reached, and may still have some.
        """
        if not self._lower_tiers.all_shared():
            return 0
        return self._expire_shared(fingerprint, seconds, stop, lambda: self._namespaces.get(fingerprint) is None)

    def _expire_shared(
        self, fingerprint: bytes, seconds: float, stop: threading.Event, wanted: Callable[[], bool] = lambda: True
    ) -> int | None:
        """Expire a namespace in each tier that nodes share. ``wanted`` is asked again in each: what this node stores of
        one that is opened now gets there afterwards. Returns how many pages; None: some tier keeps it.

        Raises:
            ResourceError: a tier could not be reached; the others were dealt with.
        """
        pages: int | None = 0
        failed: ResourceError | None = None
        for tier in self._lower_tiers.all_shared():
            try:
                with self._lock_of(tier):
                    if not wanted():
                        return None
                    done = tier.expire(fingerprint, seconds, stop)
            except ResourceError as error:
                failed = error
            else:
                pages = None if done is None or pages is None else pages + done
        if failed is not None:
            raise failed
        return pages

    def _lock_of(self, tier: Tier) -> threading.Lock:
        """What is held over each write to a tier."""
        if tier is self._lower_tiers.objects:
            return self._archive.writing
        return self._write_back.sharing if tier is self._lower_tiers.shared else self._write_back.writing

    def _end_pins(self, fingerprint: bytes) -> None:
        with self._lock:
            pinned = self._pins.keys(fingerprint)
        if self._pins.end(pinned):
            self._pins.save()

    def _keys_of(self, known: KnownNamespace, tiers: Sequence[Tier]) -> tuple[set[bytes], ResourceError | None]:
        """The keys of a namespace's pages here and in these tiers, and why some of them are not known."""
        keys: set[bytes] = set()
        for stamps in self._state.pages_here(known.number):
            with self._lock:
                keys.update(map(self._state.slots.key, self._state.still_here(stamps)))
        failed: ResourceError | None = None
        for tier in tiers:
            try:
                keys.update(tier.keys(known.fingerprint))
            except ResourceError as error:
                failed = error
        return keys, failed

    def _clear(self, known: KnownNamespace, tiers: Sequence[Tier]) -> int:
        leaving = self._namespaces.forget(known, shared=any(tier in tiers for tier in self._lower_tiers.all_shared()))
        self._state.arena.new_edition()
        self._end_pins(known.fingerprint)  # first: a node that is killed from here on leaves none behind
        keys, failed = self._keys_of(known, tiers)
        dropped = 0
        try:
            dropped = self._drop(sorted(keys), tiers)
        except ResourceError as error:
            failed = error
        self._quotas.forget(known)
        if failed is not None:
            self._open_again(known)  # to be cleared once more
            raise failed
        self._namespaces.has_left(leaving)
        return dropped

    def _open_again(self, known: KnownNamespace) -> None:
        for label in known.labels[:1] + known.labels[:0:-1] or ("",):  # in the order in which they were used
            self._quotas.open_namespace(known.layout, known.durability, label=label)

    def _drop(self, keys: Sequence[bytes], tiers: Sequence[Tier]) -> int:
        """Drop pages from the arena and these tiers.

        Raises:
            ResourceError: a tier could not be reached, and may still have some. All others are gone.
        """
        dropped = self._drop_here(keys)
        removed = 0
        failed: ResourceError | None = None
        for tier in tiers:
            gone = 0
            for at in range(0, len(keys), _KEYS_AT_ONCE):
                some = keys[at : at + _KEYS_AT_ONCE]
                with self._lock_of(tier):  # not while pages are being written there, which may be some of these
                    dropped.update(key for key, here in zip(some, tier.contains(some), strict=True) if here)
                    try:
                        gone += tier.remove(some)
                    except ResourceError as error:
                        failed = error
            removed = max(removed, gone)
        if tiers:  # until now, pages could be promoted from there
            dropped |= self._drop_here(keys)
        if failed is not None:
            raise failed
        return max(len(dropped), removed)  # a shared tier may be too slow to say which of them it had

    def _drop_here(self, keys: Sequence[bytes]) -> set[bytes]:
        dropped = set()
        for at in range(0, len(keys), PAGES_A_STEP):
            if at:
                time.sleep(PAUSE_SECONDS)
            some = keys[at : at + PAGES_A_STEP]
            with self._lock:
                self._state.check_open()
                self._state.promotions.drop(some)
                for key, slot in zip(some, self._catalog.find_all(some).tolist(), strict=True):
                    if slot >= 0 and key not in dropped:  # whoever names a page twice
                        self._state.residency.drop(slot)
                        dropped.add(key)
        return dropped
