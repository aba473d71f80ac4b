"""The embedded path: a store inside this process, behind the same interface and without a service."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvstore.arena.removal import remove_orphans
from kvstore.client.paths.deadline import time_left
from kvstore.client.paths.path import OpenedNamespace, Path
from kvstore.client.paths.pending import PendingLoad, PendingStore
from kvstore.client.paths.results import StoreResult
from kvstore.client.paths.transfer import Transfer
from kvstore.client.url import EmbeddedConfig
from kvstore.config.node import default_arena_directory
from kvstore.errors import UnavailableError
from kvstore.host.forking import register_forked
from kvstore.host.uninterrupted import uninterrupted
from kvstore.layout import Layout
from kvstore.limits import LONGEST_LEASE
from kvstore.page_codes import TIER_NAMES, StoreOutcome
from kvstore.status import Status
from kvstore.store.leases import NODE
from kvstore.store.maintenance import Maintenance
from kvstore.store.open import open_store
from kvstore.store.report import status_of
from kvstore.wire.messages import split_hashes

Bytes = npt.NDArray[np.uint8]


class EmbeddedStore(Path):
    """Control and path of a store of this process's own.

    It is given up behind the last operation under way, never before: a slot that this process still writes to must
    not become another process's. Its arena goes with it, unless it is to be kept.

    A forked child has none of it: there is one catalog over an arena, and one process that changes it.

    Raises:
        InUseError: another process has the folder; the message names it.
        ResourceError: the folder can't be used, or the memory is not there.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        self._disk = str(config.disk) if config.disk_limit else ""
        # First: arenas that nobody has any more may take the memory that the new one needs.
        remove_orphans(default_arena_directory(config.folder).parent)
        self._store = open_store(config, embedded_in=None if config.keep_arena else config.folder)
        self._instance = secrets.randbits(63)
        self._started = time.monotonic()
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._uses = 0
        self._closed = False
        self._inherited = False
        register_forked(self)
        try:
            self._maintenance = Maintenance(self._store)
        except BaseException:
            self._store.close()
            raise

    @property
    def answered(self) -> bool:
        """It needs no node."""
        return True

    def forked(self) -> None:
        """In a child: nobody who held the lock will let it go, and there is nothing to be done under it."""
        self._guard = threading.Lock()
        self._inherited = True

    @property
    def units(self) -> Bytes | None:
        """The arena, a row for each of its units: for registering it with a device."""
        arena = self._store.arena
        return None if self._inherited else arena.pages.reshape(-1, arena.unit_bytes)

    @uninterrupted
    def open_namespace(self, layout: Layout, durability: str, label: str, timeout: float) -> OpenedNamespace:
        """Name the layout of this client's pages."""
        with self._used():
            known = self._store.open_namespace(layout, durability, label=label)
            directory = str(self._store.arena.directory)
            return OpenedNamespace(layout, known.fingerprint, self._store.batch_pages(known), directory)

    @uninterrupted
    def lookup(self, queries: Sequence[tuple[bytes, Sequence[bytes]]], timeout: float) -> list[bytes]:
        """For each (fingerprint, hashes) one byte a page."""
        with self._used():
            return self._store.lookup(queries)

    def count_lookup(self, fingerprint: bytes, asked: int, arena: int, disk: int, redis: int, objects: int = 0) -> None:
        """Count a lookup, at once."""
        if not self._closed and not self._inherited:
            self._store.note_lookups(fingerprint, asked, (arena, disk, redis, objects))

    @uninterrupted
    def explain(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> tuple[bytes, bytes]:
        """For each page the tier that has it, and why none has."""
        with self._used():
            return self._store.explain(fingerprint, hashes)

    @uninterrupted
    def touch(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """Mark pages as used."""
        with self._used():
            return self._store.touch(fingerprint, hashes)

    @uninterrupted
    def evict(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float, *, pinned: bool) -> int:
        """Drop pages from every tier."""
        with self._used():
            return self._store.evict(fingerprint, hashes, pinned=pinned)

    @uninterrupted
    def promote(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> tuple[int, int]:
        """Bring the leading pages up into the arena, and hold them there."""
        with self._used():
            held = self._store.prepare_load(NODE, fingerprint, hashes, min(timeout, LONGEST_LEASE))
            return len(held.tiers), held.lease

    @uninterrupted
    def let_go(self, hold: int, timeout: float) -> None:
        """End a hold."""
        with self._used():
            self._store.complete_load(NODE, hold)

    @uninterrupted
    def pin(self, fingerprint: bytes, hashes: Sequence[bytes], seconds: int, timeout: float) -> int:
        """Keep the leading pages in the arena."""
        with self._used():
            return self._store.pin(fingerprint, hashes, seconds)

    @uninterrupted
    def unpin(self, fingerprint: bytes, hashes: Sequence[bytes], timeout: float) -> int:
        """End that."""
        with self._used():
            return self._store.unpin(fingerprint, hashes)

    @uninterrupted
    def clear(self, fingerprint: bytes, timeout: float) -> int:
        """Drop a namespace with all its pages."""
        with self._used():
            return self._store.clear(fingerprint)

    @uninterrupted
    def flush(self, timeout: float) -> int:
        """Return when everything stored is durable."""
        with self._used():
            return self._store.flush(time.monotonic() + timeout)

    @uninterrupted
    def status(self, timeout: float) -> Status:
        """What the store says of itself."""
        with self._used():
            return status_of(self._store, self._instance, time.monotonic() - self._started, self._disk)

    @uninterrupted
    def prepare_store(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingStore:
        """Reserve slots, lent as they lie in the arena."""
        hashes = split_hashes(transfer.hashes)
        with self._used(until_finished=True):
            reserved = self._store.prepare_store(
                NODE, namespace.fingerprint, hashes, time_left(transfer.deadline), direct=True, parent=transfer.parent
            )
        frames, to_write = iter(reserved.frames), StoreOutcome.RESERVED
        pages = [
            self._store.arena.view(next(frames), namespace.layout.page_bytes) if outcome == to_write else None
            for outcome in reserved.outcomes
        ]
        return PendingStore(pages, reserved.outcomes, partial(self._finish_store, reserved.lease))

    @uninterrupted
    def prepare_load(self, namespace: OpenedNamespace, transfer: Transfer) -> PendingLoad:
        """Lease slots, lent as they lie in the arena."""
        hashes = split_hashes(transfer.hashes)
        with self._used(until_finished=True):
            held = self._store.prepare_load(NODE, namespace.fingerprint, hashes, time_left(transfer.deadline))
        pages = [self._store.arena.view(frame, namespace.layout.page_bytes) for frame in held.frames]
        for page in pages:
            page.flags.writeable = False
        tiers = [TIER_NAMES[tier] or "" for tier in held.tiers]
        return PendingLoad(pages, tiers, lambda: len(pages) * self._finish_load(held.lease))

    @uninterrupted
    def store(self, namespace: OpenedNamespace, transfer: Transfer) -> StoreResult:
        """Copy pages into the arena."""
        with self.prepare_store(namespace, transfer) as pending:
            for slot, page in zip(pending.pages, transfer.pages, strict=True):
                if slot is not None:
                    np.copyto(slot, page)  # without the interpreter's lock
            return pending.complete()

    @uninterrupted
    def load(self, namespace: OpenedNamespace, transfer: Transfer) -> list[str]:
        """Copy the leading pages out of the arena."""
        with self.prepare_load(namespace, transfer) as pending:
            for page, target in zip(pending.pages, transfer.pages, strict=False):
                np.copyto(target, page)
            return pending.tiers[: pending.complete()]

    @uninterrupted
    def close(self) -> None:
        """Write back, and give the folder up, behind the last operation under way."""
        with self._guard:
            first, self._closed = not self._closed, True
            unused = not self._uses
        if first and unused and not self._inherited:
            self._give_up()

    def _refuse(self) -> NoReturn:
        raise UnavailableError(
            f"the store in {self._store.arena.directory} is that of process {self._process}, from which this one was"
            " forked: connect to a node, or to a folder of this process's own"
        )

    def _give_up(self) -> None:
        try:
            self._maintenance.stop()
        finally:  # who is interrupted has given the folder up all the same
            self._store.close()

    @contextmanager
    def _used(self, *, until_finished: bool = False) -> Iterator[None]:
        """An operation; one that is prepared lasts until it is finished."""
        with self._guard:
            if self._inherited:
                self._refuse()
            if self._closed:
                raise UnavailableError(f"the store in {self._store.arena.directory} is closed")
            self._uses += 1
        finished = True
        try:
            yield
            finished = not until_finished
        finally:
            if finished:
                self._done()

    def _done(self) -> None:
        with self._guard:
            self._uses -= 1
            last = self._closed and not self._uses and not self._inherited
        if last:
            self._give_up()

    @uninterrupted
    def _finish_store(self, ticket: int, publish: bool) -> StoreResult:
        try:
            return StoreResult(*self._store.complete_store(NODE, ticket, publish=publish)) if ticket else StoreResult()
        finally:
            self._done()

    @uninterrupted
    def _finish_load(self, ticket: int) -> bool:
        try:
            return not ticket or self._store.complete_load(NODE, ticket)
        finally:
            self._done()
