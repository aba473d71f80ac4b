"""Pages in a segment log on disk: an index in memory over :mod:`kvstore.segments`."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequestError, ResourceError
from kvstore.segments import record
from kvstore.segments.aligned import aligned_empty
from kvstore.segments.blockfile import Patience
from kvstore.segments.cipher import TAG_BYTES, Cipher
from kvstore.segments.dead import DeadRecords
from kvstore.segments.health import Health, RareLines
from kvstore.segments.index import PageIndex, Place, Rows
from kvstore.segments.io_threads import IoThreads, LateError
from kvstore.segments.log import SegmentLog, write_cost
from kvstore.segments.plan import leading_within, order_to_leave, plan_chunks
from kvstore.segments.record import ChunkSize
from kvstore.segments.segment import NO_CHUNK, Entry, Segment
from kvstore.tiers.disk.quotas import Quotas
from kvstore.tiers.disk.reads import DiskReads, Fetched, Outcome
from kvstore.tiers.tier import KEY_BYTES, PageBytes, PageWrite, TierStatistics

_log = logging.getLogger(__name__)

DEADLINE_SECONDS = 5.0
_READS = 4
"""Reads that are in flight at once."""
_LATELY_SHARE = 2
"""Used while this part of the limit was written last: wanted."""
_CARRY_SHARE = 4
"""At most this part of a segment is carried over: of what is written, at most a third is written again."""
_RESTING = "the disk keeps failing, and is left alone for a while"
_VICTIMS_SHARE = 32  # for so many of a log's segments, the order in which they leave is decided at once


@dataclass(slots=True)
class _Counts:
    """The counters of :class:`~kvstore.tiers.tier.TierStatistics`."""

    asked: int = 0
    hit: int = 0
    missed: int = 0
    corrupt: int = 0
    errors: int = 0
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    late: int = 0
    carried: int = 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What :meth:`DiskTier.check` found."""

    records: int
    """Pages that are stored."""
    damaged: int
    """Of them, those whose bytes their checksum refuses or that the system refuses to read."""
    bytes: int
    """Payload of all of them."""


class DiskTier:
    """The tier that keeps pages in a directory, over restarts and crashes.

    ``errors`` counts single system calls that failed, each of which may answer for several pages, ``late`` what was
    not done by the deadline; ``refused`` counts pages that were not taken, whether they can't fit or the disk would not
    have them; ``read_bytes`` and ``written_bytes`` count payload, without padding.

    Pages leave by whole segments: the one of which the smallest part was used lately. Pages of it that were read since
    they were written, and lately, are carried over into the newest segment, up to a quarter of it: at least three
    quarters of each segment come back, so for every 3 bytes that are stored at most 1 is written again.

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
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        # Two locks. `_writing` is held by whoever changes the log, over its I/O; `_lock` guards what is below it, is
        # held for moments only, never over I/O, and is taken inside `_writing` or alone. New rows in the index come
        # with both held: whoever holds `_writing` may look through all of it without `_lock`.
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._index = PageIndex()
        self._quotas = Quotas(self._index)
        self._unreadable: set[bytes] = set()  # in the index, but the last read was refused: written anew if asked
        self._forgotten: set[bytes] = set()  # out of the index, but not yet by a tombstone on disk
        self._dead = DeadRecords()
        self._counts = _Counts()
        self._used_bytes = 0
        self._closed = False
        self._lately = limit_bytes // _LATELY_SHARE
        self._clock_of_use = 0  # bytes that were written
        self._to_leave: list[int] = []
        self._left_in_vain = False  # a segment left for a full file system, and there was no room all the same
        self._reading_health = Health(clock)
        self._writing_health = Health(clock)
        self._lines = RareLines(clock)
        # Threads apart, so that no write is late for the reads before it.
        self._reading_threads, self._writing_threads = IoThreads(_READS), IoThreads(1)
        self._reads = DiskReads(Patience(self._reading_threads, deadline), verify=verify)
        self._segments = SegmentLog(
            directory,
            limit_bytes,
            segment_bytes=segment_bytes,
            direct=direct,
            patience=Patience(self._writing_threads, deadline),
            clock=clock,
            late=self._failed,
            write_limit_bytes=write_limit_bytes,
            now=now,
            cipher=Cipher(key) if key is not None else None,
        )
        try:
            self._replay()
            self._make_room(NO_CHUNK, carry=False)
            self.recovery = self._segments.settle()
            """What opening found (:class:`~kvstore.segments.log.RecoveryReport`)."""
        except OSError as error:
            self._segments.close()
            raise ResourceError(
                f"{directory} holds {self._segments.used_bytes} bytes, the limit is {limit_bytes}, and old segments"
                f" can't be deleted: {error.strerror or error}"
            ) from error
        self._used_bytes = self._segments.used_bytes
        if self.recovery.cut_bytes or self.recovery.unreadable:
            _log.warning("%s was not closed in order: %s", directory, self.recovery)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here. Answers from memory, without I/O. While reads are set aside, none is."""
        if self._reading_health.resting:
            return [False] * len(keys)
        with self._lock:
            return [row >= 0 for row in self._rows(keys)]

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages here that begin with ``prefix``, a namespace's fingerprint."""
        with self._lock:
            return self._index.keys(self._index.rows_with_prefix(prefix))

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """Store pages, in the order given, side by side; makes room within the limit first.

        Returns:
            Which pages are here now and would be found after a crash of the process (one already here counts).

        Raises:
            InvalidRequestError: a key does not have 64 bytes; nothing was stored.
        """
        for page in pages:
            if len(page.key) != KEY_BYTES:
                raise InvalidRequestError(f"a page key has {len(page.key)} bytes, it must have {KEY_BYTES}")
        with self._writing:
            wanted = self._wanted(pages)
            if wanted:
                self._write_tombstones()
            for chunk in plan_chunks(self._segments.stored_lengths(wanted), self._segments.chunk_bytes):
                self._store([wanted[index] for index in chunk])
            with self._lock:
                # A chunk may have pushed out an earlier one of the same call.
                rows = self._rows([page.key for page in pages])
                return [row >= 0 and page.key not in self._unreadable for page, row in zip(pages, rows, strict=True)]

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """Read pages into the arrays given, each of its page's exact length.

        Returns:
            For each page its verified xxh3_64, or None for a miss (the array may then hold anything).
        """
        answers: list[int | None] = [None] * len(keys)
        with self._lock:
            rows = self._index.find(keys)
            here = np.flatnonzero(rows >= 0)
            asked = [
                (position, row, place)
                for position, row, place in zip(
                    here.tolist(), rows[here].tolist(), self._index.places(rows[here]), strict=True
                )
                if place.length - self._overhead(place) == len(into[position])
            ]
        places = [place for _, _, place in asked]
        fetched = Fetched([])
        if not asked or self._may(self._reading_health):
            positions = [position for position, _, _ in asked]
            fetched = self._fetch([keys[at] for at in positions], places, [into[at] for at in positions])
        else:
            asked = []
        with self._lock:
            counts = self._counts
            counts.asked += len(keys)
            counts.errors += len(fetched.errors)
            counts.late += fetched.late
            touched = []
            for (position, row, place), outcome, checksum in zip(
                asked, fetched.outcomes, fetched.checksums, strict=True
            ):
                key = keys[position]
                if outcome is Outcome.FOUND:
                    answers[position] = checksum
                    counts.hit += 1
                    counts.read_bytes += len(into[position])
                    touched.append(row)
                    if self._unreadable:
                        self._unreadable.discard(key)
                elif outcome is Outcome.CORRUPT:
                    counts.corrupt += 1
                    if self._place_of(key) == place:
                        self._forget([key])
                # By now the page may have left and come back: what was learnt holds for the place that was read.
                elif outcome is Outcome.FAILED and self._place_of(key) == place:
                    self._unreadable.add(key)
            if touched:  # a row may have got another page by now, which then counts as read: no harm
                self._index.touch(np.array(touched, np.int64), self._clock_of_use)
            counts.missed += answers.count(None)
        return answers

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Note that pages were used, though they were not read here: those that are used stay longer. No I/O.

        Returns:
            Which of them are here.
        """
        with self._lock:
            rows = self._index.find(keys)
            self._index.touch(rows[rows >= 0], self._clock_of_use)
        return [row >= 0 for row in rows.tolist()]

    def set_quota(self, prefix: bytes, limit_bytes: int) -> None:
        """Limit what the pages of a namespace take, from its next write on; 0: by the tier's limit alone.

        Pages that leave for it are forgotten; their bytes come back when their segments leave.

        Raises:
            InvalidRequestError: ``prefix`` is no fingerprint (32 bytes), or the limit is below 0.
        """
        with self._lock:
            self._quotas.set(prefix, limit_bytes)

    def used_by(self, prefix: bytes) -> int:
        """Bytes of a namespace's pages: whole blocks, and a record each in a header and a footer. No I/O."""
        with self._lock:
            return self._index.bytes_of(prefix)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, also over a restart. Returns how many were here. Segments left without pages are deleted."""
        with self._writing:
            with self._lock:
                rows = self._index.find(list(dict.fromkeys(keys)))  # no key twice
                here = self._index.keys(rows[rows >= 0])
                touched = {place.segment for place in self._index.places(rows[rows >= 0])}
                self._forget(here)
            self._drop_empty(touched)
            self._write_tombstones()
        return len(here)

    def flush(self) -> None:
        """Return when everything written so far would be found after the machine loses power.

        Raises:
            ResourceError: the system refuses, or is late; pages stay findable as long as the machine is up.
        """
        with self._writing:
            self._write_tombstones()
            self._sync()

    def statistics(self) -> TierStatistics:
        """A frozen view of the counters."""
        with self._lock:
            return TierStatistics(
                used_bytes=self._used_bytes,
                limit_bytes=self._segments.limit_bytes,
                pages=len(self._index),
                **asdict(self._counts),
            )

    def check(self) -> CheckReport:
        """Read and verify every page that is stored, and the index against the segments. Changes and counts nothing.

        Raises:
            AssertionError: the index names what no segment holds: a defect of this program.
        """
        with self._writing, self._lock:
            rows = self._index.all_rows()
            stored = sorted(zip(self._index.places(rows), self._index.keys(rows), strict=True))
            for place, _ in stored:
                segment = self._segments.by_id.get(place.segment)
                assert segment is not None, f"no segment holds {place}"
                assert place.offset + record.padded(place.length) <= segment.size, f"{place} is past the end"
            assert self._used_bytes == self._segments.used_bytes, "used bytes are not what the segments hold"
        records = damaged = size = 0
        for batch in plan_chunks([place.length for place, _ in stored]):
            here = [stored[index] for index in batch]
            into = [aligned_empty(place.length - self._overhead(place)) for place, _ in here]
            fetched = self._reads.fetch(
                [key for _, key in here], [place for place, _ in here], into, self._segments.by_id.get
            )
            for array, outcome in zip(into, fetched.outcomes, strict=True):
                if outcome is not Outcome.GONE:
                    records += 1
                    size += len(array)
                    damaged += outcome is not Outcome.FOUND
        return CheckReport(records, damaged, size)

    def close(self) -> None:
        """Flush and release. No method may be called after it."""
        with self._writing:
            if self._closed:
                return
            self._write_tombstones()
            self._segments.seal()
            try:
                self._sync()
            except ResourceError as error:
                _log.warning("closing: %s", error)
            with self._lock:
                self._index = PageIndex()
                self._quotas = Quotas(self._index)
            self._closed = True
            self._segments.close()
            self._reading_threads.close()
            self._writing_threads.close()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        for age, (segment, records) in enumerate(self._segments.replay()):
            keys = _table_keys(records)
            hidden = records["codec"] == record.TOMBSTONE
            if not hidden.any() and len(set(keys)) == len(keys):
                self._replay_pages(segment, keys, records, age)
                continue
            for at, key in enumerate(keys):  # in order: a page may come, go and come again
                if hidden[at]:
                    segment.tombstones.append(key)
                    self._forget([key], pending=False)
                else:
                    self._replay_pages(segment, [key], records[at : at + 1], age)
        self._clock_of_use = self._lately + len(self._segments.segments) + 1  # none of them was used lately

    def _replay_pages(self, segment: Segment, keys: list[bytes], records: npt.NDArray[np.void], tick: int) -> None:
        """Pages of one segment, no key twice."""
        segment.encrypted = segment.encrypted or bool((records["codec"] == record.AES_GCM).any())
        rows = self._bury(keys)
        ids = np.full(len(keys), segment.id, np.uint64)
        self._index.put(keys, ids, records["offset"], records["length"], records["checksum"], tick, rows)

    # -- the index; the caller holds the lock ------------------------------------------------------------------------

    def _rows(self, keys: Sequence[bytes]) -> list[int]:
        rows: list[int] = self._index.find(keys).tolist()
        return rows

    def _place_of(self, key: bytes) -> Place | None:
        rows = self._index.find([key])
        return self._index.places(rows)[0] if rows[0] >= 0 else None

    def _bury(self, keys: Sequence[bytes]) -> Rows:
        """The records of these pages, where they have any, count no longer. Returns the pages' rows."""
        rows = self._index.find(keys)
        known = np.flatnonzero(rows >= 0)
        for at, place in zip(known.tolist(), self._index.places(rows[known]), strict=True):
            self._dead.add(keys[at], place.segment)
        return rows

    def _forget(self, keys: Sequence[bytes], *, pending: bool = True) -> None:
        """Take pages out of the index; their records stay behind, to be hidden by tombstones."""
        rows = self._bury(keys)
        self._index.remove(rows[rows >= 0])
        self._unreadable.difference_update(keys)
        if pending:
            self._forgotten.update(keys)

    # -- writing; the caller holds `_writing` ------------------------------------------------------------------------

    def _wanted(self, pages: Sequence[PageWrite]) -> list[Entry]:
        """Which of the pages have to be written: each once, not those that are here, not those that can't be."""
        wanted: dict[bytes, Entry] = {}
        wrong = self._wrong(pages) if self._segments.overhead_bytes else set()
        with self._lock:
            rows = self._index.find([page.key for page in pages])
            here = rows >= 0
            # What is here is in use: it should not leave for the rest of its prefix.
            self._index.touch(rows[here], self._clock_of_use)
            fits = {length: length and self._segments.fits(length) for length in {len(page.payload) for page in pages}}
            for (key, checksum, payload, _), known in zip(pages, here.tolist(), strict=True):
                if key in wanted or (known and key not in self._unreadable):
                    continue
                if key in wrong:
                    self._counts.corrupt += 1
                elif fits[len(payload)]:
                    wanted[key] = Entry(key, checksum, payload)
                else:
                    self._counts.refused += 1
            for fingerprint, keys in self._quotas.limited([page.key for page in pages]).items():
                self._keep_quota(fingerprint, keys, wanted)
        return list(wanted.values())

    def _keep_quota(self, fingerprint: bytes, keys: Sequence[bytes], wanted: dict[bytes, Entry]) -> None:
        """Let pages of a namespace leave for those of ``keys`` that are wanted; drop from these what can't fit."""
        here = dict(zip(keys, self._rows(keys), strict=True))
        asked = [key for key in keys if key in wanted or here[key] >= 0]
        lengths = self._index.lengths(np.array([here[key] for key in asked], np.int64)).tolist()
        for at, key in enumerate(asked):
            if key in wanted:
                lengths[at] = wanted[key].length + self._segments.overhead_bytes
        fitting, leaving = self._quotas.fit(fingerprint, asked, lengths)
        for key in asked[fitting:]:
            self._counts.refused += wanted.pop(key, None) is not None
        self._counts.evicted += len(leaving)
        self._forget(self._index.keys(leaving))

    def _wrong(self, pages: Sequence[PageWrite]) -> set[bytes]:
        """The pages that are not what their checksums say: once encrypted, that could not be seen any more."""
        return {page.key for page in pages if xxhash.xxh3_64_intdigest(page.payload.data) != page.checksum}

    def _store(self, entries: Sequence[Entry]) -> None:
        """Make room for one chunk of pages, and write it. What can't be is counted."""
        size = self._segments.chunk_size(entries)
        # Closed: the directory may be another's by now.
        may = not self._closed and self._may(self._writing_health)
        if not may or not self._segments.budget.take(write_cost(size)):
            with self._lock:
                self._counts.refused += len(entries)
            return
        try:
            try:
                self._make_room(size)
                self._append(entries)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._left_in_vain:
                    raise
                # The file system is smaller than the limit. A segment leaves for these pages; if that brings no room,
                # others take it, and no further one leaves for them.
                self._failed(error)
                self._segments.file_system_is_full()
                self._left_in_vain = True
                self._make_room(size)
                self._append(entries)
        except OSError as error:
            self._failed(error)
            self._health_after(self._writing_health, error)
            self._lines.say(_log.warning, "%d pages not written: %s", len(entries), error)
            with self._lock:
                self._counts.refused += len(entries)
                self._used_bytes = self._segments.used_bytes
        else:
            self._left_in_vain = False
            self._writing_health.succeeded()

    def _append(self, entries: Sequence[Entry], *, carried: bool = False) -> None:
        """Write one chunk, and index it.

        Raises:
            OSError: the system refuses, or is late.
        """
        keys = [entry.key for entry in entries if entry.payload is not None]
        try:
            segment, records = self._segments.append(entries)
        except OSError:
            # What can't be cut off may be whole, now or when a late call ends: it must not come back after a restart.
            last = self._segments.segments[-1] if self._segments.segments else None
            if last is not None and not last.sealed:
                with self._lock:
                    for key in keys:
                        self._dead.add(key, last.id)
                    self._forgotten.update(key for key, row in zip(keys, self._rows(keys), strict=True) if row < 0)
            raise
        if len(keys) < len(entries):
            records = records[records["codec"] != record.TOMBSTONE]
        ids = np.full(len(keys), segment.id, np.uint64)
        columns = (ids, records["offset"], records["length"], records["checksum"])
        with self._lock:
            self._used_bytes = self._segments.used_bytes
            rows = self._bury(keys)
            if not carried:
                self._clock_of_use += sum(map(record.padded, records["length"].tolist()))
                self._counts.stored += len(keys)
                self._counts.written_bytes += sum([entry.length for entry in entries])
            else:
                self._counts.carried += len(keys)
            self._index.put(keys, *columns, self._clock_of_use, rows)
            # Either by this tombstone, or because this page comes after.
            self._forgotten.difference_update([entry.key for entry in entries])
            self._unreadable.difference_update(keys)

    def _write_tombstones(self) -> None:
        """Bring to disk which pages are forgotten. Those that can't be written now are tried again next time."""
        if not self._forgotten or self._closed or not self._may(self._writing_health):
            return
        with self._lock:
            entries = [Entry(key, 0, None) for key in self._forgotten]
        try:
            for chunk in plan_chunks([0] * len(entries)):
                self._make_room(ChunkSize(len(chunk), 0))
                # Making room may have made some of them needless.
                still = [entries[index] for index in chunk if entries[index].key in self._forgotten]
                if still:
                    self._segments.budget.take(write_cost(ChunkSize(len(still), 0)), must=True)
                    self._append(still)
        except OSError as error:
            self._failed(error)
            self._health_after(self._writing_health, error)
            self._lines.say(_log.warning, "%d removals not written: %s", len(entries), error)
            with self._lock:
                self._used_bytes = self._segments.used_bytes
        else:
            self._writing_health.succeeded()

    def _sync(self) -> None:
        if not self._may(self._writing_health):
            raise ResourceError(f"what was written may not survive a loss of power: {_RESTING}")
        try:
            self._segments.flush()
        except OSError as error:
            self._failed(error)
            self._health_after(self._writing_health, error)
            raise ResourceError(f"what was written may not survive a loss of power: {error}") from error

    # -- making room; the caller holds `_writing` --------------------------------------------------------------------

    def _make_room(self, chunk: ChunkSize, *, carry: bool = True) -> None:
        """Let segments leave until a chunk of this size fits.

        Raises:
            OSError: the system refuses to delete one, or is late, or all that could leave has.
        """
        log = self._segments
        # First with something to spare for carrying over, as long as there is an older segment to take it from.
        while carry and log.missing(chunk, log.reserve_bytes) > 0:
            candidates = [segment for segment in log.may_leave(chunk) if not log.is_active(segment)]
            if not candidates:
                break
            self._reclaim(self._victim(candidates), candidates[0], carry=True)
        while log.missing(chunk) > 0:
            candidates = log.may_leave(chunk)
            if not candidates:
                if log.try_to_grow():  # nothing is left that could make room in a full file system
                    continue
                raise OSError(errno.ENOSPC, "no segment can leave")
            self._reclaim(self._victim(candidates), candidates[0], carry=carry)

    def _victim(self, candidates: Sequence[Segment]) -> Segment:
        """The segment of which the least is wanted."""
        by_id = {segment.id: segment for segment in candidates}
        self._to_leave = [each for each in self._to_leave if each in by_id]
        if not self._to_leave:
            ids = [segment.id for segment in self._segments.segments]
            live, wanted = self._index.bytes_by_segment(ids, self._clock_of_use - self._lately)
            sizes = {each: (a, w) for each, a, w in zip(ids, live, wanted, strict=True)}
            order = order_to_leave(
                [segment.footprint for segment in candidates],
                [sizes[segment.id][0] for segment in candidates],
                [sizes[segment.id][1] for segment in candidates],
            )
            self._to_leave = [candidates[at].id for at in order[: 1 + len(order) // _VICTIMS_SHARE]]
        return by_id[self._to_leave.pop(0)]

    def _reclaim(self, victim: Segment, oldest: Segment, *, carry: bool) -> None:
        """Carry over what is wanted of a segment, forget the rest, delete it.

        Args:
            victim: what should leave.
            oldest: leaves instead where there is no room for the tombstones that the victim's going asks for; the
                oldest asks for none.
            carry: whether to carry anything over.

        Raises:
            OSError: the system refuses to delete it, or is late.
        """
        with self._lock:
            hidden = self._to_be_hidden(victim)
        if hidden and victim is not oldest and self._segments.missing(ChunkSize(len(hidden), 0)) > 0:
            victim = oldest
        if carry:
            self._carry_over(victim)
        with self._lock:
            hidden = self._to_be_hidden(victim)
            rows = self._index.rows_in(victim.id)
            leaving = self._index.keys(rows)
            self._index.remove(rows)
            self._unreadable.difference_update(leaving)
            self._counts.evicted += len(leaving)
            self._forgotten.update(hidden)
        try:
            # Before the file goes: a crash in between must not bring back what was removed.
            for chunk in plan_chunks([0] * len(hidden)):
                size = ChunkSize(len(chunk), 0)
                if self._segments.missing(size) <= 0:
                    self._segments.budget.take(write_cost(size), must=True)
                    self._append([Entry(hidden[index], 0, None) for index in chunk])
            self._segments.drop(victim)
        except OSError:
            with self._lock:
                for key in leaving:  # a sound page may come back from there, but none that is removed from now on
                    self._dead.add(key, victim.id)
            raise
        finally:
            with self._lock:
                self._used_bytes = self._segments.used_bytes
        with self._lock:
            self._forgotten.difference_update(self._dead.drop(victim.id))

    def _to_be_hidden(self, victim: Segment) -> list[bytes]:
        """The keys that need a tombstone elsewhere when this segment goes: older segments hold dead records of them.

        These are pages that lie in it, and keys that its tombstones hide now. The caller holds the lock.
        """
        tombstones = list(dict.fromkeys(victim.tombstones))
        rows = self._index.find(tombstones).tolist()
        # A page of the key that lies in another segment hides the rest as well.
        keys = [key for key, row in zip(tombstones, rows, strict=True) if row < 0]
        if any(segment.unread and segment.id < victim.id for segment in self._segments.segments):
            return keys  # what that one holds is not known
        if self._dead:
            keys += self._index.keys(self._index.rows_in(victim.id))
        return [key for key in keys if self._dead.older(key, victim.id)]

    def _carry_over(self, victim: Segment) -> None:
        """Write the pages of a segment that are wanted most once more, as far as there is room for them."""
        with self._lock:
            rows = self._index.read_since(self._index.rows_in(victim.id), self._clock_of_use - self._lately)
            places, keys = self._index.places(rows), self._index.keys(rows)
        room = min(-self._segments.missing(), self._segments.reserve_bytes or victim.size, victim.size)
        budget = min(victim.size // _CARRY_SHARE, room)
        most = leading_within([place.length for place in places], budget)
        chosen = sorted(zip(places[:most], keys[:most], strict=True))
        for chunk in plan_chunks([place.length for place, _ in chosen], self._segments.chunk_bytes):
            here = [chosen[index] for index in chunk]
            memory = [aligned_empty(place.length - self._overhead(place)) for place, _ in here]
            fetched = self._fetch([key for _, key in here], [place for place, _ in here], memory)
            with self._lock:
                entries = [
                    Entry(key, checksum, array)
                    for (place, key), array, outcome, checksum in zip(
                        here, memory, fetched.outcomes, fetched.checksums, strict=True
                    )
                    # A reader may have found it damaged since it was chosen.
                    if outcome is Outcome.FOUND and self._place_of(key) == place
                ]
                self._counts.errors += len(fetched.errors)
                self._counts.late += fetched.late
            size = self._segments.chunk_size(entries)
            if not entries or self._segments.missing(size) > 0 or not self._segments.budget.take(write_cost(size)):
                return
            try:
                self._append(entries, carried=True)
            except OSError as error:
                self._failed(error)
                return

    def _drop_empty(self, segments: set[int]) -> None:
        """Delete those of the segments in which no page is left."""
        for number in sorted(segments):
            segment = self._segments.by_id.get(number)
            if segment is None or segment.stuck or self._segments.is_active(segment):
                continue
            with self._lock:
                hidden = self._to_be_hidden(segment)
                full = len(self._index.rows_in(number)) > 0
            if full or self._segments.missing(ChunkSize(len(hidden), 0)) > 0:
                continue
            if not self._may(self._writing_health):
                return
            try:
                self._reclaim(segment, segment, carry=False)
            except OSError as error:
                self._failed(error)
                self._health_after(self._writing_health, error)

    # -- I/O and its failures ----------------------------------------------------------------------------------------

    def _overhead(self, place: Place) -> int:
        """How much longer a page is on disk than in memory."""
        segment = self._segments.by_id.get(place.segment)
        return TAG_BYTES if segment is not None and segment.encrypted else 0

    def _fetch(self, keys: Sequence[bytes], places: Sequence[Place], into: Sequence[PageBytes]) -> Fetched:
        fetched = self._reads.fetch(keys, places, into, self._segments.by_id.get)
        if fetched.errors:
            error = fetched.errors[0]
            self._lines.say(_log.warning, "%d reads failed: %s", len(fetched.errors), error)
            self._health_after(self._reading_health, error)
        elif places:
            self._reading_health.succeeded()
        return fetched

    def _may(self, health: Health) -> bool:
        """Whether to try an I/O now."""
        threads = self._reading_threads if health is self._reading_health else self._writing_threads
        return not threads.all_hang and health.allows()

    def _health_after(self, health: Health, error: OSError) -> None:
        health.failed(at_once=isinstance(error, LateError))

    def _failed(self, error: OSError) -> None:
        with self._lock:
            self._counts.errors += 1
            self._counts.late += isinstance(error, LateError)


def _table_keys(records: npt.NDArray[np.void]) -> list[bytes]:
    joined = records["key"].tobytes()
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
