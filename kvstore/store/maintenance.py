"""Maintenance: a store's background threads write pages back, share new ones, end what is overdue, keep the summary of
the node's own tiers, and verify an arena that was taken over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kvstore.store.store import Store

SWEEP_SECONDS = 0.25
"""From one look to the next whether something is overdue, or to be told."""
_GATHER_SECONDS = 0.005
"""How long pages wait for others that are written with them: a write of few costs as much time of the interpreter as
one of many, and stores wait for that."""
_RETRY_SECONDS = 1.0
"""How long to leave a tier alone that would take nothing."""
_SUMMARY_SECONDS = 1.0
"""From one look whether the summary of the node's own tiers fits them to the next."""
_BUCKET_SECONDS = 1.0
"""How long the end waits for a thread that may wait for a bucket."""
_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Maintenance:
    """Runs a store's background work until it is stopped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stop = threading.Event()
        self._threads: list[tuple[threading.Thread, float | None]] = []
        try:
            self._start("write-back", self._write_back)
            self._start("sweep", self._sweep)
            self._start("expire", self._expire, _BUCKET_SECONDS)
            if store.lower_tiers.shared is not None:
                self._start("share", self._share)
            if store.lower_tiers.objects is not None:
                self._start("archive", self._archive, _BUCKET_SECONDS)
            if store.lower_tiers.known():
                self._start("summary", self._keep_summary)
            if store.kept_pages:
                self._start("verify", self._verify)
        except RuntimeError:  # no more threads
            self.stop()
            raise

    def stop(self) -> None:
        """End the threads, each behind what it is doing. Those that may wait for a bucket are left to it after a
        moment: dirty pages can't wait, and the store ends behind the locks that they hold."""
        self._stop.set()
        self._store.write_back.wake()
        self._store.archive.wake()
        for thread, seconds in self._threads:
            thread.join(seconds)

    def _start(self, name: str, work: Callable[[], None], joined_for: float | None = None) -> None:
        thread = threading.Thread(target=work, name=f"kvstore-{name}", daemon=True)
        thread.start()
        self._threads.append((thread, joined_for))

    def _write_back(self) -> None:
        while not self._stop.is_set():
            waiting = self._store.write_back.wait_for_dirty(SWEEP_SECONDS)
            if waiting and self._store.write_back.is_little:
                self._stop.wait(_GATHER_SECONDS)
            if waiting and not self._stop.is_set() and not _keep_going(self._store.write_back.write_back):
                self._stop.wait(_RETRY_SECONDS)

    def _share(self) -> None:
        while not self._stop.is_set():
            waiting = self._store.write_back.wait_for_unshared(SWEEP_SECONDS)
            _keep_going(self._store.write_back.tell_shared)
            _keep_going(self._store.write_back.look_at_claims)
            if waiting and not self._stop.is_set() and not _keep_going(self._store.write_back.share):
                self._stop.wait(_RETRY_SECONDS)

    def _archive(self) -> None:
        while not self._stop.is_set():
            due = self._store.archive.wait(SWEEP_SECONDS)
            _keep_going(self._store.archive.tell)
            if due and not self._stop.is_set() and not _keep_going(self._store.archive.write):
                self._stop.wait(_RETRY_SECONDS)

    def _sweep(self) -> None:
        while not self._stop.wait(SWEEP_SECONDS):
            _keep_going(self._store.sweep)

    def _expire(self) -> None:
        _keep_going(self._store.orphans.drop, self._stop)
        while not self._stop.wait(self._store.expiry.wait_seconds):
            _keep_going(self._store.orphans.drop, self._stop)
            _keep_going(self._store.expiry.expire, self._stop)
            _keep_going(self._store.migrate_orders, self._stop)

    def _keep_summary(self) -> None:
        _keep_going(self._store.summary.keep, self._stop)
        while not self._stop.wait(_SUMMARY_SECONDS):
            _keep_going(self._store.summary.keep, self._stop)

    def _verify(self) -> None:
        damaged = self._store.verify(self._stop)  # tries again by itself
        if damaged:
            _log.warning("%d pages of the arena that was taken over were damaged; they are misses now", damaged)


def _keep_going(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Do one piece of work that comes again and again; a failure of it must not end the thread, or the node would rot
    silently."""
    try:
        return work(*args, **kwargs)
    except OSError as error:  # the system's: no descriptor, no memory; where it came from says nothing more
        _log.error("%s failed; this is tried again: %s", getattr(work, "__qualname__", work), error)
        return None
    except Exception:  # noqa: BLE001 - whatever it is, it is logged, and the next piece may work
        _log.exception("%s failed; this is tried again", getattr(work, "__qualname__", work))
        return None
