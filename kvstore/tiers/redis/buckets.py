"""Buckets: shards of the byte limit, each with its part of the chunks, and the requests that change them."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.errors import FormatError, InvalidRequestError, ResourceError
from kvstore.tiers.redis.accounting import BucketAccounting
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import decode_header
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.resp import Reply
from kvstore.tiers.redis.net.server import runs
from kvstore.tiers.redis.net.topology import Topology
from kvstore.tiers.redis.quotas import FULL_CHUNK, Share, share_of
from kvstore.tiers.redis.summaries import Summaries

_log = logging.getLogger(__name__)
BUCKET_CHUNKS = 16
"""As many chunks of full size fit into every bucket."""
EXPIRED_AT_ONCE = 16
"""Chunks of a bucket that expire in one step: the server serves nobody else meanwhile."""
JUST_PLACED_MS = b"500"
"""For how long a writer is told to look again: what he saw before may be as old as that."""
CLOCKS = 64
"""Buckets, about, that are asked first, or alone, where not all need be: what time it is, who uses a namespace."""

Pages = Mapping[tuple[int, bytes], int]
"""Numbers of pages by bucket and nonce of their chunks."""


class EvictedChunk(NamedTuple):
    """A chunk that was evicted."""

    bucket: int
    nonce: bytes
    pages: int
    header: bytes

    @property
    def keys(self) -> list[bytes]:
        """Of its pages. Empty where nobody can say which: whoever reads an entry of one finds out."""
        try:
            header = decode_header(self.header)
        except FormatError:
            return []
        return [header.key(place) for place in range(len(header.hashes))]


class Buckets:
    """All buckets. Safe for threads.

    Args:
        topology: the servers where they are.
        limit_bytes: most bytes in all of them together; they stay as many when it changes.
        live_ms: milliseconds that values live, in digits.
        claim_ms: milliseconds for which a chunk's writer may keep others from sending the same, in digits.
        refresh_seconds: between two looks at what all nodes have there.
    """

    def __init__(
        self, topology: Topology, limit_bytes: int, live_ms: bytes, claim_ms: bytes, refresh_seconds: float
    ) -> None:
        self._topology = topology
        self.limit_bytes = limit_bytes
        self.live_ms = live_ms
        self._claim_ms = claim_ms
        self._own_number = max(1, min(key_names.MOST_BUCKETS, limit_bytes // (BUCKET_CHUNKS * FULL_CHUNK)))
        self._number = self._own_number
        self._quotas: dict[bytes, int] = {}
        self.newer = 0
        """The format of what is in Redis, where it is newer than this version's: nothing may be changed then."""
        self.newer_since = 0.0
        """Since when that is known: seconds since 1970."""
        self.accounting = BucketAccounting()
        self._summaries = Summaries(topology, self.accounting, refresh_seconds)

    # -- what they may hold ------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Most bytes in one bucket."""
        return self.limit_bytes // self._number

    def agreement(self) -> list[Request]:
        """Requests that say how many buckets there are, and of which format, unless somebody has, and ask for both.

        :meth:`agreed` takes the replies, or those of the last two requests, which only ask.
        """
        slot, other = self._topology.slot(key_names.BUCKETS), self._topology.slot(key_names.FORMAT)
        return [
            Request(slot, [b"SET", key_names.BUCKETS, b"%d" % self._own_number, b"NX"]),
            Request(other, [b"SET", key_names.FORMAT, b"%d" % key_names.FORMAT_VERSION, b"NX"]),
            Request(other, [b"GET", key_names.FORMAT]),
            Request(slot, [b"GET", key_names.BUCKETS]),
        ]

    def agreed(self, replies: Sequence[Reply]) -> None:
        """Take what stands in Redis; it stays what it was where nobody says."""
        found, number = replies[-2:]
        if isinstance(found, bytes) and found.isdigit() and len(found) < 10:
            newer = int(found) if int(found) > key_names.FORMAT_VERSION else 0
            if newer and not self.newer:
                self.newer_since = time.time()
                _log.error(
                    "Redis has pages of format %d; this version of kvstore reads up to %d: it shares nothing, and"
                    " changes nothing there. Upgrade this node, or give it another Redis",
                    newer,
                    key_names.FORMAT_VERSION,
                )
            self.newer = newer
        if isinstance(number, bytes) and number.isdigit() and 1 <= int(number) <= key_names.MOST_BUCKETS:
            self._number = int(number)

    def set_quota(self, namespace: bytes, limit_bytes: int) -> None:
        """See :meth:`kvstore.tiers.redis.RedisTier.set_quota`."""
        if len(namespace) != key_names.NAMESPACE_BYTES:
            raise InvalidRequestError(
                f"a fingerprint has {len(namespace)} bytes, it must have {key_names.NAMESPACE_BYTES}"
            )
        if limit_bytes < 0:
            raise InvalidRequestError(f"a quota is {limit_bytes} bytes, the least is 0 (no quota)")
        if limit_bytes:
            self._quotas[namespace] = limit_bytes
        else:
            self._quotas.pop(namespace, None)

    def share_of(self, namespace: bytes) -> Share:
        """Where a namespace's chunks may lie, and how much of them."""
        return share_of(namespace, self._quotas.get(namespace, 0), self._number)

    def fitting(self, chunks: Iterable[NewChunk]) -> list[NewChunk]:
        """Chunks of one call that fit into their namespaces' quotas together, from the first one on: what comes first
        in a prefix is wanted most."""
        left: dict[tuple[int, bytes], int] = {}
        fitting = []
        for chunk in chunks:
            place = chunk.bucket, chunk.header.namespace
            if place not in left:
                limit = self.share_of(chunk.header.namespace).limit_in(chunk.bucket)
                left[place] = self.limit_bytes if limit is None else limit
            if chunk.charge <= left[place]:
                left[place] -= chunk.charge
                fitting.append(chunk)
        return fitting

    # -- the scripts -------------------------------------------------------------------------------------------------

    def admission(self, chunk: NewChunk, *, again: bool = False) -> Request:
        """A request that admits a chunk: charges it, evicts others for it, and makes a place for its values; unless
        another writer has claimed it, or has placed it just now. ``again``: the caller has looked since."""
        quota = self.share_of(chunk.header.namespace).limit_in(chunk.bucket)
        claim = self._claim_ms, b"%d" % again
        arguments = [*chunk.admission(self.budget, self.live_ms, quota), chunk.claim, *claim]
        return self._script(chunk.bucket, scripts.ADMIT, *arguments)

    def end_claims(self, chunks: Iterable[NewChunk]) -> list[Request]:
        """Requests that end the claims of chunks that are whole, behind the entries that show them. A claim that
        another writer has by now since its time was over ends as well, and the same bytes may then be sent twice."""
        named = [key_names.claim_name(chunk.bucket, chunk.claim) for chunk in chunks]
        return [Request(self._topology.slot(name), [b"SET", name, b"", b"XX", b"PX", JUST_PLACED_MS]) for name in named]

    def trims(self, namespaces: Iterable[bytes]) -> list[tuple[int, Request]]:
        """Requests that evict what some namespaces have beyond their quotas, as far as is known, and the buckets."""
        found = []
        for namespace in namespaces:
            share = self.share_of(namespace)
            for bucket, size in self.accounting.buckets_of(namespace).items() if share.limit_bytes else ():
                limit = share.limit_in(bucket)
                if limit is not None and size > limit:
                    found.append((bucket, self._script(bucket, scripts.TRIM, namespace, b"%d" % limit)))
        return found

    def expiry(self, bucket: int, namespace: bytes, seconds: float) -> Request:
        """A request that drops ``EXPIRED_AT_ONCE`` chunks of a namespace that were not used for so long."""
        arguments = namespace, b"%d" % int(seconds * 1e6), b"%d" % EXPIRED_AT_ONCE
        return self._script(bucket, scripts.EXPIRE, *arguments)

    def idle_seconds(self, namespace: bytes, timeout: float, first: int | None = None) -> Iterator[tuple[int, float]]:
        """For each bucket that has chunks of a namespace, for how long none of them was used there.

        Who looks for use need not ask on behind it. So the likely ones come early: ``first``, then those that are known
        to have some, and behind these all others, as what is known may be old; a few of either before the rest, as what
        is in use is so in most buckets, mostly.

        Raises:
            ResourceError: a server did not answer.
        """
        known, every = sorted(self.accounting.buckets_of(namespace)), range(self._number)
        asked: set[int] = set()
        for some in ([] if first is None else [first], _few(known), known, _few(every), every):
            for batch in runs([bucket for bucket in some if bucket not in asked]):
                asked.update(batch)
                requests = [self._script(bucket, scripts.IDLE, namespace) for bucket in batch]
                replies = self._topology.exchange(requests, time.monotonic() + timeout)
                for bucket, reply in zip(batch, replies, strict=True):
                    if not isinstance(reply, int):
                        raise ResourceError("redis: not every server said when it was used last")
                    if reply >= 0:
                        yield bucket, reply / 1e6

    def times(self, timeout: float) -> Iterator[tuple[int, float]]:
        """What time it is where some buckets are, seconds since 1970: enough of them to ask nearly every server."""
        some = _few(range(self._number))
        asked = [Request(self._topology.slot(key_names.bucket_names(bucket)[0]), [b"TIME"]) for bucket in some]
        for bucket, reply in zip(some, self._topology.exchange(asked, time.monotonic() + timeout), strict=True):
            match reply:
                case [bytes() as seconds, bytes() as microseconds]:
                    yield bucket, int(seconds) + int(microseconds) / 1e6

    def touch(self, bucket: int, nonces: Collection[bytes]) -> Request:
        """A request that marks chunks as used, the first as the newest."""
        return self._script(bucket, scripts.TOUCH, self.live_ms, *nonces)

    def touch_chunks_of(
        self, entries: Mapping[bytes, PageEntry], deadline: float
    ) -> Iterator[tuple[bytes, list[bytes], Reply]]:
        """Mark the chunks of pages as used. Says of each its nonce, the pages, and whether it is here (1 or 0)."""
        chunks_of: dict[int, dict[bytes, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        for key, entry in entries.items():
            chunks_of[entry.bucket][entry.nonce].append(key)
        requests = [self.touch(bucket, nonces) for bucket, nonces in chunks_of.items()]
        for nonces, reply in zip(chunks_of.values(), self._topology.exchange(requests, deadline), strict=True):
            if isinstance(reply, list) and len(reply) == len(nonces):
                for (nonce, keys), found in zip(nonces.items(), reply, strict=True):
                    yield nonce, keys, found

    def release(self, gone: Pages, deadline: float) -> None:
        """Take pages without entries off their chunks."""
        releases = [
            self._script(bucket, scripts.RELEASE, nonce, b"%d" % pages)
            for (bucket, nonce), pages in gone.items()
            if pages
        ]
        self.change(releases, {bucket for (bucket, _), pages in gone.items() if pages}, deadline)

    def change(
        self, requests: Sequence[Request], buckets: Collection[int], deadline: float, *, writing: bool = False
    ) -> list[Reply]:
        """Send requests that change buckets, and account for what these hold then."""
        asked = [self._sums_of(bucket) for bucket in buckets]
        replies = self._topology.exchange([*requests, *asked], deadline, writing=writing)
        for bucket, reply in zip(buckets, replies[len(requests) :], strict=True):
            self.accounting.update(bucket, reply)
        return replies[: len(requests)]

    def refresh(self, timeout: float) -> bool:
        """Learn what all buckets hold: other nodes change them as well. False: not yet of all, another node is asking
        them just now."""
        deadline = time.monotonic() + timeout
        self.agreed(self._topology.exchange(self.agreement()[2:], deadline))
        self.accounting.forget_beyond(self._number)
        return self._summaries.refresh(self._number, deadline)

    def _script(self, bucket: int, script: bytes, *arguments: bytes) -> Request:
        keys = key_names.bucket_names(bucket)
        return Request(self._topology.slot(keys[0]), scripts.call(script, keys, *arguments))

    def _sums_of(self, bucket: int) -> Request:
        name = key_names.bucket_names(bucket)[2]
        return Request(self._topology.slot(name), [b"HGETALL", name])


def _few(buckets: Sequence[int]) -> Sequence[int]:
    """``CLOCKS`` of some buckets, about: spread over all of them, and so over servers."""
    return buckets[:: max(1, len(buckets) // CLOCKS)]


def evicted_by(bucket: int, reply: Reply) -> list[EvictedChunk]:
    """The chunks that a script says it evicted."""
    out = []
    for chunk in reply if isinstance(reply, list) else []:
        match chunk:
            case [bytes() as nonce, int() as pages, bytes() as header]:
                out.append(EvictedChunk(bucket, nonce, pages, header))
    return out
