"""Use reports: the node learns what a client read without a call, with the client's next call or a moment later."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvstore.errors import KVStoreError
from kvstore.hashing import HASH_BYTES
from kvstore.host.forking import register_forked, renewed
from kvstore.host.uninterrupted import uninterrupted
from kvstore.v1 import cache_pb2 as pb

REPORT_SECONDS = 0.2
"""How long a use may wait for a call that takes it along."""
MOST_USES = 1024
"""Most uses that are kept; the oldest are passed over: they matter least."""
MOST_PAGES = 1 << 16
"""Most pages in one report; of more, the latest uses go that fit."""
_IDLE_SECONDS = 10.0
_log = logging.getLogger(__name__)


class UseReports:
    """Uses that the node does not know of yet. Safe for threads.

    ``report`` sends them; it is called on a thread of this object's own, which is there while pages are read.
    """

    def __init__(self, report: Callable[[pb.UseReport], object]) -> None:
        self._report = report
        self._waiting: deque[tuple[bytes, bytes, bool, int]] = deque(maxlen=MOST_USES)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        register_forked(self)

    def forked(self) -> None:
        """In a child: its parent tells of what waits."""
        self._lock = threading.Lock()
        self._closed = renewed(self._closed)
        self._waiting.clear()
        self._thread = None

    def note(self, fingerprint: bytes, hashes: bytes, *, read: bool, missed: int = 0) -> None:
        """A use of pages of a prefix, head first; ``hashes`` are joined. Takes a microsecond, and wakes nobody."""
        self._waiting.append((fingerprint, hashes, read, missed))
        if self._thread is None:
            self._start()

    def take(self) -> pb.UseReport | None:
        """What waits, for a call that takes it along."""
        uses: list[pb.PageUse] = []
        pages = 0
        with self._lock:
            while self._waiting:
                fingerprint, hashes, read, missed = self._waiting.pop()
                more = len(hashes) // HASH_BYTES
                if pages + more > MOST_PAGES:
                    continue
                pages += more
                uses.append(pb.PageUse(fingerprint=fingerprint, hashes=hashes, read=read, missed=missed))
        return pb.UseReport(uses=reversed(uses)) if uses else None

    def close(self) -> None:
        """Report no more."""
        self._closed.set()
        self._waiting.clear()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="kvstore-report-use", daemon=True)
                try:
                    uninterrupted(self._thread.start)()
                except RuntimeError:  # no more threads: what waits goes with a call
                    self._thread = None

    def _run(self) -> None:
        quiet = 0.0
        while quiet < _IDLE_SECONDS and not self._closed.wait(REPORT_SECONDS):
            report = self.take()
            quiet = 0.0 if report is not None else quiet + REPORT_SECONDS
            if report is not None:
                try:
                    self._report(report)
                except KVStoreError:
                    pass  # nobody is there: recency is lost, nothing else
                except Exception:  # noqa: BLE001 - the next report may go
                    _log.exception("the node can't be told which pages were used")
        self._thread = None  # what is noted from now on starts another one
