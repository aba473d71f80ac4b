"""The node's summary of what its lower tiers hold (:mod:`kvstore.arena.summary`), kept true while they change.

There is one for all of these tiers together: a client has one question, whether it must ask. Each tier tells which
pages it has by itself, and a page in two of them takes two places. Of object storage it tells what the node knows, and
that is all that it answers by: what another node wrote a moment ago is a miss with a call and without one.

With Redis there is none: every miss is a question to that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.arena.arena import Arena
from kvstore.arena.summary import FEWEST_BUCKETS, MOST_BUCKETS
from kvstore.arena.summary_file import SummaryFile
from kvstore.errors import ResourceError
from kvstore.tiers.lower_tiers import LowerTiers
from kvstore.tiers.tier import KnownTier

_USUAL_BYTES, _LEAST_BYTES = 256 << 10, 16 << 10
"""Of a tier's limit, for each bucket of eight: a page of 64 KiB has two places. A tier of smaller ones gets more
buckets once they are there, up to that for pages of 4 KiB."""
_CROWDED = 5
"""So many pages a bucket, and pages soon find no place in either of theirs."""
_ROOMY = 3
"""So many a bucket when a summary grows."""
_FEWEST_OBJECTS = 1 << 12
"""For so many pages in object storage there is room from the beginning: it is made anew less often while they come."""
_FULL_SHARE = 1 << 14
"""Of so many buckets one may be full: 1 lookup in 16 of 512 new pages then asks the node."""
_AGAIN_SECONDS = 600.0
"""From one making anew for full buckets, or one that failed, to the next."""
_log = logging.getLogger(__name__)


def buckets_for(limit_bytes: int, pages: int, objects: int = 0) -> int:
    """How many buckets a summary has: of own tiers of this limit, with so many pages now; and of so many pages in
    object storage, whose number no limit of the node's bounds."""
    most = limit_bytes // _LEAST_BYTES
    wanted = min(max(limit_bytes // _USUAL_BYTES, pages // _ROOMY), most) + objects // _ROOMY
    return min(max(wanted, FEWEST_BUCKETS), MOST_BUCKETS)


class _Told:
    """What one file is told by the tiers. Safe for threads."""

    def __init__(self, file: SummaryFile) -> None:
        self._writer = file.writer
        self._lock = threading.Lock()
        self.pages = 0
        """That are in the file, each as often as tiers have it."""

    def came(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._writer.insert(keys)
            self.pages += len(keys)

    def left(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._writer.remove(keys)
            self.pages -= len(keys)


class OwnSummary:
    """Makes the summary, and makes it anew where it does not fit any more.

    ``keep`` is one thread's; ``withdraw`` is any's.

    Args:
        arena: in whose folder it lies.
        lower_tiers: of which it tells what this node knows of.
        clock: seconds that only grow.
    """

    def __init__(self, arena: Arena, lower_tiers: LowerTiers, clock: Callable[[], float] = time.monotonic) -> None:
        self._summaries = arena.summaries
        self._own: Sequence[KnownTier] = lower_tiers.own
        self._objects = lower_tiers.objects
        self._tiers = lower_tiers.known() if arena.is_mapped and lower_tiers.shared is None else ()
        self._clock = clock
        self._lock = threading.Lock()
        """Over the file's name: none counts that is made when the end has begun."""
        self._ended = False
        self._file: SummaryFile | None = None
        self._limit = 0
        """Of the own tiers when it was made."""
        self._not_before = 0.0

    def keep(self, stop: threading.Event) -> None:
        """Make the summary where there is none, or where it should be another one. What it lacks meanwhile, and once
        ``stop`` is set, clients ask for."""
        if not self._tiers:
            return
        own = [tier.statistics() for tier in self._own]
        limit, pages = sum(each.limit_bytes for each in own), sum(each.pages for each in own)
        objects = 0 if self._objects is None else max(self._objects.statistics().pages, _FEWEST_OBJECTS)
        buckets = buckets_for(limit, pages, objects)
        if self._is_due(limit, pages + objects, buckets):
            try:
                self._make(buckets, limit, stop)
            except ResourceError as error:
                self._not_before = self._clock() + _AGAIN_SECONDS
                _log.warning("clients ask the node for every page that is not in the arena: %s", error)

    @property
    def is_complete(self) -> bool:
        """Whether clients rely on it, and it is of a size for the pages that tiers have."""
        file = self._file
        return file is not None and sum(tier.statistics().pages for tier in self._tiers) <= _CROWDED * file.buckets

    def withdraw(self) -> None:
        """The end: nobody looks after it any more."""
        with self._lock:
            self._ended = True
            self._summaries.withdraw()

    def _is_due(self, limit: int, pages: int, buckets: int) -> bool:
        file = self._file
        if file is not None and limit != self._limit and buckets != file.buckets:
            return True
        if file is not None and pages > _CROWDED * file.buckets and buckets > file.buckets:
            return True
        if self._clock() < self._not_before:
            return False
        return file is None or file.writer.full_buckets * _FULL_SHARE > file.buckets

    def _make(self, buckets: int, limit: int, stop: threading.Event) -> None:
        with self._lock:
            if self._ended:
                return
            self._file = None
            file = self._summaries.make(buckets)
        told = _Told(file)
        self._not_before = self._clock() + _AGAIN_SECONDS
        complete = all(tier.tell_keys(told, stop) for tier in self._tiers)
        if complete:
            self._file, self._limit = file, limit
            _log.debug("a summary of %d pages in %d buckets", told.pages, buckets)
        self._name(file if complete else None)

    def _name(self, file: SummaryFile | None) -> None:
        with self._lock:
            if file is None:
                self._summaries.withdraw()
            elif not self._ended:
                self._summaries.name(file)
