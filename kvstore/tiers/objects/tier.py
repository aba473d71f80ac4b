"""The object tier: the contract of a lower tier over packs in object storage, shared by a fleet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import xxhash

from kvstore.breaker import State
from kvstore.errors import ConfigError, InvalidRequestError, ResourceError
from kvstore.events.ring import EventRing
from kvstore.host.forking import register_forked
from kvstore.segments.cipher import TAG_BYTES
from kvstore.segments.segment import Entry
from kvstore.status import TierHealth, TierState
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.objects.bucket import Bucket
from kvstore.tiers.objects.catalog import Asked, ObjectCatalog
from kvstore.tiers.objects.follower import Follower
from kvstore.tiers.objects.keys import PackKeys
from kvstore.tiers.objects.pages import TIER
from kvstore.tiers.objects.planning import in_chains
from kvstore.tiers.objects.reader import Fetched, Reader
from kvstore.tiers.objects.rounds import Rounds
from kvstore.tiers.objects.writer import Writer
from kvstore.tiers.tier import KEY_BYTES, HeldKeys, PageBytes, PageWrite, Peer, TierStatistics, Traffic
from kvstore.units import format_size

LEAST_LIMIT = 4 << 20
INTERVAL = 12.0
"""Seconds between two looks at what others told, and between two heartbeats: what one writes, all know in 30 s."""
SILENCE = 600.0
"""Seconds without a heartbeat behind which a writer is dead."""
MOST_PAGES = 4 << 20
"""Pages that are remembered: 85 bytes each."""
_OPENING_SECONDS = 10.0
_log = logging.getLogger(__name__)


class ObjectTier:
    """Pages in packs below one prefix of a bucket. Safe for threads.

    Args:
        url: ``s3://bucket/prefix``, without credentials.
        limit_bytes: most bytes that this writer takes there, everything included.
        prefix_limit: most bytes of all writers together, as far as each knows of the others; 0: none.
        write_limit: most bytes that are written a day; 0: any.
        deadline: seconds that one call that reads may take.
        keys: 32 bytes each, of the encryption: the first one writes, all of them read.
        most_pages: that are remembered.
        counts: persistent counters.
        interval: seconds between two looks at the others; None: ``INTERVAL``.
        silence: seconds behind which a writer without a heartbeat is dead.
        clock: seconds that go on while the machine sleeps.

    Raises:
        ConfigError: a value can't be used, or a package is missing.
    """

    name = TIER

    def __init__(
        self,
        url: str,
        limit_bytes: int,
        *,
        prefix_limit: int = 0,
        write_limit: int = 0,
        deadline: float = 5.0,
        keys: Sequence[bytes] = (),
        most_pages: int = MOST_PAGES,
        counts: TierCounts | None = None,
        interval: float | None = None,
        silence: float = SILENCE,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.check_limit(limit_bytes)
        self._keys = PackKeys(keys)
        self._bucket = Bucket(url, deadline)
        self._catalog = ObjectCatalog(limit_bytes, most_pages, counts)
        self._reader = Reader(self._bucket, self._keys)
        self._writer = Writer(
            self._bucket,
            self._catalog,
            self._keys,
            self._reader,
            limit_bytes=limit_bytes,
            prefix_limit=prefix_limit,
            write_limit=write_limit,
            silence=silence,
            clock=clock,
        )
        self._writing = threading.Lock()
        """Held over each change of what this writer has."""
        self._rounds = Rounds(
            self._bucket,
            self._writer,
            Follower(self._bucket, self._catalog, self._keys, self._writer, silence, clock),
            self._catalog.use_log,
            self._writing,
            INTERVAL if interval is None else interval,
        )
        self._closed = False
        register_forked(self)
        if not self._rounds.start(_OPENING_SECONDS):
            _log.warning("objects: %s does not answer yet; the node goes on without it until it does", url)

    # -- lookups -----------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here, as far as known: from memory, without a request. None while reads keep failing."""
        if self._closed or self._bucket.threads.all_hang or self._bucket.reading.state is State.OPEN:
            return [False] * len(keys)
        return self._catalog.contains(keys)

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages here that begin with ``prefix``, as far as known."""
        return self._catalog.keys(prefix)

    def tell_keys(self, held: HeldKeys, stop: threading.Event) -> bool:
        """See :meth:`kvstore.tiers.tier.KnownTier.tell_keys`. While reads fail, what is known counts as here."""
        return self._catalog.tell_keys(held, stop)

    def used_by(self, prefix: bytes) -> int:
        """Bytes of a namespace's pages, of all writers, as far as known."""
        return self._catalog.used_by(prefix)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Note that pages were used. No request."""
        return self._catalog.touch(keys)

    # -- pages -------------------------------------------------------------------------------------------------------

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """See :meth:`kvstore.tiers.tier.Tier.write`. One call's pages become one pack, or several where they are many.

        Raises:
            InvalidRequestError: a key does not have 64 bytes; nothing was stored.
        """
        for page in pages:
            if len(page.key) != KEY_BYTES:
                raise InvalidRequestError(f"a page key has {len(page.key)} bytes, it must have {KEY_BYTES}")
        if not pages:
            return []
        encrypted = self._keys.writing is not None
        corrupt = _corrupt(pages) if encrypted else set()
        with self._writing:
            if self._closed:
                self._catalog.counts.add(refused=len(pages))
                return [False] * len(pages)
            overhead = TAG_BYTES if encrypted else 0
            wanted = self._catalog.choose_writes(pages, corrupt, self._writer.fits, overhead)
            order = in_chains([page.key for page in wanted], [page.parent for page in wanted])
            entries = [Entry(wanted[at].key, wanted[at].checksum, wanted[at].payload) for at in order]
            written = self._writer.write(entries)
            keys = [page.key for page in pages]
            self._catalog.enforce_quotas(keys)
            self._catalog.publish_stored(page for page in wanted if page.key in written)
            return self._catalog.contains(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """See :meth:`kvstore.tiers.tier.Tier.read`."""
        answers: list[int | None] = [None] * len(keys)
        end = time.monotonic() + self._bucket.deadline
        asked = self._catalog.find(keys, [len(array) for array in into], range(len(keys)))
        found: list[Asked] = []
        damaged: list[Asked] = []
        errors = late = 0
        for last in (False, True):
            if not asked or self._closed or not self._bucket.may_read:
                break
            fetched = self._reader.fetch(keys, asked, into, end)
            errors += fetched.errors
            late += fetched.late
            damaged += fetched.damaged
            for each, checksum in fetched.found:
                answers[each.position] = checksum
                found.append(each)
            asked = self._find_elsewhere(keys, into, fetched, end) if fetched.gone and not last else []
        self._catalog.note_read(keys, found, damaged)
        missed = answers.count(None)
        self._catalog.counts.add(
            asked=len(keys),
            hit=len(keys) - missed,
            missed=missed,
            corrupt=len(damaged),
            errors=errors,
            late=late,
            read_bytes=sum(len(into[each.position]) for each in found),
        )
        return answers

    def _find_elsewhere(
        self, keys: Sequence[bytes], into: Sequence[PageBytes], fetched: Fetched, end: float
    ) -> list[Asked]:
        """Packs are gone: what was worth it was written to others before, and their writers have told of these."""
        positions = [each.position for pages in fetched.gone.values() for each in pages]
        if self._rounds.refresh(end):
            for name in fetched.gone:
                self._catalog.drop_pack(name)
        some = [keys[at] for at in positions]
        found = self._catalog.find(some, [len(into[at]) for at in positions], positions)
        return [each for each in found if each.pack.name not in fetched.gone]

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, and tell the other nodes. Returns how many were here.

        Raises:
            ResourceError: that can't be told now. It is told later, unless this process ends first.
        """
        if not keys or self._closed:
            return 0
        self._rounds.refresh(time.monotonic() + self._bucket.deadline)
        with self._writing:
            count = self._catalog.remove(keys)
            try:
                if self._catalog.untold():
                    self._writer.announce()
                    self._writer.tell_pending()
                self._writer.drop_empty()
            except OSError as error:
                raise ResourceError(f"objects: removals can't be told now: {error.strerror or error}") from error
        return count

    def expire(self, prefix: bytes, seconds: float, stop: threading.Event) -> int | None:
        """See :meth:`kvstore.tiers.tier.SharedTier.expire`. Who has run for less than ``seconds`` can't tell.

        Raises:
            ResourceError: the bucket can't be reached, or ``stop`` is set.
        """
        if self._catalog.use_log.idle_seconds(prefix) < seconds:
            return None
        if stop.is_set():
            raise ResourceError("objects: the node stops: pages of the namespace may still be there")
        return self.remove(self._catalog.keys(prefix))

    # -- limits ------------------------------------------------------------------------------------------------------

    def set_quota(self, prefix: bytes, limit_bytes: int) -> None:
        """Limit what a namespace takes, of all writers, as far as this one knows; 0: by the limits alone."""
        self._catalog.set_quota(prefix, limit_bytes)

    def check_limit(self, limit_bytes: int) -> None:
        """Check that :meth:`set_limit` would take that.

        Raises:
            ConfigError: less than 4 MiB.
        """
        if limit_bytes < LEAST_LIMIT:
            raise ConfigError(f"objects: a limit of {limit_bytes} bytes, the least is {format_size(LEAST_LIMIT)}")

    def set_limit(self, limit_bytes: int) -> None:
        """Limit what this writer takes from now on; packs leave until it does.

        Raises:
            ConfigError: less than the least; nothing was changed.
            ResourceError: packs can't be deleted now; the limit holds for what comes.
        """
        self.check_limit(limit_bytes)
        with self._writing:
            self._writer.limit_bytes = limit_bytes
            self._catalog.set_limit(limit_bytes)
            self._shrink()

    def set_prefix_limit(self, limit_bytes: int) -> None:
        """Limit what all writers take together, from now on; 0: by their own limits alone."""
        with self._writing:
            self._writer.prefix_limit = limit_bytes

    def set_write_limit(self, limit_bytes: int) -> None:
        """Limit what is written a day, from now on; 0: any."""
        with self._writing:
            self._writer.budget.limit_bytes = limit_bytes

    def _shrink(self) -> None:
        try:
            self._writer.shrink()
        except OSError as error:
            raise ResourceError(f"objects: packs can't be deleted now: {error.strerror or error}") from error

    # -- the rest ----------------------------------------------------------------------------------------------------

    def tell(self, events: EventRing) -> None:
        """Add to ``events`` from now on which pages come and go here."""
        self._catalog.tell(events)

    def flush(self) -> None:
        """Return when everything written so far would be found by others.

        Raises:
            ResourceError: removals can't be told now.
        """
        with self._writing:
            if self._closed:
                return
            try:
                self._writer.tell_pending()
            except OSError as error:
                raise ResourceError(f"objects: the bucket refuses: {error.strerror or error}") from error

    def peers(self) -> list[Peer]:
        """None: a bucket's servers are its own matter."""
        return []

    def traffic(self) -> Traffic:
        """What was asked of the server so far, by class of request."""
        return self._bucket.traffic()

    def health(self) -> TierHealth:
        """Whether reads and writes go well, as far as the latest ones tell."""
        reads, writes = self._bucket.read_failure, self._bucket.writing.failure
        if reads and writes:
            return TierHealth(TierState.DOWN, max(reads.since, writes.since), f"reads and writes fail: {reads.why}")
        if reads:
            return TierHealth(TierState.DEGRADED, reads.since, f"reads fail, so no page is found: {reads.why}")
        if writes:
            return TierHealth(TierState.DEGRADED, writes.since, f"writes fail, so it takes no page: {writes.why}")
        if spent := self._writer.budget.spent_since:
            limit = format_size(self._writer.budget.limit_bytes)
            reason = f"it takes no page before 00:00 UTC: the day's {limit} (objects_write_limit) are written"
            return TierHealth(TierState.DEGRADED, spent, reason)
        return TierHealth(TierState.OK, max(self._bucket.reading.since, self._bucket.writing.since))

    def statistics(self) -> TierStatistics:
        """A frozen view of the counters. Used is what this writer takes of its limit; pages are those of all."""
        return self._catalog.statistics(self._writer.used_bytes, self._writer.limit_bytes)

    def forked(self) -> None:
        """In a child: the threads and connections are the parent's, and so is the writer's name."""
        self._closed = True
        self._writing = threading.Lock()
        self._rounds.forked()
        self._catalog.forked()

    def close(self) -> None:
        """Tell what is to be told, and say that this writer has ended. No method may be called after it."""
        if self._closed:
            return
        self._rounds.stop(2 * self._bucket.deadline)
        with self._writing:
            self._closed = True
            if not self._bucket.resting:
                try:
                    self._writer.tell_pending()
                    self._writer.heartbeat.end()
                except OSError as error:
                    _log.warning("objects: closing: %s", error.strerror or error)
        self._catalog.counts.detach()
        self._bucket.close()


def _corrupt(pages: Sequence[PageWrite]) -> set[bytes]:
    """The keys of pages that their checksums refuse: once they are encrypted, that could not be seen any more."""
    return {page.key for page in pages if xxhash.xxh3_64_intdigest(page.payload.data) != page.checksum}
