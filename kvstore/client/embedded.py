"""The store inside this process: the same interface, no service."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore.answers import RESERVED, TIER_NAMES
from kvstore.client.path import OpenedNamespace, copy_in, copy_out
from kvstore.client.pending import PendingLoad, PendingStore
from kvstore.client.results import StoreResult
from kvstore.config import NodeConfig
from kvstore.layout import Layout
from kvstore.opening import open_store
from kvstore.status import Status, status_of
from kvstore.tickets import NODE
from kvstore.upkeep import Upkeep

Bytes = npt.NDArray[np.uint8]


class EmbeddedStore:
    """Control and path of a store of this process's own.

    Raises:
        InUseError: another process has the folder; the message names it.
        ResourceError: the folder can't be used, or the memory is not there.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._disk = str(config.disk) if config.disk_limit else ""
        self._store = open_store(config)
        self._upkeep = Upkeep(self._store)
        self._instance = secrets.randbits(63)
        self._started = time.monotonic()
        self._closed = False

    @property
    def pages(self) -> Bytes:
        """The arena: for registering it with a device."""
        return self._store.arena.pages

    def open_namespace(self, layout: Layout, timeout: float) -> OpenedNamespace:
        """Name the layout of this client's pages."""
        known = self._store.open_namespace(layout)
        directory = str(self._store.arena.directory)
        return OpenedNamespace(layout, known.fingerprint, self._store.batch_pages(known), directory)

    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]], timeout: float) -> list[bytes]:
        """For each (fingerprint, hashes) one byte a page."""
        return self._store.lookup(queries)

    def touch(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """Mark pages as used."""
        return self._store.touch(fingerprint, hashes)

    def evict(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """Drop pages from every tier."""
        return self._store.evict(fingerprint, hashes)

    def clear(self, fingerprint: bytes, timeout: float) -> int:
        """Drop a namespace with all its pages."""
        return self._store.clear(fingerprint)

    def flush(self, timeout: float) -> int:
        """Return when everything stored is durable."""
        return self._store.flush(time.monotonic() + timeout)

    def status(self, timeout: float) -> Status:
        """What the store says of itself."""
        return status_of(self._store, self._instance, time.monotonic() - self._started, self._disk)

    def prepare_store(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingStore:
        """Reserve slots, lent as they lie in the arena."""
        reserved = self._store.prepare_store(NODE, namespace.fingerprint, hashes, timeout, direct=True)
        frames = iter(reserved.frames)
        pages = [
            self._store.arena.view(next(frames), namespace.layout.page_bytes) if outcome == RESERVED else None
            for outcome in reserved.outcomes
        ]
        return PendingStore(pages, reserved.outcomes, partial(self._finish_store, reserved.ticket))

    def prepare_load(self, namespace: OpenedNamespace, hashes: Sequence[bytes], timeout: float) -> PendingLoad:
        """Hold slots, lent as they lie in the arena."""
        held = self._store.prepare_load(NODE, namespace.fingerprint, hashes, timeout)
        pages = [self._store.arena.view(frame, namespace.layout.page_bytes) for frame in held.frames]
        for page in pages:
            page.flags.writeable = False
        tiers = [TIER_NAMES[tier] or "" for tier in held.tiers]
        return PendingLoad(pages, tiers, lambda: not held.ticket or self._store.complete_load(NODE, held.ticket))

    def store(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], pages: Sequence[Bytes], timeout: float
    ) -> StoreResult:
        """Copy pages into the arena."""
        return copy_in(self.prepare_store(namespace, hashes, timeout), pages)

    def load(
        self, namespace: OpenedNamespace, hashes: Sequence[bytes], into: Sequence[Bytes], timeout: float
    ) -> list[str]:
        """Copy the leading pages out of the arena."""
        return copy_out(self.prepare_load(namespace, hashes, timeout), into)

    def close(self) -> None:
        """Write back, and give the folder up."""
        if self._closed:
            return
        self._closed = True
        self._upkeep.stop()
        self._store.close()

    def _finish_store(self, ticket: int, publish: bool) -> StoreResult:
        if not ticket:
            return StoreResult()
        return StoreResult(*self._store.complete_store(NODE, ticket, publish=publish))
