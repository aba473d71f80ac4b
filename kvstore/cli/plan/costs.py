"""What one call of a node costs a shared Redis: round trips, commands, scripts and bytes. Pure; no I/O.

The commands are those that the tier sends (:mod:`kvstore.tiers.redis`), made by the tier's own encoders and cut by its
own plans, so that bytes are exact but for digits; a test holds all of it against real servers. A call is described by
its *shape*: how many pages, in how many chunks, buckets and hash slots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from redis.crc import key_slot

from kvstore.tiers.redis.buckets import CLOCKS, JUST_PLACED_MS
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import CHUNK_BYTES, ChunkHeader, pages_per_chunk, part_sizes
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.format.planning import NewPage, plan_chunks
from kvstore.tiers.redis.format.summary import Usage
from kvstore.tiers.redis.format.summary import encode as encode_summary
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.resp import Argument, encode
from kvstore.tiers.redis.net.server import BATCH_BYTES, BATCH_PAGES
from kvstore.tiers.redis.quotas import share_of
from kvstore.tiers.redis.summaries import GROUP
from kvstore.tiers.redis.tier import REFRESH_SECONDS
from kvstore.tiers.tier import KEY_BYTES

__all__ = [
    "CHUNK_BYTES",
    "REFRESH_SECONDS",
    "Cost",
    "Shape",
    "agreement",
    "load",
    "load_chunks",
    "load_entries",
    "lookup",
    "refresh",
    "shape_of",
    "store",
    "store_chunks",
    "store_entries",
    "touch",
    "touch_chunks",
    "touch_entries",
    "typical_shape",
]

_NUMBER = 2
"""Digits, about, of a bucket's number in a key's name."""
_NAMESPACE = bytes(key_names.NAMESPACE_BYTES)
_HASH = bytes(KEY_BYTES - key_names.NAMESPACE_BYTES)
_LIVE_MS = b"604800000"
_CLAIM_MS = b"2000"
_NULL = len(b"$-1\r\n")
_OK = len(b"+OK\r\n")
_INTEGER = len(b":1\r\n")


@dataclass(frozen=True, slots=True)
class Cost:
    """What Redis is asked in one call, or in many."""

    round_trips: int = 0
    """One behind the other: requests to several servers at once are one."""
    commands: int = 0
    """Scripts among them, and each counted once whatever it does inside."""
    scripts: int = 0
    sent_bytes: int = 0
    """To Redis."""
    received_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.round_trips + other.round_trips,
            self.commands + other.commands,
            self.scripts + other.scripts,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(
            self.round_trips * times,
            self.commands * times,
            self.scripts * times,
            self.sent_bytes * times,
            self.received_bytes * times,
        )

    def numbers(self) -> tuple[int, int, int, int, int]:
        """All of it, in the order of the arguments."""
        return self.round_trips, self.commands, self.scripts, self.sent_bytes, self.received_bytes


class Shape(NamedTuple):
    """How many of what a call is about."""

    pages: int
    page_bytes: int
    chunks: tuple[int, ...]
    """Pages of each chunk."""
    buckets: int
    """Different ones of these chunks."""
    groups: int
    """Commands that ask for all entries: one in a thousand on a single server, one for each slot in a Cluster."""
    alone: int
    """Of these, those that ask for one entry."""

    @property
    def payload_bytes(self) -> int:
        """Of its pages."""
        return self.pages * self.page_bytes


def shape_of(keys: Sequence[bytes], page_bytes: int, buckets: int, *, cluster: bool) -> Shape:
    """The shape of a call for a whole prefix that is stored in one go, in a tier of so many buckets.

    Args:
        keys: of the pages, head first, 64 bytes each.
        page_bytes: of each.
        buckets: in Redis.
        cluster: whether it is one.
    """
    cut = plan_chunks([NewPage(key, page_bytes, place) for place, key in enumerate(keys)])
    share = share_of(_NAMESPACE, 0, buckets)
    different = {share.bucket_of(keys[chunk.start]) for chunk in cut}
    groups = _groups(keys) if cluster else [min(BATCH_PAGES, len(keys) - at) for at in range(0, len(keys), BATCH_PAGES)]
    return Shape(len(keys), page_bytes, tuple(map(len, cut)), len(different), len(groups), groups.count(1))


@lru_cache(1 << 14)
def typical_shape(pages: int, page_bytes: int, buckets: int, *, cluster: bool) -> Shape:
    """The shape to be expected of so many pages of a new prefix, wherever hashes put them."""
    length = pages_per_chunk(page_bytes)
    chunks = tuple(min(length, pages - at) for at in range(0, pages, length))
    different = _expected(len(chunks), buckets)
    if not cluster:
        return Shape(pages, page_bytes, chunks, different, _runs(pages), int(pages == 1))
    slots = sum(_expected(min(BATCH_PAGES, pages - at), 1 << 14) for at in range(0, pages, BATCH_PAGES))
    return Shape(pages, page_bytes, chunks, different, slots, max(0, 2 * slots - pages))


@lru_cache(1 << 14)
def lookup(shape: Shape, hits: int) -> Cost:
    """``contains``, of which so many pages are there."""
    trips = _runs(shape.pages)
    return Cost(trips, shape.groups, 0, _asking(shape), _answers(shape, hits))


def load(shape: Shape) -> Cost:
    """``read`` of pages that are all there: entries, then ranges of chunks; chunks of 32 MiB at a time."""
    return load_entries(shape) + load_chunks(shape)


@lru_cache(1 << 14)
def load_entries(shape: Shape) -> Cost:
    """Of :func:`load`, what is asked where the entries are."""
    return Cost(1, shape.groups, 0, _asking(shape), _answers(shape, shape.pages))


@lru_cache(1 << 14)
def load_chunks(shape: Shape) -> Cost:
    """Of :func:`load`, what is asked where the chunks are."""
    trips = -(-shape.payload_bytes // BATCH_BYTES)
    ranges = _sum(_reading(pages, shape.page_bytes) * chunks for pages, chunks in Counter(shape.chunks).items())
    return ranges + _touching(shape, trips)


def store(shape: Shape) -> Cost:
    """``write`` of pages of which none is there, with nothing to be evicted for them."""
    return _sum(agreement()) + store_entries(shape) + store_chunks(shape)


@lru_cache(1)
def agreement() -> tuple[Cost, Cost]:
    """Of :func:`store`, what is asked where the number of buckets stands, and where the format does. It goes along with
    the look at the entries."""
    names = (key_names.BUCKETS, 1), (key_names.FORMAT, 2)
    of_buckets, of_format = (
        Cost(0, 2, 0, _encoded([b"SET", name, b"1", b"NX"]) + _encoded([b"GET", name]), _NULL + _bulk(digits))
        for name, digits in names
    )
    return of_buckets, of_format


@lru_cache(1 << 14)
def store_entries(shape: Shape) -> Cost:
    """Of :func:`store`, what is asked where the entries are: whether they stand, and then, to put them."""
    look = Cost(1, shape.groups, 0, _asking(shape), _answers(shape, 0))
    trips = -(-shape.payload_bytes // BATCH_BYTES)
    scripted = max(trips, shape.groups) - shape.alone
    put = [b"SET", key_names.page_name(bytes(KEY_BYTES)), _entry(), b"PX", _LIVE_MS, b"NX"]
    each = sum(map(_argument, (len(key_names.page_name(bytes(KEY_BYTES))), 1, len(_entry()))))
    sent = shape.alone * _encoded(put) + scripted * _encoded(scripts.call(scripts.PLACE, [], _LIVE_MS))
    sent += (shape.pages - shape.alone) * each
    received = shape.alone * _OK + scripted * _bulk(0) + shape.pages - shape.alone
    return look + Cost(trips, shape.alone + scripted, scripted, sent, received)


@lru_cache(1 << 14)
def store_chunks(shape: Shape) -> Cost:
    """Of :func:`store`, what is asked where the chunks are: to admit them, their bytes, and their sums."""
    admit = _sum(_writing(pages, shape.page_bytes) * chunks for pages, chunks in Counter(shape.chunks).items())
    trips = 3 * -(-shape.payload_bytes // BATCH_BYTES)  # behind the admission go the bytes, and then the ends of claims
    return admit + _sums(shape.buckets) + Cost(trips)


@lru_cache(1 << 14)
def claimed(shape: Shape) -> Cost:
    """Of :func:`store`, what is asked where the chunks are when others are sending them."""
    sent = _sum(_admitting(pages, shape.page_bytes) * chunks for pages, chunks in Counter(shape.chunks).items())
    chunks = len(shape.chunks)
    said = chunks * len(b"*2\r\n:2\r\n:2000\r\n")
    return Cost(1, chunks, chunks, sent.sent_bytes, said) + _sums(shape.buckets)


@lru_cache(1 << 14)
def look_at_claims(shape: Shape) -> Cost:
    """To ask whether others have sent chunks by now."""
    chunks = len(shape.chunks)
    name = key_names.claim_name(10**_NUMBER - 1, _NAMESPACE + _HASH)
    return Cost(1, chunks, 0, chunks * _encoded([b"GET", name]), chunks * _bulk(key_names.NONCE_BYTES))


def refresh(buckets: int, nodes: int = 1) -> Cost:
    """What a node asks every ``REFRESH_SECONDS`` by itself: what is agreed on, summaries of buckets, what time it is;
    and its part of what one of so many nodes does for all: it asks the buckets, and puts their summaries."""
    clocks = len(range(0, buckets, max(1, buckets // CLOCKS)))
    groups = -(-buckets // GROUP)
    looked = key_names.summary_name(buckets, 10**_NUMBER - 1)
    value = len(encode_summary([Usage(1, 1, {_NAMESPACE: 1})] * min(GROUP, buckets)))
    sent = sum(_encoded([b"GET", name]) for name in (key_names.BUCKETS, key_names.FORMAT))
    sent += groups * _encoded([b"GET", looked]) + clocks * _encoded([b"TIME"])
    received = _bulk(1) + _bulk(2) + clocks * (len(b"*2\r\n") + _bulk(10) + _bulk(6))
    received += groups * _bulk(value) * (nodes - 1) // nodes  # who asks the buckets has found no summary
    put = _encoded([b"SET", looked, b"", b"NX", b"PX", b"5000"])
    sums = _sums(buckets)
    asked = sums.sent_bytes + groups * (2 * put + value)
    answered = sums.received_bytes + groups * (_NULL + 2 * _OK)
    return Cost(
        3 + 3 // nodes,
        2 + groups + clocks + -(-(buckets + 2 * groups) // nodes),
        0,
        sent + asked // nodes,
        received + answered // nodes,
    )


def touch(shape: Shape) -> Cost:
    """``touch`` of pages that are all there: their entries and their chunks live on."""
    return touch_entries(shape) + touch_chunks(shape)


@lru_cache(1 << 14)
def touch_entries(shape: Shape) -> Cost:
    """Of :func:`touch`, what is asked where the entries are: those alone in their slot by two commands, without a
    script."""
    name = key_names.page_name(bytes(KEY_BYTES))
    scripted = shape.groups - shape.alone
    sent = scripted * _encoded(scripts.call(scripts.RENEW, [], _LIVE_MS))
    sent += (shape.pages - shape.alone) * _argument(len(name))
    sent += shape.alone * (_encoded([b"MGET", name]) + _encoded([b"PEXPIRE", name, _LIVE_MS]))
    received = _answers(shape, shape.pages) + shape.alone * _INTEGER
    return Cost(_runs(shape.pages), shape.groups + shape.alone, scripted, sent, received)


def _by_scripts(shape: Shape) -> tuple[int, int]:
    """How many scripts name all entries, and their bytes."""
    base = _encoded(scripts.call(scripts.FORGET, [], _LIVE_MS))
    names = shape.pages * _argument(len(key_names.page_name(bytes(KEY_BYTES))))
    return shape.groups, shape.groups * base + names


@lru_cache(1 << 14)
def touch_chunks(shape: Shape) -> Cost:
    """Of :func:`touch`, what is asked where the chunks are."""
    return _touching(shape, _runs(shape.pages))


@lru_cache(1 << 14)
def read_back(shape: Shape) -> Cost:
    """Of a compaction, to read the chunks that are merged: one by one, the header of each before its pages."""
    header = _encoded([b"GETRANGE", _part_name(0), b"0", b"1024"])
    sizes = sum(_bulk(header_bytes(pages)) for pages in shape.chunks)
    chunks = len(shape.chunks)
    return load_chunks(shape) + Cost(2 * chunks - 1, chunks, 0, chunks * header, sizes)


@lru_cache(1 << 14)
def repoint(shape: Shape) -> Cost:
    """Of a compaction, to let entries lead to the new chunk."""
    asked, sent = _by_scripts(shape)
    each = 2 * _argument(len(_entry())) + _argument(16)
    received = shape.groups * len(b"*1\r\n") + shape.pages * _INTEGER
    return Cost(_runs(shape.pages), asked, asked, sent + shape.pages * each, received)


@lru_cache(1 << 14)
def evicted(shape: Shape) -> Cost:
    """What an admission says beside of chunks that were evicted for it."""
    each = len(b"*3\r\n") + _bulk(key_names.NONCE_BYTES) + _INTEGER
    return Cost(0, 0, 0, 0, sum(each + _bulk(header_bytes(pages)) for pages in shape.chunks))


@lru_cache(1 << 14)
def forget(shape: Shape) -> Cost:
    """To delete the entries of a chunk that was evicted."""
    asked, sent = _by_scripts(shape)
    received = shape.groups * len(b"*1\r\n") + shape.pages * _INTEGER
    return Cost(_runs(shape.pages), asked, asked, sent, received)


@lru_cache(1 << 14)
def release(chunks: int, buckets: int) -> Cost:
    """To take pages off chunks that they are not in any more, and to ask what their buckets hold then."""
    script = _script_bytes(scripts.RELEASE, bytes(key_names.NONCE_BYTES), b"16")
    return Cost(1, chunks, chunks, chunks * script, chunks * _INTEGER) + _sums(buckets)


@lru_cache(4096)
def _sums(buckets: int) -> Cost:
    """What buckets hold, asked along with what changes them."""
    asked = _encoded([b"HGETALL", key_names.bucket_names(10**_NUMBER - 1)[2]])
    said = len(b"*6\r\n") + sum(map(_bulk, (5, 8, 5, 3, 38, 8)))
    return Cost(0, buckets, 0, buckets * asked, buckets * said)


def _touching(shape: Shape, trips: int) -> Cost:
    """The script that marks chunks as used: one for each bucket."""
    sent = shape.buckets * _script_bytes(scripts.TOUCH, _LIVE_MS) + len(shape.chunks) * _argument(key_names.NONCE_BYTES)
    return Cost(trips, shape.buckets, shape.buckets, sent, (shape.buckets + len(shape.chunks)) * _INTEGER)


@lru_cache(4096)
def _reading(pages: int, page_bytes: int) -> Cost:
    """The ranges of one chunk."""
    cost = Cost()
    for part, size in enumerate(part_sizes(header_bytes(pages), pages * page_bytes)):
        cost += Cost(0, 1, 0, _encoded([b"GETRANGE", _part_name(part), b"0", b"%d" % size]), _bulk(size))
    return cost


@lru_cache(4096)
def _writing(pages: int, page_bytes: int) -> Cost:
    """Admission and values of one chunk, and the end of its claim."""
    cost = _admitting(pages, page_bytes)
    for part, size in enumerate(part_sizes(header_bytes(pages), pages * page_bytes)):
        empty = _encoded([b"SET", _part_name(part), b"", b"XX", b"KEEPTTL"])
        cost += Cost(0, 1, 0, empty - _argument(0) + _argument(size), _OK)
    claim = key_names.claim_name(10**_NUMBER - 1, _NAMESPACE + _HASH)
    return cost + Cost(0, 1, 0, _encoded([b"SET", claim, b"", b"XX", b"PX", JUST_PLACED_MS]), _OK)


@lru_cache(4096)
def _admitting(pages: int, page_bytes: int) -> Cost:
    """Admission of one chunk."""
    header = header_bytes(pages)
    sizes = part_sizes(header, pages * page_bytes)
    numbers = [b"%d" % number for number in (sum(sizes), pages, header, len(sizes), 1 << 25)]
    arguments = [bytes(key_names.NONCE_BYTES), *numbers, _LIVE_MS, _NAMESPACE, b"", _NAMESPACE + _HASH, _CLAIM_MS, b"0"]
    return Cost(0, 1, 1, _script_bytes(scripts.ADMIT, *arguments), len(b"*2\r\n:1\r\n*0\r\n"))


def _sum(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


# -- bytes, by the tier's own encoders --------------------------------------------------------------------------------


def _asking(shape: Shape) -> int:
    """Bytes of the commands that ask for all entries."""
    return shape.groups * _encoded([b"MGET"]) + shape.pages * _argument(len(key_names.page_name(bytes(KEY_BYTES))))


def _answers(shape: Shape, hits: int) -> int:
    return shape.groups * len(b"*1\r\n") + hits * _bulk(len(_entry())) + (shape.pages - hits) * _NULL


@lru_cache(256)
def header_bytes(pages: int) -> int:
    """Of a chunk of so many pages."""
    hashes, numbers = (_HASH,) * pages, (1 << 20,) * pages
    header = ChunkHeader(0, _NAMESPACE, bytes(key_names.NONCE_BYTES), hashes, numbers, numbers, numbers, 0, _HASH)
    return len(header.encode())


@lru_cache(1)
def _entry() -> bytes:
    return PageEntry(0, bytes(key_names.NONCE_BYTES), 0, 0, 0, 1, 1, 0).encode()


@lru_cache(8)
def _part_name(part: int) -> bytes:
    return key_names.part_name(10**_NUMBER - 1, bytes(key_names.NONCE_BYTES), part)


@lru_cache(4096)
def _script_bytes(script: bytes, *arguments: bytes) -> int:
    return _encoded(scripts.call(script, key_names.bucket_names(10**_NUMBER - 1), *arguments))


def _encoded(command: Sequence[Argument]) -> int:
    return sum(map(len, encode([command])))


def _argument(length: int) -> int:
    """Bytes of one more argument."""
    return len(b"$%d\r\n\r\n" % length) + length


_bulk = _argument
"""A bulk reply looks like an argument."""


def _runs(pages: int) -> int:
    return -(-pages // BATCH_PAGES)


def _groups(keys: Sequence[bytes]) -> list[int]:
    """How many keys each command names in a Cluster, with as many keys at once as the tier asks for."""
    runs = [keys[at : at + BATCH_PAGES] for at in range(0, len(keys), BATCH_PAGES)]
    slots = [Counter(key_slot(key_names.page_name(key)) for key in run) for run in runs]
    return [named for each in slots for named in each.values()]


def _expected(items: int, places: int) -> int:
    """How many of some places are taken, to be expected, where so many items fall on any of them."""
    return round(places * -math.expm1(items * math.log1p(-1 / places))) if places > 1 else min(1, items)
