"""One chunk at a time into the log, and what is then known of it; one page after the other back from it."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.segments.batching import plan_chunks
from kvstore.segments.cipher import TAG_BYTES
from kvstore.segments.index import Place
from kvstore.segments.io_threads import LateError
from kvstore.segments.log import SegmentLog, write_cost
from kvstore.segments.record import ChunkSize
from kvstore.segments.segment import Entry
from kvstore.tiers.disk.catalog import DiskCatalog
from kvstore.tiers.disk.device_trust import Device
from kvstore.tiers.disk.reader import DiskReader, Fetched
from kvstore.tiers.tier import PageBytes


class PageLog:
    """A log and what is known of its pages, changed together. One thread at a time but for :meth:`fetch`."""

    def __init__(self, log: SegmentLog, pages: DiskCatalog, reads: DiskReader, device: Device) -> None:
        self.log = log
        self.pages = pages
        self.device = device
        self._reads = reads

    def append(self, entries: Sequence[Entry], *, carried: bool = False) -> None:
        """Write one chunk, for which room was made.

        Raises:
            OSError: the system refuses, or is late.
        """
        try:
            segment, records = self.log.append(entries)
        except OSError:
            # What can't be cut off may be whole, now or when a late call ends: it must not come back after a restart.
            last = self.log.segments[-1] if self.log.segments else None
            if last is not None and not last.sealed:
                self.pages.may_lie_in(last.id, [entry.key for entry in entries if entry.payload is not None])
            raise
        self.pages.were_appended(segment.id, entries, records, self.log.used_bytes, carried=carried)

    def append_tombstones(self, keys: Sequence[bytes]) -> None:
        """Write tombstones, as far as there is room for them.

        Raises:
            OSError: the system refuses, or is late.
        """
        for chunk in plan_chunks([0] * len(keys)):
            size = ChunkSize(len(chunk), 0)
            if self.log.missing(size) <= 0:
                self.log.budget.take(write_cost(size), must=True)
                self.append([Entry(keys[index], 0, None) for index in chunk])

    def fetch(self, keys: Sequence[bytes], places: Sequence[Place], into: Sequence[PageBytes]) -> Fetched:
        """Read pages, and learn how well the device reads."""
        fetched = self._reads.fetch(keys, places, into, self.log.by_id.get)
        if fetched.errors:
            error = fetched.errors[0]
            self.device.warn("%d reads failed: %s", len(fetched.errors), error)
            self.device.reading.failed(error)
        elif places:
            self.device.reading.succeeded()
        return fetched

    def page_bytes(self, place: Place) -> int:
        """How long a page is in memory."""
        segment = self.log.by_id.get(place.segment)
        return place.length - (TAG_BYTES if segment is not None and segment.encrypted else 0)

    def count_failure(self, error: OSError) -> None:
        """Count a call that the system refused, or that was late."""
        self.pages.failed(1, int(isinstance(error, LateError)))

    def write_failed(self, error: OSError) -> None:
        """Count it, and learn how well the device writes."""
        self.count_failure(error)
        self.device.writing.failed(error)
