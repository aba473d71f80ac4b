"""The tier of pages in Redis: lookups here, everything else by a part of this package; and a thread that refreshes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from kvstore.errors import ConfigError, InvalidRequestError, ResourceError
from kvstore.events.ring import EventRing
from kvstore.jitter import jittered
from kvstore.status import TierHealth, TierState
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.redis.buckets import Buckets, EvictedChunk
from kvstore.tiers.redis.chunk_writer import ChunkWriter
from kvstore.tiers.redis.compaction import Compaction
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.entries import Entries
from kvstore.tiers.redis.expiry import Expirer
from kvstore.tiers.redis.format.chunk import CHUNK_BYTES
from kvstore.tiers.redis.format.entry import decode
from kvstore.tiers.redis.listing import Listing
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.address import parse_address
from kvstore.tiers.redis.net.resp import ServerError
from kvstore.tiers.redis.net.server import FIRST_PAUSE, runs
from kvstore.tiers.redis.net.topology import Topology
from kvstore.tiers.redis.reader import Reader
from kvstore.tiers.redis.remover import Remover
from kvstore.tiers.redis.writer import Writer
from kvstore.tiers.tier import KEY_BYTES, Offered, PageBytes, PageWrite, Peer, TierStatistics
from kvstore.units import format_size

_log = logging.getLogger(__name__)
TIME_TO_LIVE = 7 * 86400.0
"""Seconds after which the server drops what it has, if nobody else did: only a safety net."""
REFRESH_SECONDS = 5.0
_SOON = 0.5
"""Seconds, at the most, until a node that knows nothing yet looks again."""
_SPARE = 2.0
"""A lookup goes on while as many times its longest request so far are left until its deadline."""


class Periodic:
    """Does some work on a thread of its own: at once, and then every so many seconds, or somewhat sooner.

    Args:
        work: what it raises is logged, and it is tried again. It returns False if it is to be done again very soon.
        seconds: of rest between two times, at the most.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], object], seconds: float, name: str) -> None:
        self._work = work
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for what is being done, and stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            rest = self._seconds
            try:
                if self._work() is False:
                    rest = min(rest, _SOON)
            except Exception:  # noqa: BLE001 - what is learnt now and then must not be forgotten for good
                _log.exception("%s: a round failed", self._thread.name)
            self._stop.wait(jittered(rest))


class RedisTier:
    """Pages in a Redis (or Valkey) that several nodes share; see :mod:`kvstore.tiers.redis` for how.

    Whatever happens to the servers, every answer comes within a deadline, and is a miss or a refusal at worst.
    ``errors`` counts servers that did not answer one request; ``refused`` counts pages that were not taken, for
    whatever reason; ``used_bytes`` and ``pages`` are those of all nodes together, as of when the servers last said so.

    Args:
        url: where Redis is; see :mod:`kvstore.tiers.redis.net.address`.
        limit_bytes: most bytes in Redis, of all nodes together: give every node the same.
        timeout: seconds for a read or a write of up to 32 MiB.
        lookup_timeout: seconds for ``contains``, however many pages; what comes later is a miss.
        time_to_live: seconds after which the server drops what nobody dropped.
        pause: seconds for which a server is left alone after it failed, at first.
        refresh: seconds between two looks at what all nodes together have there.
        counts: the tier's counters, left to others when it is closed. None: they begin at 0.

    Raises:
        ConfigError: the URL can't be read, or the limit is too small. A server that is away is no error.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        limit_bytes: int,
        *,
        timeout: float = 2.0,
        lookup_timeout: float = 0.05,
        time_to_live: float = TIME_TO_LIVE,
        pause: float = FIRST_PAUSE,
        refresh: float = REFRESH_SECONDS,
        counts: TierCounts | None = None,
    ) -> None:
        _check_limit(limit_bytes)
        self._lookup_timeout = lookup_timeout
        self._counts = counts = counts or TierCounts()
        self._events = EventRing()  # nobody reads this one
        self._topology = topology = Topology(parse_address(url), scripts.ALL, timeout, pause)
        live_ms, claim_ms = b"%d" % int(time_to_live * 1000), b"%d" % max(1, int(timeout * 1000))
        self._buckets = buckets = Buckets(topology, limit_bytes, live_ms, claim_ms, refresh)
        self._entries = entries = Entries(topology, buckets)
        self._context = context = Context(topology, buckets, entries, counts, timeout)
        self._reader = Reader(context)
        chunks = ChunkWriter(context)
        self._writer = Writer(context, chunks, Compaction(context, self._reader, chunks))
        self._remover = Remover(context)
        self._expirer = Expirer(context)
        self._listing = Listing(context)
        self._refresher = Periodic(self._refresh, refresh, "kvstore-redis-refresh")

    def _refresh(self) -> bool:
        known = self._buckets.refresh(self._context.timeout)
        self._expirer.look_at_clocks()
        return known

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here: for each thousand one pipelined request to each server, the first ones first.

        Blocks on that until the lookup's deadline at most. What nobody told by then is a miss, and so is what was not
        asked any more since the answer would be late; ``late`` counts them. A page whose chunk was just evicted may
        still be told to be here.
        """
        deadline = time.monotonic() + self._lookup_timeout
        here: list[bool] = []
        late = 0
        longest = 0.0
        for batch in runs(keys):
            began = time.monotonic()
            if here and began + _SPARE * longest >= deadline:
                break
            entries, unanswered = self._entries.find(batch, deadline)
            here += [entry is not None for entry in entries]
            late += unanswered
            if unanswered == len(batch):
                break
            longest = max(longest, time.monotonic() - began)
        unasked = len(keys) - len(here)
        self._counts.add(late=late + unasked)
        return here + [False] * unasked

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages here that begin with ``prefix``: those of a namespace by its fingerprint, from its
        chunks. With less than that, and where these don't say it, it is a walk over everything. What others store
        during the call may be among them or not.

        Raises:
            ResourceError: not all servers could be asked to the end.
        """
        return self._listing.keys(prefix)

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """Store pages, in the order given; what is over the limit in their buckets is evicted first.

        Returns:
            Which pages are here now, for every node to find (one already here counts).

        Raises:
            InvalidRequestError: a key does not have 64 bytes; nothing was stored.
        """
        _check_keys(pages)
        here = self._writer.write(pages)
        self._tell_stored(pages, here)
        return here

    def offer(self, pages: Sequence[PageWrite], looked: Collection[bytes] = ()) -> Offered:
        """As :meth:`write`, but what another node is sending is not waited for; see
        :class:`kvstore.tiers.tier.ClaimedTier`.

        Raises:
            InvalidRequestError: a key does not have 64 bytes; nothing was stored.
        """
        _check_keys(pages)
        offered = self._writer.offer(pages, looked)
        self._tell_stored(pages, offered.here)
        return offered

    def ended(self, claims: Sequence[bytes]) -> list[bool]:
        """Which claims have ended, as far as servers tell by the deadline of a read."""
        return self._writer.ended(claims)

    def _tell_stored(self, pages: Sequence[PageWrite], here: Sequence[bool]) -> None:
        stored = ((page.key, page.parent) for page, done in zip(pages, here, strict=True) if done)
        self._events.stored(self.name, stored)

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """Read pages into the arrays given, each of its page's exact length, straight from the sockets.

        Returns:
            For each page its verified xxh3_64, or None for a miss (the array may then hold anything).
        """
        return self._reader.read(keys, into)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, for all nodes. Returns how many were here.

        Blocks, for each thousand pages up to the deadline of a read for each look at them; gives up when no server
        answers.

        Raises:
            ResourceError: some pages may still be here, since their servers did not answer: the message says how many.
                All others are gone.
        """
        self._check_format()
        removed = self._remover.remove(keys)
        self._events.removed(self.name, keys)
        return removed

    def expire(self, prefix: bytes, seconds: float, stop: threading.Event) -> int | None:
        """Forget a namespace that no node has used for so long; see :class:`kvstore.tiers.tier.SharedTier`."""
        self._check_format()
        dropped: list[EvictedChunk] = []
        try:
            unused = self._expirer.expire(prefix, seconds, stop, dropped)
        finally:
            self._events.removed(self.name, [key for chunk in dropped for key in chunk.keys])
        return sum(chunk.pages for chunk in dropped) if unused else None

    def _check_format(self) -> None:
        if self._buckets.newer:
            raise ResourceError(f"Redis has pages of format {self._buckets.newer}, which this version does not change")

    def flush(self) -> None:
        """Nothing is held back here: what was answered as stored is in Redis, as durable as that is set up to be."""

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Pages were used in a faster tier: their chunks count as read just now, those of the first pages last of all.

        Blocks, for each thousand pages up to the deadline of a read; gives up when no server answers.

        Returns:
            False for each page that is certainly not here. One that nobody could tell of counts as here.
        """
        gone: set[bytes] = set()
        for batch in reversed(runs(keys)):
            deadline = self._context.deadline()
            raw, _ = self._entries.seen(batch, deadline, renew=True)
            if all(isinstance(value, ServerError) for value in raw):
                break
            seen = dict(zip(batch, raw, strict=True))
            entries = {key: entry for key, value in seen.items() if (entry := decode(value)) is not None}
            touched = self._buckets.touch_chunks_of(entries, deadline)
            gone.update(key for _, some, found in touched if found == 0 for key in some)
            gone.update(key for key, value in seen.items() if value is None)
        self._events.removed(self.name, sorted(gone))
        return [key not in gone for key in keys]

    def set_quota(self, prefix: bytes, limit_bytes: int) -> None:
        """Most bytes that a namespace's pages may take here from now on, those of all nodes: give every node the same.

        A write that would pass it evicts the namespace's least recently used chunks first. The quota is divided
        over buckets (:mod:`kvstore.tiers.redis.quotas`); what is too much when it is set goes at the next write.

        Args:
            prefix: the namespace's fingerprint, 32 bytes.
            limit_bytes: 0: no limit but the tier's.

        Raises:
            InvalidRequestError: not a fingerprint, or less than 0.
        """
        self._buckets.set_quota(prefix, limit_bytes)

    def check_limit(self, limit_bytes: int) -> None:
        """Whether :meth:`set_limit` would take that.

        Raises:
            ConfigError: too small a limit.
        """
        _check_limit(limit_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        """Limit all pages, of all nodes: give every node the same. What is too much is evicted as new pages come.

        Raises:
            ConfigError: too small a limit; nothing was changed.
        """
        _check_limit(limit_bytes)
        self._buckets.limit_bytes = limit_bytes

    def set_write_limit(self, limit_bytes: int) -> None:
        """Nothing wears out."""

    def tell(self, events: EventRing) -> None:
        """Say there from now on what this node writes and removes, and which pages it finds gone when it wants them.

        What other nodes do here, and what they evict, is not known to this one.
        """
        self._events = events

    def used_by(self, prefix: bytes) -> int:
        """Bytes that a namespace's pages take here, those of all nodes, as of when the servers last said so."""
        return self._buckets.accounting.used_by(prefix)

    def peers(self) -> list[Peer]:
        """The servers, by address where that is known. One of which nothing was asked yet counts as answering."""
        return self._topology.peers()

    def health(self) -> TierHealth:
        """Whether the servers answer, and take pages. They are asked every few seconds, also where nobody else does."""
        if newer := self._buckets.newer:
            reason = f"it has pages of format {newer}, which this version does not know: upgrade this node"
            return TierHealth(TierState.DOWN, self._buckets.newer_since, reason)
        return self._topology.health()

    def statistics(self) -> TierStatistics:
        """A frozen view of the counters, without any I/O.

        ``used_bytes`` and ``pages`` are those of all nodes, as of when the servers last said so: at once behind what
        this node did, else every few seconds.
        """
        buckets = self._buckets
        used_bytes, pages = buckets.accounting.totals()
        counts = self._counts.all()
        return TierStatistics(used_bytes=used_bytes, limit_bytes=buckets.limit_bytes, pages=pages, **counts)

    def close(self) -> None:
        """Close all connections. No method may be called after it."""
        self._refresher.close()
        self._topology.close()
        self._counts.detach()


def _check_keys(pages: Sequence[PageWrite]) -> None:
    for page in pages:
        if len(page.key) != KEY_BYTES:
            raise InvalidRequestError(f"a page key has {len(page.key)} bytes, it must have {KEY_BYTES}")


def _check_limit(limit_bytes: int) -> None:
    least = 4 * CHUNK_BYTES
    if limit_bytes < least:
        raise ConfigError(f"redis: a limit of {limit_bytes} bytes, the least is {format_size(least)}")
