"""Which pages a namespace has in Redis: its chunks say it, of which each bucket keeps an order.

So what others have there costs nothing. Where a chunk does not say it, all keys of all servers are walked over. An
entry whose chunk has left (who evicted that died before deleting this) leads to no page and is not named: whoever reads
it deletes it, or its time to live does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.errors import FormatError, ResourceError
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import ChunkHeader, decode_header
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.resp import Reply, ServerError
from kvstore.tiers.redis.net.server import runs
from kvstore.tiers.tier import KEY_BYTES

_SECONDS = 30.0
"""For one call."""
_LOOKS = 4
"""How often all buckets are looked at, where others store all the time. Two are enough: see
:meth:`Listing._named_by_chunks`."""
_UNTOLD = "not every server of Redis said which pages it has: some may still be there"


class _Place(NamedTuple):
    """Where a chunk is."""

    bucket: int
    nonce: bytes


class _Told(NamedTuple):
    """What chunks say. One that is in neither can't be read, or has left."""

    headers: dict[_Place, ChunkHeader]
    unwritten: set[_Place]
    """There is a place for their bytes, and nothing in it yet. No page is in these: entries come behind the bytes."""


class Listing:
    """Safe for threads, and for several nodes at once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._topology = context.topology
        self._entries = context.entries

    def keys(self, prefix: bytes) -> list[bytes]:
        """See :meth:`kvstore.tiers.redis.RedisTier.keys`."""
        end = time.monotonic() + _SECONDS
        found = self._named_by_chunks(prefix, end) if len(prefix) == key_names.NAMESPACE_BYTES else None
        return self._walk(prefix, end) if found is None else self._standing(sorted(found), end)

    def _named_by_chunks(self, namespace: bytes, end: float) -> set[bytes] | None:
        """The keys of the pages of all chunks of a namespace. None: a chunk does not say which it has, or it is not
        known how many buckets there are.

        A page that is here all the time is in a chunk all the time. Compaction moves it to another one, once: while
        all buckets are looked at, perhaps from one that is looked at later to one that was looked at before. But then
        the next look shows that chunk, and whole. So two looks miss none of what was there when they began, and what
        others store meanwhile is not waited for.
        """
        [buckets] = self._ask([Request(self._topology.slot(key_names.BUCKETS), [b"GET", key_names.BUCKETS])], end)
        if not isinstance(buckets, bytes) or not buckets.isdigit() or int(buckets) > key_names.MOST_BUCKETS:
            return None
        found: set[bytes] = set()
        seen: set[_Place] = set()
        known: set[_Place] = set()
        silent: set[_Place] = set()
        for look in range(_LOOKS):
            listed = self._listed(namespace, int(buckets), end)
            if listed is None or silent & listed:  # these have not just left
                return None
            if look == _LOOKS - 1:
                break
            unread = listed - known
            told = self._told(namespace, sorted(unread), end)
            for place, header in told.headers.items():
                known.add(place)
                found.update(map(header.key, range(len(header.hashes))))
            silent = unread - told.headers.keys() - told.unwritten
            if listed <= seen and not silent:
                break
            seen |= listed
        return found

    def _listed(self, namespace: bytes, buckets: int, end: float) -> set[_Place] | None:
        """The chunks of a namespace in all buckets; None: something else stands there."""
        found: set[_Place] = set()
        for some in runs(range(buckets)):
            names = [key_names.bucket_names(bucket)[0] + b":" + namespace for bucket in some]
            asked = [Request(self._topology.slot(name), [b"ZRANGE", name, b"0", b"-1"]) for name in names]
            for bucket, reply in zip(some, self._ask(asked, end), strict=True):
                if not isinstance(reply, list):
                    return None
                found.update(_Place(bucket, nonce) for nonce in reply if isinstance(nonce, bytes))
        return found

    def _told(self, namespace: bytes, places: Sequence[_Place], end: float) -> _Told:
        """What chunks of a namespace say of themselves."""
        told = _Told({}, set())
        for some in runs(places):
            sizes = dict(self._header_bytes(some, end))
            names = [key_names.part_name(place.bucket, place.nonce, 0) for place in sizes]
            asked = [
                Request(self._topology.slot(name), [b"GETRANGE", name, b"0", b"%d" % (size - 1)])
                for name, size in zip(names, sizes.values(), strict=True)
            ]
            heads = dict(zip(sizes, self._ask(asked, end), strict=True))
            for place, head in heads.items():
                header = _decoded(head)
                if header is not None and (header.namespace, header.nonce) == (namespace, place.nonce):
                    told.headers[place] = header
            told.unwritten.update(self._standing_empty([place for place, head in heads.items() if head == b""], end))
        return told

    def _standing_empty(self, places: Sequence[_Place], end: float) -> Iterator[_Place]:
        """Of chunks that said nothing those that are being written: what is gone says nothing either."""
        names = [key_names.part_name(place.bucket, place.nonce, 0) for place in places]
        asked = [Request(self._topology.slot(name), [b"EXISTS", name]) for name in names]
        yield from (place for place, reply in zip(places, self._ask(asked, end), strict=True) if reply == 1)

    def _header_bytes(self, places: Iterable[_Place], end: float) -> Iterator[tuple[_Place, int]]:
        """How long the headers of chunks are that are charged."""
        nonces: dict[int, list[bytes]] = defaultdict(list)
        for place in places:
            nonces[place.bucket].append(place.nonce)
        names = [key_names.bucket_names(bucket)[1] for bucket in nonces]
        asked = [
            Request(self._topology.slot(name), [b"HMGET", name, *some])
            for name, some in zip(names, nonces.values(), strict=True)
        ]
        for (bucket, some), lines in zip(nonces.items(), self._ask(asked, end), strict=True):
            for nonce, line in zip(some, lines if isinstance(lines, list) else (), strict=False):
                fields = line.split(b":", 3) if isinstance(line, bytes) else []
                if len(fields) == 4 and fields[2].isdigit() and int(fields[2]):
                    yield _Place(bucket, nonce), int(fields[2])

    def _standing(self, keys: Sequence[bytes], end: float) -> list[bytes]:
        """Those that have an entry: others were removed, and their chunk is here for its other pages."""
        found = []
        for some in runs(keys):
            _check(end)
            raw, _ = self._entries.seen(some, self._context.deadline())
            if any(isinstance(value, ServerError) and value.kind != "WRONGTYPE" for value in raw):
                raise ResourceError(_UNTOLD)
            found += [key for key, value in zip(some, raw, strict=True) if value is not None]
        return found

    def _ask(self, requests: Sequence[Request], end: float) -> list[Reply]:
        """Replies to all requests.

        Raises:
            ResourceError: to some there is none, or it is later than ``end``.
        """
        replies: list[Reply] = []
        for some in runs(requests):
            _check(end)
            replies += self._topology.exchange(some, self._context.deadline())
        if any(isinstance(reply, ServerError) and reply.kind != "WRONGTYPE" for reply in replies):
            raise ResourceError(_UNTOLD)
        return replies

    def _walk(self, prefix: bytes, end: float) -> list[bytes]:
        """All keys of all servers, all of them side by side."""
        arguments = [b"SCAN", b"MATCH", key_names.page_pattern(prefix), b"COUNT", b"1000"]
        found: set[bytes] = set()
        cursors = dict.fromkeys(self._topology.primaries(end), b"0")
        whole = bool(cursors)
        while whole and cursors and time.monotonic() < end:
            replies = self._topology.exchange_each(arguments, cursors, self._context.deadline())
            whole = whole and replies.keys() == cursors.keys()
            cursors = {}
            for server, reply in replies.items():
                match reply:
                    case [bytes() as cursor, list() as some]:
                        found.update(name for name in some if isinstance(name, bytes))
                        if cursor != b"0":
                            cursors[server] = cursor
                    case _:
                        whole = False
        if not whole or cursors:
            raise ResourceError(_UNTOLD)
        strip = len(key_names.PAGE_PREFIX)
        return [name[strip:] for name in found if len(name) == strip + KEY_BYTES]


def _check(end: float) -> None:
    if time.monotonic() >= end:
        raise ResourceError(_UNTOLD)


def _decoded(data: Reply) -> ChunkHeader | None:
    try:
        return decode_header(data) if isinstance(data, bytes) else None
    except FormatError:
        return None
