"""The segment log and the catalog of its pages, kept in step: each append changes both."""

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
    """A log, and the catalog of its pages. For the holder of the log lock; ``fetch`` and ``page_bytes`` are for all."""

    def __init__(self, log: SegmentLog, catalog: DiskCatalog, reader: DiskReader, device: Device) -> None:
        self.log = log
        self.catalog = catalog
        self.device = device
        self._reader = reader

    def append(self, entries: Sequence[Entry], *, carried: bool = False) -> None:
        """Append one chunk, for which there is space.

        Raises:
            OSError: the system refuses, or is late.
        """
        try:
            segment, records = self.log.append(entries)
        except OSError:
            # What can't be cut off may be whole, now or when the late call ends: it must not come back after a restart.
            last = self.log.segments[-1] if self.log.segments else None
            if last is not None and not last.sealed:
                self.catalog.note_failed_append(last.id, [entry.key for entry in entries if entry.payload is not None])
            raise
        self.catalog.note_appended(segment.id, entries, records, self.log.used_bytes, carried=carried)

    def append_tombstones(self, keys: Sequence[bytes]) -> None:
        """Append tombstones, as far as there is space for them.

        Raises:
            OSError: the system refuses, or is late.
        """
        for chunk in plan_chunks([0] * len(keys)):
            size = ChunkSize(len(chunk), 0)
            if self.log.missing(size) <= 0:
                self.log.budget.take(write_cost(size), must=True)
                self.append([Entry(keys[index], 0, None) for index in chunk])

    def fetch(self, keys: Sequence[bytes], places: Sequence[Place], into: Sequence[PageBytes]) -> Fetched:
        """Read pages (see :meth:`DiskReader.fetch`), and tell the circuit breaker for reads how it went."""
        fetched = self._reader.fetch(keys, places, into, self.log.by_id.get)
        if fetched.errors:
            error = fetched.errors[0]
            self.device.warn("%d reads failed: %s", len(fetched.errors), error)
            self.device.reading.failed(error)
        elif places:
            self.device.reading.succeeded()
        return fetched

    def page_bytes(self, place: Place) -> int:
        """How long a page is in memory: without the tag of an encrypted one."""
        segment = self.log.by_id.get(place.segment)
        return place.length - (TAG_BYTES if segment is not None and segment.encrypted else 0)

    def count_failure(self, error: OSError) -> None:
        """Count a call that the system refused, or that was late."""
        self.catalog.count_failed(1, int(isinstance(error, LateError)))

    def write_failed(self, error: OSError) -> None:
        """Count it, and tell the circuit breaker for writes."""
        self.count_failure(error)
        self.catalog.used_bytes = self.log.used_bytes  # what could not be cut off, or deleted, counts
        self.device.writing.failed(error)
