"""The disk tier's interface: opens the parts, and holds the log lock around every change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstore.errors import InvalidRequestError, ResourceError
from kvstore.events.ring import EventRing
from kvstore.host.forking import register_forked
from kvstore.segments import record
from kvstore.segments.aligned import aligned_empty
from kvstore.segments.batching import plan_chunks
from kvstore.segments.cipher import Cipher
from kvstore.segments.io_threads import LateError
from kvstore.segments.log import SegmentLog
from kvstore.segments.segment import NO_CHUNK
from kvstore.status import TierHealth, TierState
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.disk.catalog import DiskCatalog
from kvstore.tiers.disk.device_trust import Device
from kvstore.tiers.disk.page_log import PageLog
from kvstore.tiers.disk.reader import DiskReader, Fetched, Outcome
from kvstore.tiers.disk.reclaim import Reclaimer
from kvstore.tiers.disk.writer import DiskWriter
from kvstore.tiers.tier import KEY_BYTES, HeldKeys, PageBytes, PageWrite, Peer, TierStatistics
from kvstore.units import format_size

_log = logging.getLogger(__name__)

DEADLINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What :meth:`DiskTier.check` found."""

    records: int
    """Pages that are stored."""
    damaged: int
    """Of them, those whose bytes their checksum refuses or that the system refuses to read."""
    bytes: int
    """Payload of all of them."""
    unread: int = 0
    """Of them, those that did not come by the deadline: they may be sound or not."""


class DiskTier:
    """The tier that keeps pages in a directory, over restarts and crashes.

    ``errors`` counts single system calls that failed, each of which may answer for several pages, ``late`` what was
    not done by the deadline; ``refused`` counts pages that were not taken, whether they can't fit or the disk would not
    have them; ``read_bytes`` and ``written_bytes`` count payload, without padding.

    Pages leave by whole segments: first the one of which the smallest part is in recent use. Pages of it that were read
    since they were written, and recently, are carried over into the newest segment, up to a quarter of it: at least
    three quarters of each segment are reclaimed, so for every 3 bytes that are stored at most 1 is written again.

    A page whose bytes are found damaged is forgotten; one whose read the system refused stays findable, and a new write
    of it is taken. A call whose I/O is late answers by the deadline with misses, and the disk is set aside: nothing is
    found and nothing is taken, until a trial after a second (later up to a minute) shows that it answers again. The
    same holds after a few errors in a row. When the file system is full below the limit, pages leave for new ones as
    if what is used were the limit; after a minute, growing is tried again.

    Args:
        directory: made (0700) when it is not there; of this tier alone as long as it is open.
        limit_bytes: most bytes on disk, headers and padding included, at every moment; at least 1 MiB.
        segment_bytes: length of a segment; by default 256 MiB, or an eighth of the limit.
        verify: False skips the checksums at reading: for showing what damage does, and for nothing else.
        direct: False uses the page cache even where the file system has O_DIRECT.
        deadline: seconds that one read or write may take; a sync has six times as long.
        write_limit_bytes: most bytes that are written a day (UTC), over restarts; what comes beyond is refused, and
            only removals are written. 0: no limit.
        key: 32 bytes that payloads are encrypted with from now on (AES-256-GCM); what lies there unencrypted is read
            all the same. None: nothing is encrypted.
        counts: the tier's counters, left to others when it is closed. None: they begin at 0.
        clock: seconds that only grow.
        now: seconds since 1970.

    Raises:
        ConfigError: a size is out of its range; or what lies there is encrypted with another key, or with one and
            none is given. Nothing was changed.
        InUseError: another process holds the directory; the message names it.
        ResourceError: the directory can't be used.
        FormatError: a newer version wrote a segment; nothing was changed.
    """

    name = "disk"

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        *,
        segment_bytes: int | None = None,
        verify: bool = True,
        direct: bool = True,
        deadline: float = DEADLINE_SECONDS,
        write_limit_bytes: int = 0,
        key: bytes | None = None,
        counts: TierCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        # Held over I/O: `_log`, `_page_log`, `_reclaimer` and `_writer` belong to its holder.
        self._log_lock = threading.Lock()
        self._closed = False
        register_forked(self)
        self._catalog = DiskCatalog(limit_bytes, counts)
        self._device = Device(deadline, clock)
        self._reader = DiskReader(self._device.reading.patience, verify=verify)
        self._log = SegmentLog(
            directory,
            limit_bytes,
            segment_bytes=segment_bytes,
            direct=direct,
            patience=self._device.writing.patience,
            clock=clock,
            on_late=lambda error: self._catalog.count_failed(1, int(isinstance(error, LateError))),
            write_limit_bytes=write_limit_bytes,
            now=now,
            cipher=Cipher(key) if key is not None else None,
        )
        self._page_log = PageLog(self._log, self._catalog, self._reader, self._device)
        self._reclaimer = Reclaimer(self._page_log)
        self._writer = DiskWriter(self._page_log, self._reclaimer)
        try:
            for age, (segment, records) in enumerate(self._log.replay()):
                self._catalog.replay(age, segment, records)
            self._reclaimer.make_space(NO_CHUNK, carry=False)
            self.recovery = self._log.settle()
            """What opening found (:class:`~kvstore.segments.log.RecoveryReport`)."""
        except OSError as error:
            self._log.close()
            raise ResourceError(
                f"{directory} holds {self._log.used_bytes} bytes, the limit is {limit_bytes}, and old segments"
                f" can't be deleted: {error.strerror or error}"
            ) from error
        self._catalog.used_bytes = self._log.used_bytes
        if self.recovery.cut_bytes or self.recovery.unreadable:
            _log.warning(
                "%s was not closed cleanly: %d of %d segments can't be read, %d bytes of torn tails were cut off, and"
                " %d records are there. `kvstore check` says more, when no node has it open",
                directory,
                self.recovery.unreadable,
                self.recovery.segments,
                self.recovery.cut_bytes,
                self.recovery.records,
            )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here. Answers from memory, without I/O. While reads are set aside, none is."""
        if self._device.reading.resting:
            return [False] * len(keys)
        return self._catalog.contains(keys)

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages here that begin with ``prefix``, a namespace's fingerprint."""
        return self._catalog.keys(prefix)

    def tell_keys(self, held: HeldKeys, stop: threading.Event) -> bool:
        """See :meth:`kvstore.tiers.tier.OwnTier.tell_keys`. While reads are set aside, what is here counts as here."""
        return self._catalog.tell_keys(held, stop)

    def fingerprints(self) -> list[bytes]:
        """The namespaces that have pages here."""
        return self._catalog.fingerprints()

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """See :meth:`kvstore.tiers.tier.Tier.write`. Pages that come together lie side by side on disk.

        Raises:
            InvalidRequestError: a key does not have 64 bytes; nothing was stored.
        """
        for page in pages:
            if len(page.key) != KEY_BYTES:
                raise InvalidRequestError(f"a page key has {len(page.key)} bytes, it must have {KEY_BYTES}")
        overhead = self._log.overhead_bytes
        corrupt = _corrupt(pages) if overhead else set()
        with self._log_lock:
            if self._closed:  # the directory may be another's by now
                self._catalog.count_refused(len(pages))
                return [False] * len(pages)
            wanted = self._catalog.choose_writes(pages, corrupt, self._log.fits, overhead)
            if wanted:
                self._writer.write_tombstones()
                self._writer.write(wanted)
            keys = [page.key for page in pages]
            if self._catalog.enforce_quotas(keys):
                self._writer.write_tombstones()
            # A chunk may have pushed out an earlier one of the same call.
            self._catalog.publish_stored(pages, {entry.key for entry in wanted})
            return self._catalog.are_readable(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """See :meth:`kvstore.tiers.tier.Tier.read`."""
        asked = [
            each
            for each in self._catalog.find(keys)
            if self._page_log.page_bytes(each.place) == len(into[each.position])
        ]
        fetched = Fetched([])
        if asked and not self._device.reading.may_try():
            asked = []
        if asked:
            positions = [each.position for each in asked]
            fetched = self._page_log.fetch(
                [keys[at] for at in positions], [each.place for each in asked], [into[at] for at in positions]
            )
        return self._catalog.note_reads(keys, asked, fetched, into)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Note that pages were used, though they were not read here. Returns which of them are here. No I/O."""
        return self._catalog.touch(keys)

    def set_quota(self, prefix: bytes, limit_bytes: int) -> None:
        """Limit what the pages of a namespace take, from its next write on; 0: by the tier's limit alone.

        Pages that leave for it are forgotten; their bytes come back when their segments leave.

        Raises:
            InvalidRequestError: ``prefix`` is no fingerprint (32 bytes), or the limit is below 0.
        """
        self._catalog.set_quota(prefix, limit_bytes)

    def check_limit(self, limit_bytes: int) -> None:
        """Check that :meth:`set_limit` would take that.

        Raises:
            ConfigError: less than two segments.
        """
        self._log.check_limit(limit_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        """Limit the whole tier from now on; what is too much leaves before this returns. Segments keep their length.

        Raises:
            ConfigError: less than two segments; nothing was changed.
            ResourceError: the system refuses to delete segments, or is late; the limit holds for what comes.
        """
        with self._log_lock:
            if self._closed:
                return
            self._log.set_limit(limit_bytes)
            self._catalog.set_limit(limit_bytes)
            try:
                self._reclaimer.make_space(NO_CHUNK, carry=False)
            except OSError as error:
                self._page_log.write_failed(error)
                raise ResourceError(
                    f"the disk tier has {self._log.used_bytes} bytes, the limit is {limit_bytes} now, and segments"
                    f" can't be deleted: {error.strerror or error}"
                ) from error

    def set_write_limit(self, limit_bytes: int) -> None:
        """Limit what is written a day (UTC), from now on; what was written today counts. 0: no limit."""
        with self._log_lock:
            if not self._closed:
                self._log.set_write_limit(limit_bytes)
                self._catalog.used_bytes = self._log.used_bytes  # the budget's file counts

    def tell(self, events: EventRing) -> None:
        """Add to ``events`` from now on which pages come and go here."""
        self._catalog.tell(events)

    def used_by(self, prefix: bytes) -> int:
        """Bytes of a namespace's pages: whole blocks, and a record each in a header and a footer. No I/O."""
        return self._catalog.used_by(prefix)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, also over a restart. Returns how many were here. Segments left without pages are deleted."""
        with self._log_lock:
            if self._closed:
                return 0
            count, segments = self._catalog.forget(keys)
            self._reclaimer.delete_empty(segments)
            self._writer.write_tombstones()
        return count

    def flush(self) -> None:
        """Return when everything written so far would be found after the machine loses power.

        Raises:
            ResourceError: the system refuses, or is late; pages stay findable as long as the machine is up. The next
                call does not take the system's word for the segments that this one was refused for: their pages are
                read back, verified and written anew, or leave. A process that ends in between takes this knowledge
                along.
        """
        with self._log_lock:
            self._writer.write_tombstones()
            self._writer.sync()

    def reserve_for_other_files(self, size: int) -> None:
        """From now on other files in the directory take so many bytes of the limit. Evicts pages first if need be."""
        with self._log_lock:
            if self._closed:
                return
            self._log.other_files_bytes = size
            try:
                self._reclaimer.make_space(NO_CHUNK, carry=False)
            except OSError as error:
                self._page_log.write_failed(error)
            self._catalog.used_bytes = self._log.used_bytes

    def peers(self) -> list[Peer]:
        """None."""
        return []

    def health(self) -> TierHealth:
        """Whether reads and writes go well, as far as the latest ones tell; and whether the day's writes are spent."""
        reading, writing = self._device.reading, self._device.writing
        reads, writes = reading.failure, writing.failure
        if reads and writes:
            since = max(reads.since, writes.since)
            return TierHealth(TierState.DOWN, since, f"reads and writes fail: {writes.why}")
        if reads:
            return TierHealth(TierState.DEGRADED, reads.since, f"reads fail, so no page is found: {reads.why}")
        if writes:
            return TierHealth(TierState.DEGRADED, writes.since, f"writes fail, so it takes no page: {writes.why}")
        if spent := self._log.budget.spent_since:
            limit = format_size(self._log.budget.limit_bytes)
            reason = f"it takes no page before 00:00 UTC: the day's {limit} (disk_write_limit) are written"
            return TierHealth(TierState.DEGRADED, spent, reason)
        return TierHealth(TierState.OK, max(reading.since, writing.since))

    def statistics(self) -> TierStatistics:
        """A frozen view of the counters."""
        return self._catalog.statistics(self._log.limit_bytes)

    def check(self) -> CheckReport:
        """Read and verify every page that is stored, and the index against the segments. Changes and counts nothing.

        Raises:
            AssertionError: the index names what no segment holds: a defect of this program.
        """
        with self._log_lock:
            stored = self._catalog.all_pages()
            for place, _ in stored:
                segment = self._log.by_id.get(place.segment)
                assert segment is not None, f"no segment holds {place}"
                assert place.offset + record.padded(place.length) <= segment.size, f"{place} is past the end"
            assert self._catalog.used_bytes == self._log.used_bytes, "used bytes are not what the segments hold"
        records = damaged = unread = size = 0
        for batch in plan_chunks([place.length for place, _ in stored]):
            places, keys = zip(*stored[batch.start : batch.stop], strict=True)
            into = [aligned_empty(self._page_log.page_bytes(place)) for place in places]
            fetched = self._reader.fetch(keys, places, into, self._log.by_id.get)
            for array, outcome in zip(into, fetched.outcomes, strict=True):
                if outcome is not Outcome.GONE:
                    records += 1
                    size += len(array)
                    unread += outcome is Outcome.LATE
                    damaged += outcome in (Outcome.CORRUPT, Outcome.FAILED)
        return CheckReport(records, damaged, size, unread)

    def forked(self) -> None:
        """In a child: the directory is the parent's."""
        self._log_lock = threading.Lock()
        self._closed = True

    def close(self) -> None:
        """Flush and release. No method may be called after it."""
        with self._log_lock:
            if self._closed:
                return
            self._writer.write_tombstones()
            self._log.seal()
            try:
                self._writer.sync()
            except ResourceError as error:
                _log.warning("closing: %s", error)
            self._catalog.clear()
            self._closed = True
            self._log.close()
            self._device.close()


def _corrupt(pages: Sequence[PageWrite]) -> set[bytes]:
    """The keys of pages that their checksums refuse: once they are encrypted, that could not be seen any more."""
    return {page.key for page in pages if xxhash.xxh3_64_intdigest(page.payload.data) != page.checksum}
