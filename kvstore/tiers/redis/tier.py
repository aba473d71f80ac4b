"""The tier: what it does with entries, chunks and buckets, in as few requests as possible."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from kvstore.bytesize import format_size
from kvstore.errors import ConfigError, FormatError, InvalidRequestError
from kvstore.hashing import HASH_BYTES
from kvstore.tiers.redis import chunk as chunks
from kvstore.tiers.redis import codec, names, scripts
from kvstore.tiers.redis.address import parse_address
from kvstore.tiers.redis.books import Books
from kvstore.tiers.redis.breaker import FIRST_PAUSE
from kvstore.tiers.redis.chunk import CHUNK_BYTES, ChunkHeader
from kvstore.tiers.redis.codec_choice import CodecChoice
from kvstore.tiers.redis.entry import PageEntry, decode, reference
from kvstore.tiers.redis.loading import Load, Outcome
from kvstore.tiers.redis.merging import MOST_TAILS, begins_a_row, fills_a_row, is_tail
from kvstore.tiers.redis.new_chunk import NewChunk, entries_of
from kvstore.tiers.redis.node import Request
from kvstore.tiers.redis.periodic import Periodic
from kvstore.tiers.redis.planning import NewPage, cut_smaller, plan_chunks, positions
from kvstore.tiers.redis.quotas import FULL_CHUNK, Share, share_of
from kvstore.tiers.redis.resp import Argument, Buffer, Reply, ServerError
from kvstore.tiers.redis.servers import NO_ANSWER, Servers
from kvstore.tiers.tier import KEY_BYTES, PageBytes, PageWrite, TierStatistics

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")

BUCKET_CHUNKS = 16
"""As many chunks of full size fit into every bucket."""
MOST_BUCKETS = 1 << 14
TIME_TO_LIVE = 7 * 86400.0
"""Seconds after which the server drops what it has, if nobody else did: only a safety net."""
REFRESH_SECONDS = 5.0
_BATCH_BYTES = 32 << 20
"""Bytes that are sent, or asked for, under one deadline."""
_READS = 2
"""How often a page is looked for: merging may take its chunk away between entry and chunk, and put another there."""
_TELLING_BYTES = 256 << 10
"""A store of less says nothing about the network's speed."""
_MOST_KEYS = 1024
"""Keys in one command."""
_SCAN_SECONDS = 30.0


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


class _Left(NamedTuple):
    """A chunk that made room."""

    bucket: int
    nonce: bytes
    pages: int
    header: bytes


class _Tail(NamedTuple):
    """A piece of a row, read back."""

    bucket: int
    header: ChunkHeader
    pages: list[PageWrite]


class RedisTier:
    """Pages in a Redis (or Valkey) that several nodes share; see :mod:`kvstore.tiers.redis` for how.

    Whatever happens to the servers, every answer comes within a deadline, and is a miss or a refusal at worst.
    ``errors`` counts servers that did not answer one request; ``refused`` counts pages that were not taken, for
    whatever reason; ``used_bytes`` and ``pages`` are those of all nodes together, as of when the servers last said so.

    Args:
        url: where Redis is; see :mod:`kvstore.tiers.redis.address`.
        limit_bytes: most bytes in Redis, of all nodes together: give every node the same.
        timeout: seconds for a read or a write of up to 32 MiB.
        lookup_timeout: seconds for ``contains``; what comes later is a miss.
        time_to_live: seconds after which the server drops what nobody dropped.
        pause: seconds for which a server is left alone after it failed, at first.
        refresh: seconds between two looks at what all nodes together have there.

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
    ) -> None:
        least = 4 * CHUNK_BYTES
        if limit_bytes < least:
            raise ConfigError(f"redis: a limit of {limit_bytes} bytes, the least is {format_size(least)}")
        self._limit_bytes = limit_bytes
        self._own_buckets = max(1, min(MOST_BUCKETS, limit_bytes // (BUCKET_CHUNKS * FULL_CHUNK)))
        self._buckets = self._own_buckets
        self._timeout = timeout
        self._lookup_timeout = lookup_timeout
        self._live_ms = str(int(time_to_live * 1000)).encode()
        self._lock = threading.Lock()
        self._counts = _Counts()
        self._codecs = CodecChoice()
        self._books = Books()
        self._quotas: dict[bytes, int] = {}
        self._servers = Servers(parse_address(url), scripts.ALL, timeout, pause)
        self._look = Periodic(self._look_around, refresh, "kvstore-redis-books")

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are here: one pipelined request to each server, and a miss where the answer is late.

        Blocks on that; a page whose chunk has just left may still be told to be here.
        """
        entries, _ = self._entries(keys, time.monotonic() + self._lookup_timeout)
        return [entry is not None for entry in entries]

    def keys(self, prefix: bytes) -> list[bytes]:
        """The keys of all pages here that begin with ``prefix``, a namespace's fingerprint: a walk over everything."""
        deadline = time.monotonic() + _SCAN_SECONDS
        arguments = [b"SCAN", b"MATCH", names.page_pattern(prefix), b"COUNT", b"1000"]
        found: set[bytes] = set()
        cursors = dict.fromkeys(self._servers.primaries(deadline), b"0")
        while cursors and time.monotonic() < deadline:
            replies = self._servers.exchange_each(arguments, cursors, time.monotonic() + self._timeout)
            cursors = {}
            for server, reply in replies.items():
                match reply:
                    case [bytes() as cursor, list() as some]:
                        found.update(name for name in some if isinstance(name, bytes))
                        if cursor != b"0":
                            cursors[server] = cursor
        strip = len(names.PAGE_PREFIX)
        return [name[strip:] for name in found if len(name) == strip + KEY_BYTES]

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """Store pages, in the order given; makes room in their buckets within the limit first.

        Returns:
            Which pages are here now, for every node to find (one already here counts).

        Raises:
            InvalidRequestError: a key does not have 64 bytes; nothing was stored.
        """
        for page in pages:
            if len(page.key) != KEY_BYTES:
                raise InvalidRequestError(f"a page key has {len(page.key)} bytes, it must have {KEY_BYTES}")
        here, pushed_out = self._write(pages)
        answers = [page.key in here for page in pages]
        with self._lock:
            self._counts.refused += sum(page.key not in here and page.key not in pushed_out for page in pages)
        return answers

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """Read pages into the arrays given, each of its page's exact length, straight from the sockets.

        Returns:
            For each page its verified xxh3_64, or None for a miss (the array may then hold anything).
        """
        answers: list[int | None] = [None] * len(keys)
        places: Sequence[int] = range(len(keys))
        corrupt = errors = 0
        for _ in range(_READS):
            loads, unanswered = self._locate(places, keys, into)
            errors += unanswered
            places = []
            for batch in _batches(loads, [load.stored_bytes for load in loads]):
                for place, checksum, outcome in self._load(batch):
                    answers[place] = checksum
                    corrupt += outcome is Outcome.CORRUPT
                    if outcome is Outcome.GONE:
                        places.append(place)
            if not places:
                break
        with self._lock:
            counts = self._counts
            counts.asked += len(keys)
            counts.missed += answers.count(None)
            counts.hit += len(keys) - answers.count(None)
            counts.corrupt += corrupt
            counts.errors += errors
            counts.read_bytes += sum(
                len(array) for array, answer in zip(into, answers, strict=True) if answer is not None
            )
        return answers

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget pages, for all nodes. Returns how many were here."""
        deadline = time.monotonic() + self._timeout
        keys = list(dict.fromkeys(keys))
        entries, _ = self._entries(keys, deadline)
        return self._forget([(key, entry) for key, entry in zip(keys, entries, strict=True) if entry], deadline)

    def flush(self) -> None:
        """Nothing is held back here: what was answered as stored is in Redis, as durable as that is set up to be."""

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Pages were used in a faster tier: their chunks count as read just now, those of the first pages last of all.

        Blocks up to the lookup's deadline.

        Returns:
            False for each page that is certainly not here. One that nobody could tell of counts as here.
        """
        deadline = time.monotonic() + self._lookup_timeout
        raw, _ = self._raw_entries(keys, deadline, renew=True)
        entries = {key: entry for key, value in zip(keys, raw, strict=True) if (entry := decode(value)) is not None}
        gone = {key for _, some, found in self._touch(entries, deadline) if found == 0 for key in some}
        here = [not isinstance(value, bytes | None) or key in entries for key, value in zip(keys, raw, strict=True)]
        return [there and key not in gone for key, there in zip(keys, here, strict=True)]

    def set_quota(self, prefix: bytes, limit_bytes: int) -> None:
        """Most bytes that a namespace's pages may take here from now on, those of all nodes: give every node the same.

        A write that would pass it lets the namespace's least recently used chunks leave first. The quota is divided
        over buckets (:mod:`kvstore.tiers.redis.quotas`); what is too much when it is set leaves at the next write.

        Args:
            prefix: the namespace's fingerprint, 32 bytes.
            limit_bytes: 0: no limit but the tier's.

        Raises:
            InvalidRequestError: not a fingerprint, or less than 0.
        """
        if len(prefix) != names.NAMESPACE_BYTES:
            raise InvalidRequestError(f"a fingerprint has {len(prefix)} bytes, it must have {names.NAMESPACE_BYTES}")
        if limit_bytes < 0:
            raise InvalidRequestError(f"a quota is {limit_bytes} bytes, the least is 0 (no quota)")
        with self._lock:
            self._quotas.pop(prefix, None)
            if limit_bytes:
                self._quotas[prefix] = limit_bytes

    def used_by(self, prefix: bytes) -> int:
        """Bytes that a namespace's pages take here, those of all nodes, as of when the servers last said so."""
        return self._books.used_by(prefix)

    def statistics(self) -> TierStatistics:
        """A frozen view of the counters, without any I/O.

        ``used_bytes`` and ``pages`` are those of all nodes, as of when the servers last said so: at once behind what
        this node did, else every few seconds.
        """
        used_bytes, pages = self._books.totals()
        with self._lock:
            return TierStatistics(
                used_bytes=used_bytes, limit_bytes=self._limit_bytes, pages=pages, **asdict(self._counts)
            )

    def close(self) -> None:
        """Close all connections. No method may be called after it."""
        self._look.close()
        self._servers.close()

    # -- entries -----------------------------------------------------------------------------------------------------

    def _request(self, key: bytes, arguments: Sequence[Argument], into: Sequence[Buffer] = ()) -> Request:
        return Request(self._servers.slot(key), arguments, into)

    def _raw_entries(
        self, keys: Sequence[bytes], deadline: float, *also: Request, renew: bool = False
    ) -> tuple[list[Reply], list[Reply]]:
        """What stands under the names of pages, and the replies to other requests that went along.

        Args:
            renew: let the entries live on.
        """
        by_slot: dict[int, list[int]] = defaultdict(list)
        found = [names.page_name(key) for key in keys]
        for place, name in enumerate(found):
            by_slot[self._servers.slot(name)].append(place)
        groups = [
            (slot, places[at : at + _MOST_KEYS])
            for slot, places in by_slot.items()
            for at in range(0, len(places), _MOST_KEYS)
        ]
        requests = []
        for slot, places in groups:
            some = [found[place] for place in places]
            command = _evalsha(scripts.RENEW, some, self._live_ms) if renew else [b"MGET", *some]
            requests.append(Request(slot, command))
        replies = self._servers.exchange([*also, *requests], deadline)
        raw: list[Reply] = [NO_ANSWER] * len(keys)
        for (_, places), reply in zip(groups, replies[len(also) :], strict=True):
            if isinstance(reply, list) and len(reply) == len(places):
                for place, value in zip(places, reply, strict=True):
                    raw[place] = value
        return raw, replies[: len(also)]

    def _entries(self, keys: Sequence[bytes], deadline: float) -> tuple[list[PageEntry | None], int]:
        """The entries of pages, and how many of them no server would tell."""
        if not keys:
            return [], 0
        raw, _ = self._raw_entries(keys, deadline)
        return [decode(value) for value in raw], sum(isinstance(value, ServerError) for value in raw)

    def _forget(self, pages: Sequence[tuple[bytes, PageEntry]], deadline: float) -> int:
        """Delete entries that still say the same, and take their pages off their chunks. Returns how many were."""
        groups: dict[tuple[int, bytes], list[tuple[bytes, PageEntry]]] = defaultdict(list)
        for key, entry in pages:
            groups[self._servers.slot(names.page_name(key)), entry.reference].append((key, entry))
        requests = [
            Request(slot, _evalsha(scripts.FORGET, [names.page_name(key) for key, _ in group], same))
            for (slot, same), group in groups.items()
        ]
        gone: dict[tuple[int, bytes], int] = defaultdict(int)
        replies = self._servers.exchange(requests, deadline)
        for group, reply in zip(groups.values(), replies, strict=True):
            entry = group[0][1]
            gone[entry.bucket, entry.nonce] += _ones(reply)
        self._release(gone, deadline)
        return sum(gone.values())

    def _release(self, gone: Mapping[tuple[int, bytes], int], deadline: float) -> None:
        """Take pages without entries off their chunks."""
        releases = [
            self._in_bucket(bucket, scripts.RELEASE, nonce, b"%d" % pages)
            for (bucket, nonce), pages in gone.items()
            if pages
        ]
        self._change(releases, {bucket for (bucket, _), pages in gone.items() if pages}, deadline)

    def _change(
        self, requests: Sequence[Request], buckets: Iterable[int], deadline: float, *, writing: bool = False
    ) -> list[Reply]:
        """Send requests that change the books of buckets, and take down what the books say then."""
        changed = list(buckets)
        asked = [self._books_of(bucket) for bucket in changed]
        replies = self._servers.exchange([*requests, *asked], deadline, writing=writing)
        for bucket, reply in zip(changed, replies[len(requests) :], strict=True):
            self._books.said(bucket, reply)
        return replies[: len(requests)]

    def _books_of(self, bucket: int) -> Request:
        name = names.bucket_names(bucket)[2]
        return self._request(name, [b"HGETALL", name])

    def _in_bucket(self, bucket: int, script: bytes, *arguments: bytes) -> Request:
        keys = names.bucket_names(bucket)
        return self._request(keys[0], _evalsha(script, keys, *arguments))

    # -- reading -----------------------------------------------------------------------------------------------------

    def _locate(
        self, places: Sequence[int], keys: Sequence[bytes], into: Sequence[PageBytes]
    ) -> tuple[list[Load], int]:
        """Where some of a call's pages are, and how many of them no server would tell."""
        entries, unanswered = self._entries([keys[place] for place in places], time.monotonic() + self._timeout)
        loads: dict[bytes, Load] = {}
        for place, entry in zip(places, entries, strict=True):
            if entry is None or entry.length != len(into[place]):
                continue
            load = loads.get(entry.nonce)
            if load is None:
                load = loads[entry.nonce] = Load(entry)
            load.add(place, keys[place], entry, into[place])
        return list(loads.values()), unanswered

    def _load(self, loads: Sequence[Load]) -> Iterable[tuple[int, int | None, Outcome]]:
        """Read some chunks' pages. Says for each what became of it."""
        deadline = time.monotonic() + self._timeout
        requests = []
        for load in loads:
            ranges = load.ranges()
            for run in ranges:
                name = names.part_name(load.bucket, load.nonce, run.part)
                command = [b"GETRANGE", name, b"%d" % run.start, b"%d" % (run.start + run.length - 1)]
                last = load.sum_up if run is ranges[-1] else None
                requests.append(Request(self._servers.slot(name), command, run.views, last))
        used: dict[int, list[bytes]] = defaultdict(list)
        for load in loads:
            used[load.bucket].append(load.nonce)
        touches = [self._in_bucket(bucket, scripts.TOUCH, self._live_ms, *nonces) for bucket, nonces in used.items()]
        replies = iter(self._servers.exchange([*requests, *touches], deadline))
        out = []
        lost: list[tuple[bytes, PageEntry]] = []
        failed = 0
        for load in loads:
            for place, key, entry, checksum, outcome in load.judge([next(replies) for _ in load.ranges()]):
                if outcome in (Outcome.GONE, Outcome.CORRUPT):
                    lost.append((key, entry))
                failed += outcome is Outcome.FAILED
                out.append((place, checksum, outcome))
        if lost:
            self._forget(lost, deadline)
        if failed:
            with self._lock:
                self._counts.errors += failed
        return out

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, pages: Sequence[PageWrite]) -> tuple[set[bytes], set[bytes]]:
        """Store what is not here. Returns the keys of what is here now, and of what was here during the call."""
        first = {page.key: page for page in reversed(pages) if len(page.payload)}
        wanted = [key for key in dict.fromkeys(page.key for page in pages) if key in first]
        if not wanted:
            return set(), set()
        todo = [first[key] for key in wanted]
        deadline = time.monotonic() + self._timeout
        parents: list[bytes] = [page.parent for page in todo]
        asked = [*wanted, *(parent for parent in dict.fromkeys(parents) if parent and parent not in first)]
        raw, agreed = self._raw_entries(asked, deadline, *self._agree_on_buckets())
        self._buckets = self._agreed(agreed)
        known = {key: entry for key, value in zip(asked, raw, strict=True) if (entry := decode(value)) is not None}
        silent = {key for key, value in zip(asked, raw, strict=True) if isinstance(value, ServerError)}
        stored = {key: known[key] for key in wanted if key in known}
        brought = {nonce: set(some) for nonce, some, found in self._touch(stored, deadline) if found == 1}
        skipped = silent.union(*brought.values())
        at = positions(wanted, parents, {key: entry.position for key, entry in known.items()})
        new = [
            (page, position, parent)
            for page, position, parent in zip(todo, at, parents, strict=True)
            if page.key not in skipped
        ]
        if silent:
            with self._lock:
                self._counts.errors += 1
        useless = {
            key: value for key, value in zip(asked, raw, strict=True) if isinstance(value, bytes) and key not in skipped
        }
        cuts = [
            cut
            for whole in plan_chunks([NewPage(page.key, len(page.payload), position) for page, position, _ in new])
            for cut in cut_smaller(whole, self._pages_at_once(*_kind(new[whole.start][0])))
        ]
        made = [
            self._make_chunk([page for page, _, _ in new[cut.start : cut.stop]], *new[cut.start][1:]) for cut in cuts
        ]
        made = self._fitting(made)
        others: set[bytes] = set()
        pushed_out: set[bytes] = set()
        for batch in _batches(made, [sum(chunk.sizes) for chunk in made]):
            left, elsewhere = self._store(batch, useless, brought)
            others |= elsewhere
            for gone in left:  # what was here at first may have had to make room for the rest of this very call
                pushed_out |= brought.pop(gone.nonce, set())
        for chunk in made:
            if chunk.header.nonce in brought and self._is_to_merge(chunk.header):
                entry = known.get(chunk.header.namespace + chunk.header.parent)
                for gone in self._merge(chunk, first, entry) if entry is not None else []:
                    pushed_out |= brought.pop(gone.nonce, set())
        return others.union(*brought.values()), pushed_out

    def _agree_on_buckets(self) -> list[Request]:
        return [
            self._request(names.BUCKETS, [b"SET", names.BUCKETS, b"%d" % self._own_buckets, b"NX"]),
            self._request(names.BUCKETS, [b"GET", names.BUCKETS]),
        ]

    def _agreed(self, replies: Sequence[Reply]) -> int:
        """The number of buckets that stands in Redis; the last one known where it does not say."""
        number = replies[-1]
        if isinstance(number, bytes) and number.isdigit() and 1 <= int(number) <= MOST_BUCKETS:
            return int(number)
        return self._buckets

    def _touch(self, entries: Mapping[bytes, PageEntry], deadline: float) -> Iterable[tuple[bytes, list[bytes], Reply]]:
        """Mark the chunks of pages as used. Says of each its nonce, the pages, and whether it is here (1 or 0)."""
        chunks_of: dict[int, dict[bytes, list[bytes]]] = defaultdict(lambda: defaultdict(list))
        for key, entry in entries.items():
            chunks_of[entry.bucket][entry.nonce].append(key)
        requests = [
            self._in_bucket(bucket, scripts.TOUCH, self._live_ms, *nonces) for bucket, nonces in chunks_of.items()
        ]
        for nonces, reply in zip(chunks_of.values(), self._servers.exchange(requests, deadline), strict=True):
            if isinstance(reply, list) and len(reply) == len(nonces):
                for (nonce, keys), found in zip(nonces.items(), reply, strict=True):
                    yield nonce, keys, found

    def _fitting(self, made: Sequence[NewChunk]) -> list[NewChunk]:
        """Chunks of one call that fit into their namespaces' quotas together, from the first one on: what comes first
        in a prefix is wanted most."""
        room: dict[tuple[int, bytes], int] = {}
        fitting = []
        for chunk in made:
            place = chunk.bucket, chunk.header.namespace
            if place not in room:
                limit = self._share_of(chunk.header.namespace).limit_in(chunk.bucket)
                room[place] = self._limit_bytes if limit is None else limit
            if chunk.charge <= room[place]:
                room[place] -= chunk.charge
                fitting.append(chunk)
        return fitting

    def _make_chunk(self, pages: Sequence[PageWrite], position: int, parent: bytes) -> NewChunk:
        namespace = pages[0].key[:-HASH_BYTES]
        payloads = self._packed([page.payload for page in pages], namespace)
        lengths = tuple(len(page.payload) for page in pages)
        stored = tuple(len(payload) for payload in payloads)
        header = ChunkHeader(
            codec.RAW if stored == lengths else codec.BIT_SHUFFLED,
            namespace,
            os.urandom(names.NONCE_BYTES),
            tuple(page.key[-HASH_BYTES:] for page in pages),
            lengths,
            stored,
            tuple(page.checksum for page in pages),
            position,
            parent[-HASH_BYTES:],
        )
        return NewChunk(self._share_of(namespace).bucket_of(pages[0].key), header, header.encode(), payloads)

    def _packed(self, payloads: Sequence[PageBytes], namespace: bytes) -> list[Buffer]:
        """What to store of pages: their compressed forms, if that pays."""
        choice = self._codecs
        if choice.wants_sample(namespace):
            page = payloads[0]
            start = time.perf_counter()
            packed = codec.compress(page)
            if packed is not None:
                codec.decompress(np.frombuffer(packed, np.uint8), np.empty_like(page))
            size = len(page) if packed is None else len(packed)
            choice.sampled(namespace, len(page), size, time.perf_counter() - start)
        if not choice.pays(namespace):
            return [page.data for page in payloads]
        return [codec.compress(page) or page.data for page in payloads]

    def _admit(self, batch: Sequence[NewChunk], deadline: float) -> tuple[list[NewChunk], list[_Left]]:
        """Write chunks that nobody finds yet. Returns those that stand, and those that made room."""
        budget = self._limit_bytes // self._buckets
        over = self._over_quota({chunk.header.namespace for chunk in batch})
        requests = [
            self._in_bucket(bucket, scripts.TRIM, namespace, b"%d" % limit) for namespace, bucket, limit in over
        ]
        for chunk in batch:
            quota = self._share_of(chunk.header.namespace).limit_in(chunk.bucket)
            admission = chunk.admission(budget, self._live_ms, quota)
            requests.append(self._in_bucket(chunk.bucket, scripts.ADMIT, *admission))
            requests += [self._request(name, command) for name, command in chunk.commands()]
        start = time.perf_counter()
        changed = {chunk.bucket for chunk in batch}.union(bucket for _, bucket, _ in over)
        replies = iter(self._change(requests, changed, deadline, writing=True))
        seconds = time.perf_counter() - start
        left = [gone for _, bucket, _ in over for gone in _left(bucket, next(replies))]
        standing: dict[bytes, NewChunk] = {}
        failed = 0
        for chunk in batch:
            admitted = next(replies)
            values = [next(replies) for _ in chunk.sizes]
            if isinstance(admitted, list) and len(admitted) == 2:
                left += _left(chunk.bucket, admitted[1])
                if all(value == b"OK" for value in values):
                    standing[chunk.header.nonce] = chunk
            failed += any(isinstance(reply, ServerError) for reply in (admitted, *values))
        for gone in left:
            standing.pop(gone.nonce, None)
        size = sum(sum(chunk.sizes) for chunk in batch)
        if size >= _TELLING_BYTES and not failed:
            self._codecs.sent(size, seconds)
        with self._lock:
            self._counts.errors += failed
            self._counts.evicted += sum(gone.pages for gone in left)
        return list(standing.values()), left

    def _store(
        self, batch: Sequence[NewChunk], useless: Mapping[bytes, bytes], brought: dict[bytes, set[bytes]]
    ) -> tuple[list[_Left], set[bytes]]:
        """Write chunks, then the entries of their pages, the first one for a page wins; delete those of what left.

        Args:
            batch: up to ``_BATCH_BYTES`` of chunks.
            useless: what was seen under pages' names, and is of no use: it is replaced if it still stands there.
            brought: gets which pages each chunk brought in.

        Returns:
            Which chunks made room, and the keys of pages that somebody else stored meanwhile.
        """
        deadline = time.monotonic() + self._timeout
        standing, left = self._admit(batch, deadline)
        requests = list(self._entries_of(left))
        first = len(requests)
        indexed: list[tuple[NewChunk, bytes, int]] = []
        for chunk in standing:
            for key, entry in zip(chunk.keys, chunk.entries(), strict=True):
                name, seen = names.page_name(key), useless.get(key)
                command: list[Argument] = [b"SET", name, entry.encode(), b"PX", self._live_ms, b"NX"]
                if seen is not None:
                    command = _evalsha(scripts.REPLACE, [name], self._live_ms, seen, entry.encode())
                requests.append(self._request(name, command))
                indexed.append((chunk, key, entry.length))
        replies = self._servers.exchange(requests, deadline, writing=True)[first:]
        unplaced: list[tuple[NewChunk, bytes]] = []
        orphaned: dict[tuple[int, bytes], int] = defaultdict(int)
        stored = written_bytes = 0
        for (chunk, key, length), reply in zip(indexed, replies, strict=True):
            if reply in (b"OK", [1]):
                brought.setdefault(chunk.header.nonce, set()).add(key)
                stored += 1
                written_bytes += length
                old = decode(useless.get(key))
                if old is not None:
                    orphaned[old.bucket, old.nonce] += 1
            elif reply in (None, [0]):
                unplaced.append((chunk, key))
        self._release(orphaned, deadline)  # mostly they are gone
        with self._lock:
            self._counts.stored += stored
            self._counts.written_bytes += written_bytes
        return left, self._give_way(unplaced, deadline) if unplaced else set()

    def _give_way(self, unplaced: Sequence[tuple[NewChunk, bytes]], deadline: float) -> set[bytes]:
        """Others' entries stand where these pages' should. Returns which of them are entries indeed."""
        gone: dict[tuple[int, bytes], int] = defaultdict(int)
        for chunk, _ in unplaced:
            gone[chunk.bucket, chunk.header.nonce] += 1
        self._release(gone, deadline)
        keys = [key for _, key in unplaced]
        entries, _ = self._entries(keys, deadline)
        return {key for key, entry in zip(keys, entries, strict=True) if entry is not None}

    def _pages_at_once(self, namespace: bytes, length: int) -> int | None:
        return self._share_of(namespace).pages_at_once(length)

    def _share_of(self, namespace: bytes) -> Share:
        return share_of(namespace, self._quotas.get(namespace, 0), self._buckets)

    # -- quotas and books --------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Ask all buckets what they hold."""
        deadline = time.monotonic() + self._timeout
        buckets = self._agreed(self._servers.exchange(self._agree_on_buckets()[1:], deadline))
        asked = self._books.now
        replies = self._servers.exchange([self._books_of(bucket) for bucket in range(buckets)], deadline)
        self._books.forget_beyond(buckets)
        for bucket, reply in enumerate(replies):
            self._books.said(bucket, reply, asked)

    def _over_quota(self, namespaces: Iterable[bytes]) -> list[tuple[bytes, int, int]]:
        """Where some namespaces have more than they may, as far as is known: which, the bucket, and what they may."""
        return [
            (namespace, bucket, limit)
            for namespace in namespaces
            if namespace in self._quotas
            for bucket, size in self._books.holding(namespace).items()
            if (limit := self._share_of(namespace).limit_in(bucket)) is not None and size > limit
        ]

    # -- merging -----------------------------------------------------------------------------------------------------

    def _is_to_merge(self, header: ChunkHeader) -> bool:
        return fills_a_row(header) and self._pages_at_once(header.namespace, header.lengths[0]) is None

    def _merge(self, last: NewChunk, pages: Mapping[bytes, PageWrite], entry: PageEntry) -> list[_Left]:
        """Write a row that ``last`` has filled as one chunk, point its pages there, and let its pieces go.

        Args:
            last: the row's last piece, in Redis already.
            pages: its pages, by key.
            entry: of the page before its first.

        Returns:
            Which chunks made room.
        """
        deadline = time.monotonic() + self._timeout
        tails = self._tails_before(last.header, entry, deadline)
        if not tails:
            return []
        row = [page for tail in tails for page in tail.pages] + [pages[key] for key in last.keys]
        head = tails[0].header
        merged = self._make_chunk(row, head.position, head.namespace + head.parent if head.parent else b"")
        standing, left = self._admit([merged], deadline)
        self._servers.exchange(list(self._entries_of(left)), deadline)
        if standing:
            pieces = [(tail.bucket, tail.header) for tail in tails] + [(last.bucket, last.header)]
            self._repoint(
                merged, [(bucket, header.nonce) for bucket, header in pieces for _ in header.hashes], deadline
            )
        return left

    def _repoint(self, merged: NewChunk, pieces: Sequence[tuple[int, bytes]], deadline: float) -> None:
        """Point pages from the chunks where they were to the one that has them all. What was removed stays removed."""
        groups: dict[int, list[int]] = defaultdict(list)
        found = [names.page_name(key) for key in merged.keys]
        for place, name in enumerate(found):
            groups[self._servers.slot(name)].append(place)
        entries = merged.entries()
        requests = []
        for slot, places in groups.items():
            arguments = [self._live_ms]
            for place in places:
                arguments += [reference(*pieces[place]), entries[place].encode()]
            requests.append(Request(slot, _evalsha(scripts.REPOINT, [found[place] for place in places], *arguments)))
        gone: dict[tuple[int, bytes], int] = defaultdict(int)
        for places, reply in zip(
            groups.values(), self._servers.exchange(requests, deadline, writing=True), strict=True
        ):
            if not isinstance(reply, list) or len(reply) != len(places):
                continue  # nobody knows where they point now: both chunks stay until they are the oldest
            for place, done in zip(places, reply, strict=True):
                gone[pieces[place] if done == 1 else (merged.bucket, merged.header.nonce)] += 1
        self._release(gone, deadline)

    def _tails_before(self, following: ChunkHeader, entry: PageEntry | None, deadline: float) -> list[_Tail]:
        """The pieces of a row before its last, read from Redis, as far as they are whole."""
        tails: list[_Tail] = []
        while entry is not None and len(tails) < MOST_TAILS:
            head = self._header(entry, deadline)
            if head is None or not is_tail(head, entry, following):
                break
            load = Load(entry)
            arrays = [np.empty(length, np.uint8) for length in head.lengths]
            for place, found in enumerate(entries_of(head, entry.bucket, entry.header_bytes)):
                load.add(place, head.key(place), found, arrays[place])
            if any(checksum is None for _, checksum, _ in self._load([load])):
                break
            pages = [PageWrite(head.key(at), head.checksums[at], array) for at, array in enumerate(arrays)]
            tails.insert(0, _Tail(entry.bucket, head, pages))
            if begins_a_row(head):
                break
            [entry], _ = self._entries([head.namespace + head.parent], deadline)
            following = head
        return tails

    def _header(self, entry: PageEntry, deadline: float) -> ChunkHeader | None:
        name = names.part_name(entry.bucket, entry.nonce, 0)
        command = [b"GETRANGE", name, b"0", b"%d" % (entry.header_bytes - 1)]
        [reply] = self._servers.exchange([self._request(name, command)], deadline)
        try:
            return chunks.decode_header(reply) if isinstance(reply, bytes) else None
        except FormatError:
            return None

    def _entries_of(self, left: Sequence[_Left]) -> Iterable[Request]:
        """Requests that delete the entries of chunks that made room."""
        for gone in left:
            try:
                header = chunks.decode_header(gone.header)
            except FormatError:
                continue  # it never had any, or nobody can say which: whoever reads one finds out
            by_slot: dict[int, list[bytes]] = defaultdict(list)
            for index in range(len(header.hashes)):
                name = names.page_name(header.key(index))
                by_slot[self._servers.slot(name)].append(name)
            for slot, group in by_slot.items():
                yield Request(slot, _evalsha(scripts.FORGET, group, reference(gone.bucket, gone.nonce)))


def _evalsha(script: bytes, keys: Sequence[bytes], *arguments: bytes) -> list[Argument]:
    return [b"EVALSHA", script, b"%d" % len(keys), *keys, *arguments]


def _kind(page: PageWrite) -> tuple[bytes, int]:
    return page.key[:-HASH_BYTES], len(page.payload)


def _ones(reply: Reply) -> int:
    return reply.count(1) if isinstance(reply, list) else 0


def _left(bucket: int, reply: Reply) -> list[_Left]:
    out = []
    for chunk in reply if isinstance(reply, list) else []:
        match chunk:
            case [bytes() as nonce, int() as pages, bytes() as header]:
                out.append(_Left(bucket, nonce, pages, header))
    return out


def _batches(items: Sequence[_Item], sizes: Sequence[int]) -> Iterable[list[_Item]]:
    """Runs of items of up to ``_BATCH_BYTES``, or one."""
    batch: list[_Item] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch
