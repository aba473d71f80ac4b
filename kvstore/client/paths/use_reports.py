"""Use reports: the node learns what a client looked up, and what it read without a call, with its next call or a moment
later."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from typing import Protocol

from kvstore.errors import DeadlineError, KVStoreError
from kvstore.hashing import HASH_BYTES
from kvstore.host.forking import register_forked, renewed
from kvstore.limits import MOST_LOOKED_UP, MOST_QUERIES
from kvstore.v1 import cache_pb2 as pb

REPORT_SECONDS = 0.2
"""How long a use may wait for a call that takes it along."""
LAST_SECONDS = 1.0
"""How long a report may take, and the last one may hold up the end."""
MOST_USES = 1024
"""Most uses that are kept; the oldest are passed over: they matter least."""
MOST_PAGES = 1 << 16
"""Most pages in one report; of more, the latest uses go that fit."""
_IDLE_SECONDS = 10.0
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
"""Seconds to the next report behind one that failed; twice as many behind each other one."""
_log = logging.getLogger(__name__)


class Report(Protocol):
    """Tells the node."""

    def __call__(self, report: pb.UseReport, timeout: float) -> object:
        """Raises a :class:`KVStoreError` where the node was not told, or may not have been (:class:`DeadlineError`)."""
        ...


class UseReports:
    """Uses and lookups that the node does not know of yet. Safe for threads.

    ``report`` sends them; it is called on a thread of this object's own, which is there while there is anything to be
    told of, and at the end.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._waiting: deque[tuple[bytes, bytes, bool, int]] = deque(maxlen=MOST_USES)
        self._lookups: dict[bytes, list[int]] = {}
        """By fingerprint the pages asked for, and found in the arena, on disk, in Redis, in object storage."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._over: threading.Event | None = None
        """Of the thread that runs: set at its end. None: there is none."""
        self._thread_id = 0
        register_forked(self)
        _open.add(self)

    def forked(self) -> None:
        """In a child: its parent tells of what waits."""
        self._lock = threading.Lock()
        self._closed = renewed(self._closed)
        self._waiting.clear()
        self._lookups = {}
        self._over = None

    def note(self, fingerprint: bytes, hashes: bytes, *, read: bool, missed: int = 0) -> None:
        """A use of pages of a prefix, head first; ``hashes`` are joined. Takes a microsecond, and wakes nobody."""
        self._waiting.append((fingerprint, hashes, read, missed))
        if self._over is None:
            self._start()

    def note_lookup(self, fingerprint: bytes, asked: int, arena: int, disk: int, redis: int, objects: int = 0) -> None:
        """A lookup: how many pages it asked for, and how many each tier had. Likewise.
        Of one namespace no more waits than a node counts at once."""
        with self._lock:
            counts = self._lookups.get(fingerprint)
            if counts is None and len(self._lookups) < MOST_QUERIES:  # nobody has so many namespaces at once
                counts = self._lookups[fingerprint] = [0, 0, 0, 0, 0]
            if counts is not None and counts[0] + asked <= MOST_LOOKED_UP:
                counts[0] += asked
                counts[1] += arena
                counts[2] += disk
                counts[3] += redis
                counts[4] += objects
        if self._over is None:
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
            lookups, self._lookups = self._lookups, {}
        if not uses and not lookups:
            return None
        told = (
            pb.LookupCount(fingerprint=fingerprint, asked=asked, arena=arena, disk=disk, redis=redis, objects=objects)
            for fingerprint, (asked, arena, disk, redis, objects) in lookups.items()
        )
        return pb.UseReport(uses=reversed(uses), lookups=told)

    def close(self, deadline: float | None = None) -> None:
        """Report what waits, by ``deadline`` (in :data:`LAST_SECONDS` where none is given), and no more after that.
        Never raises: a node that is gone is not told."""
        last = time.monotonic() + LAST_SECONDS if deadline is None else deadline
        self._closed.set()
        over = self._over
        if over is not None and self._thread_id != threading.get_ident():
            over.wait(max(0.0, last - time.monotonic()))
        left = last - time.monotonic()
        if left > 0 and (report := self.take()) is not None:
            self._send(report, left)
        self._waiting.clear()
        self._lookups = {}

    def _start(self) -> None:
        _end_with_process()
        with self._lock:
            if self._over is None and not self._closed.is_set():
                self._over = threading.Event()
                try:
                    # One of threading waits at its start for the new thread, and with it an engine's scheduler would.
                    _thread.start_new_thread(self._run, (self._over,))
                except RuntimeError:  # no more threads: what waits goes with a call
                    self._over = None

    def _run(self, over: threading.Event) -> None:
        self._thread_id = threading.get_ident()
        quiet, pause = 0.0, REPORT_SECONDS
        try:
            while (quiet < _IDLE_SECONDS or self._lookups) and not self._closed.wait(pause):
                told = self._tell()
                quiet = quiet + pause if told is None else 0.0
                pause = min(max(_FIRST_PAUSE, 2 * pause), _LONGEST_PAUSE) if told is False else REPORT_SECONDS
        finally:
            self._over = None  # what is noted from now on starts another one
            over.set()

    def _tell(self) -> bool | None:
        """Whether the node was told what waits; None: nothing does."""
        try:
            report = self.take()
        except Exception:  # noqa: BLE001 - what waited is lost; what comes may be told
            _log.exception("the node can't be told what was looked up and used")
            return False
        return self._send(report, LAST_SECONDS) if report is not None else None

    def _send(self, report: pb.UseReport, timeout: float) -> bool:
        """Whether the node was told. Where it was not, recency is lost, and counts wait for the next report."""
        try:
            self._report(report, timeout)
        except DeadlineError:
            pass  # it may have been: what is counted twice is worse than what is not counted
        except KVStoreError:
            for each in report.lookups:
                self.note_lookup(each.fingerprint, each.asked, each.arena, each.disk, each.redis, each.objects)
        except Exception:  # noqa: BLE001 - the next report may go
            _log.exception("the node can't be told what was looked up and used")
        else:
            return True
        return False


_open: weakref.WeakSet[UseReports] = weakref.WeakSet()
_ending_in: set[int] = set()
"""The id of the process whose end is known to ``multiprocessing``; in a forked child also its parents'."""


def _end_with_process() -> None:
    """A child of ``multiprocessing`` ends without ``atexit``'s functions, behind its own finalizers. It has imported
    these, and dropped what its parent had among them, before anything is noted there."""
    process = os.getpid()
    finalize = getattr(sys.modules.get("multiprocessing.util"), "Finalize", None)  # it may just be imported
    if finalize is not None and process not in _ending_in:
        _ending_in.add(process)
        finalize(None, _end, exitpriority=0)


@atexit.register
def _end() -> None:
    """A process ends whose clients were not closed: all of them together hold it up for a second at most."""
    deadline = time.monotonic() + LAST_SECONDS
    for reports in list(_open):
        with contextlib.suppress(Exception):
            reports.close(deadline)
