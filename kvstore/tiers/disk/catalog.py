"""The catalog of the disk tier, in memory: where each page lies, what needs a tombstone, what was counted. No I/O.

Its lock is one of the tier's two, see :mod:`kvstore.tiers.disk`: every method holds it, for as long as it takes to
decide. Rows are added to the index under both locks, so whoever holds the log lock may scan the index without this one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.events.ring import EventRing
from kvstore.segments import record
from kvstore.segments.index import Place
from kvstore.segments.segment import Entry, Segment
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.disk.pages import PAGES_A_STEP, Asked, LogPages
from kvstore.tiers.disk.reader import Fetched, Outcome
from kvstore.tiers.quotas import Quotas
from kvstore.tiers.tier import HeldKeys, PageBytes, PageWrite, TierStatistics

_RECENT_SHARE = 2
"""A page is in recent use if it was used while the last half of the limit was written."""
KEYS_A_LOOK = 1 << 13
"""Most keys looked up under one hold of the lock."""


class DiskCatalog:
    """The pages of one log, of a tier that is limited to ``limit_bytes``. Safe for threads."""

    def __init__(self, limit_bytes: int, counts: TierCounts | None = None) -> None:
        self._lock = threading.Lock()
        self._pages = LogPages(self._lock)
        self._quotas = Quotas(self._pages.index)
        self._recent_bytes = limit_bytes // _RECENT_SHARE
        self._tick = self._recent_bytes  # the clock of use: grows by the bytes that are written
        self._used_bytes = 0
        self._counts = counts or TierCounts()

    # -- lookups -----------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here."""
        here: list[bool] = []
        for at in range(0, len(keys), KEYS_A_LOOK):
            with self._lock:
                here += (self._pages.index.find(keys[at : at + KEYS_A_LOOK]) >= 0).tolist()
        return here

    def are_readable(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here, and were not refused by the system when they were read last."""
        with self._lock:
            here: list[bool] = (self._pages.index.find(keys) >= 0).tolist()
            if not self._pages.unreadable:
                return here
            return [found and key not in self._pages.unreadable for key, found in zip(keys, here, strict=True)]

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages that begin with ``prefix``."""
        with self._lock:
            rows = self._pages.index.rows_with_prefix(prefix)
        found: list[bytes] = []
        for at in range(0, len(rows), PAGES_A_STEP):
            some = rows[at : at + PAGES_A_STEP]
            with self._lock:  # pages may have left since, and others may have their rows
                found += self._pages.index.keys(some[self._pages.index.footprints(some) > 0])
            time.sleep(0)  # whoever waits for the lock goes first
        return [key for key in found if key.startswith(prefix)]

    def tell_keys(self, held: HeldKeys, stop: threading.Event) -> bool:
        """See :meth:`kvstore.tiers.tier.KnownTier.tell_keys`."""
        return self._pages.told.tell(self._pages.index, held, stop)

    def tell(self, events: EventRing) -> None:
        """Add to ``events`` from now on which pages come and go."""
        self._pages.events = events

    def fingerprints(self) -> list[bytes]:
        """The namespaces that have pages here."""
        with self._lock:
            return self._pages.index.fingerprints()

    def used_by(self, fingerprint: bytes) -> int:
        """Bytes of a namespace's pages: whole blocks, and a record each in a header and a footer."""
        with self._lock:
            return self._pages.index.bytes_of(fingerprint)

    def statistics(self, limit_bytes: int) -> TierStatistics:
        """A frozen view of the counters."""
        with self._lock:
            return TierStatistics(
                used_bytes=self._used_bytes, limit_bytes=limit_bytes, pages=len(self._pages.index), **self._counts.all()
            )

    def all_pages(self) -> list[tuple[Place, bytes]]:
        """Every page, by place."""
        with self._lock:
            return sorted(self._pages.placed(self._pages.index.all_rows()))

    # -- gauges, counters, limits ------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """What the log takes on disk."""
        return self._used_bytes

    @used_bytes.setter
    def used_bytes(self, size: int) -> None:
        with self._lock:
            self._used_bytes = size

    def count_refused(self, pages: int) -> None:
        """Pages could not be written."""
        self._counts.add(refused=pages)

    def count_failed(self, errors: int, late: int) -> None:
        """System calls failed, and pages or calls were late."""
        self._counts.add(errors=errors, late=late)

    def set_limit(self, limit_bytes: int) -> None:
        """The tier's limit has changed, and with it what counts as recent use."""
        with self._lock:
            self._recent_bytes = limit_bytes // _RECENT_SHARE

    def set_quota(self, fingerprint: bytes, limit_bytes: int) -> None:
        """See :class:`~kvstore.tiers.quotas.Quotas`."""
        with self._lock:
            self._quotas.set(fingerprint, limit_bytes)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Note that pages were used. Returns which are here."""
        with self._lock:
            rows = self._pages.index.find(keys)
            self._pages.index.touch(rows[rows >= 0], self._tick)
        return [row >= 0 for row in rows.tolist()]

    def clear(self) -> None:
        """Forget all pages, and leave the counters to who opens the tier next."""
        with self._lock:
            self._pages.clear()
            self._quotas = Quotas(self._pages.index)
            self._counts.detach()

    # -- opening -----------------------------------------------------------------------------------------------------

    def replay(self, age: int, segment: Segment, records: npt.NDArray[np.void]) -> None:
        """Take in the records of one segment, the oldest segment first.

        Args:
            age: how many segments came before.
            segment: is told its tombstones, and whether its pages are encrypted.
            records: in the order in which they were written (``record.RECORDS``).
        """
        with self._lock:
            # None of them counts as in recent use, but those of newer segments were used later.
            self._tick = self._recent_bytes + age + 1
            self._pages.replay(segment, records, age)

    # -- reading -----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Asked]:
        """Those of the pages that are here."""
        with self._lock:
            return self._pages.find(keys)

    def note_reads(
        self, keys: Sequence[bytes], asked: Sequence[Asked], fetched: Fetched, into: Sequence[PageBytes]
    ) -> list[int | None]:
        """Count a call that read, note the use of what was found, and forget what was damaged.

        Args:
            keys: of the call.
            asked: those of its pages whose reads were tried.
            fetched: what became of these.
            into: the call's arrays.

        Returns:
            For each page of the call its checksum, or None.
        """
        answers: list[int | None] = [None] * len(keys)
        touched = []
        corrupt = read_bytes = 0
        with self._lock:
            for (position, row, place), outcome, checksum in zip(
                asked, fetched.outcomes, fetched.checksums, strict=True
            ):
                key = keys[position]
                if outcome is Outcome.FOUND:
                    answers[position] = checksum
                    read_bytes += len(into[position])
                    touched.append(row)
                    if self._pages.unreadable:
                        self._pages.unreadable.discard(key)
                elif outcome is Outcome.CORRUPT:
                    corrupt += 1
                    if self._pages.place_of(key) == place:
                        self._pages.forget([key])
                # By now the page may have left and come back: what was learnt holds for the place that was read.
                elif outcome is Outcome.FAILED and self._pages.place_of(key) == place:
                    self._pages.unreadable.add(key)
            if touched:  # a row may have got another page by now, which then counts as read: no harm
                self._pages.index.touch(np.array(touched, np.int64), self._tick)
        missed = answers.count(None)
        self._counts.add(
            asked=len(keys),
            hit=len(keys) - missed,
            missed=missed,
            corrupt=corrupt,
            errors=len(fetched.errors),
            late=fetched.late,
            read_bytes=read_bytes,
        )
        return answers

    # -- writing; callers hold the log lock ---------------------------------------------------------------------------

    def choose_writes(
        self, pages: Sequence[PageWrite], corrupt: set[bytes], fits: Callable[[int], bool], overhead_bytes: int
    ) -> list[Entry]:
        """Which pages have to be written: each once, not those that are here, not those that can't be.

        What is here counts as used: it should not leave for the rest of its prefix. What does not fit into the quota
        of its namespace is refused; nothing leaves yet, see :meth:`enforce_quotas`.

        Args:
            pages: that are asked for.
            corrupt: the keys of those that their checksums refuse.
            fits: whether a payload of a length could be stored at all.
            overhead_bytes: how much longer payloads are on disk.
        """
        wanted: dict[bytes, Entry] = {}
        keys = [page.key for page in pages]
        with self._lock:
            rows = self._pages.index.find(keys)
            here = rows >= 0
            self._pages.index.touch(rows[here], self._tick)
            possible = {length: length > 0 and fits(length) for length in {len(page.payload) for page in pages}}
            for (key, checksum, payload, _), known in zip(pages, here.tolist(), strict=True):
                if key in wanted or (known and key not in self._pages.unreadable):
                    continue
                if key in corrupt:
                    self._counts.add(corrupt=1)
                elif possible[len(payload)]:
                    wanted[key] = Entry(key, checksum, payload)
                else:
                    self._counts.add(refused=1)
            lengths = {key: entry.length + overhead_bytes for key, entry in wanted.items()}
            refused = self._quotas.refused(keys, lengths)
            for key in refused:
                del wanted[key]
            self._counts.add(refused=len(refused))
        return list(wanted.values())

    def enforce_quotas(self, keys: Sequence[bytes]) -> int:
        """After a call that wrote these: evict pages of its namespaces that are over their quotas. Returns how many."""
        with self._lock:
            leaving = self._pages.index.keys(self._quotas.leaving(keys))
            if leaving:
                self._pages.forget(leaving)
                self._counts.add(evicted=len(leaving))
        return len(leaving)

    def note_appended(
        self, segment: int, entries: Sequence[Entry], records: npt.NDArray[np.void], used_bytes: int, *, carried: bool
    ) -> None:
        """Index a chunk that was appended.

        Args:
            segment: the id of the segment that holds it.
            entries: what was appended.
            records: of these (``record.RECORDS``).
            used_bytes: what the log takes now.
            carried: whether the pages were carried over from another segment.
        """
        keys = [entry.key for entry in entries if entry.payload is not None]
        if len(keys) < len(entries):
            records = records[records["codec"] != record.TOMBSTONE]
        with self._lock:
            self._used_bytes = used_bytes
            if carried:
                self._counts.add(carried=len(keys))
            else:
                self._tick += record.padded_in_all(records["length"].tolist())
                written = sum([0 if payload is None else len(payload) for _, _, payload in entries])
                self._counts.add(stored=len(keys), written_bytes=written)
            self._pages.put(segment, keys, records, self._tick)
            # Settled, by this tombstone or by the page that comes after what it would have hidden.
            self._pages.tombstones.settled([entry.key for entry in entries])
            self._pages.unreadable.difference_update(keys)

    def publish_stored(self, pages: Sequence[PageWrite], written: Container[bytes]) -> None:
        """After a call that wrote: add to ``events`` which of the pages that it wrote are here now."""
        if self._pages.events.wanted:
            with self._lock:
                self._pages.publish_stored(pages, written)

    def note_failed_append(self, segment: int, keys: Sequence[bytes]) -> None:
        """An append failed, or was late, but may have left whole pages in the segment: these must not come back."""
        with self._lock:
            self._pages.tombstones.superseded(keys, [segment] * len(keys))
            rows = self._pages.index.find(keys).tolist()
            self._pages.tombstones.want([key for key, row in zip(keys, rows, strict=True) if row < 0])

    # -- removal; callers hold the log lock ---------------------------------------------------------------------------

    def forget(self, keys: Sequence[bytes]) -> tuple[int, set[int]]:
        """Take pages out of the index. Returns how many were here, and the segments that they lay in.

        One that is not here may lie in a segment that could not be deleted, or that took a write too late: it must not
        come back either.
        """
        keys = list(dict.fromkeys(keys))  # none twice
        absent = [key for key, here in zip(keys, self.contains(keys), strict=True) if not here]
        with self._lock:
            self._pages.tombstones.want_where_dead(absent)
        count = 0
        segments: set[int] = set()
        for at in range(0, len(keys), PAGES_A_STEP):
            with self._lock:
                rows = self._pages.index.find(keys[at : at + PAGES_A_STEP])
                rows = rows[rows >= 0]
                count += len(rows)
                segments.update(place.segment for place in self._pages.index.places(rows))
                self._pages.forget(self._pages.index.keys(rows))
            time.sleep(0)  # whoever waits for the lock goes first
        return count, segments

    def pending_tombstones(self) -> list[bytes]:
        """Keys that were removed, and whose tombstones are not written yet."""
        with self._lock:
            return self._pages.tombstones.pending

    def still_pending(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys whose tombstones are still to be written."""
        with self._lock:
            return self._pages.tombstones.still_pending(keys)

    # -- reclaiming segments; callers hold the log lock ---------------------------------------------------------------

    def bytes_by_segment(self, segments: Sequence[int]) -> tuple[list[int], list[int]]:
        """Bytes of the pages in each segment: of all, and of those in recent use. Without this lock: see above."""
        return self._pages.index.bytes_by_segment(segments, self._tick - self._recent_bytes)

    def has_pages_in(self, segment: int) -> bool:
        """Whether any page lies in a segment."""
        with self._lock:
            return len(self._pages.index.rows_in(segment)) > 0

    def recently_read_in(self, segment: int) -> list[tuple[Place, bytes]]:
        """The pages of a segment that were read there recently; the latest first."""
        with self._lock:
            rows = self._pages.index.rows_in(segment)
            return self._pages.placed(self._pages.index.read_since(rows, self._tick - self._recent_bytes))

    def pages_in(self, segment: int) -> list[tuple[Place, bytes]]:
        """The pages of a segment, by place."""
        with self._lock:
            return self._pages.placed(self._pages.index.rows_in(segment))

    def still_at(self, pages: Sequence[tuple[Place, bytes]]) -> list[bool]:
        """Which of the pages still lie at these places."""
        with self._lock:
            return [self._pages.place_of(key) == place for place, key in pages]

    def tombstones_needed(self, segment: Segment, *, behind_unread: bool) -> list[bytes]:
        """See :meth:`Tombstones.needed <kvstore.tiers.disk.tombstones.Tombstones.needed>`."""
        with self._lock:
            keys = self._pages.index.keys(self._pages.index.rows_in(segment.id))
            hidden = self._pages.hidden_by(segment)
            return self._pages.tombstones.needed(segment.id, hidden, keys, behind_unread=behind_unread)

    def evict_segment(self, segment: Segment, *, behind_unread: bool) -> tuple[list[bytes], list[bytes]]:
        """Take the pages of a segment out of the index.

        Returns:
            Their keys, and the :meth:`tombstones_needed`, which are pending from now on.
        """
        with self._lock:
            rows = self._pages.index.rows_in(segment.id)
            leaving = self._pages.index.keys(rows)
            hidden = self._pages.hidden_by(segment)
            needed = self._pages.tombstones.needed(segment.id, hidden, leaving, behind_unread=behind_unread)
            self._pages.take_out(rows, leaving)
            self._counts.add(evicted=len(leaving))
            self._pages.tombstones.want(needed)
        return leaving, needed

    def segment_not_deleted(self, segment: int, keys: Sequence[bytes]) -> None:
        """The segment that these pages were evicted with is still there: their records in it are dead."""
        with self._lock:
            self._pages.tombstones.superseded(keys, [segment] * len(keys))

    def segment_deleted(self, segment: int) -> None:
        """A segment's file is gone: what it alone held needs no tombstone any more."""
        with self._lock:
            self._pages.tombstones.segment_deleted(segment)
