"""The entries of pages in Redis: looked up, replaced and deleted, each only where it still says what was seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.tiers.redis.buckets import Buckets, EvictedChunk
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.entry import PageEntry, decode, reference
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.net import scripts
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.resp import Reply, ServerError
from kvstore.tiers.redis.net.topology import NO_ANSWER, Topology

_MOST_KEYS = 1024
"""Keys in one command."""
_NOTHING = b"-"
"""No entry: what was seen where nothing stood."""


class Placed(NamedTuple):
    """A page whose entry is put in place."""

    chunk: NewChunk
    key: bytes
    length: int


def placed(reply: Reply) -> str | None:
    """Of each page of a request of :meth:`Entries.placing` ``1`` where its entry was put; None: nobody knows."""
    if reply == b"OK":
        return "1"
    if reply is None:
        return "0"
    return reply.decode("ascii", "replace") if isinstance(reply, bytes) else None


class Entries:
    """All entries. Safe for threads.

    Args:
        topology: the servers where they are.
        buckets: where their chunks are. Entries live as long as these.
    """

    def __init__(self, topology: Topology, buckets: Buckets) -> None:
        self._topology = topology
        self._buckets = buckets
        self._live_ms = buckets.live_ms

    def seen(
        self, keys: Sequence[bytes], deadline: float, *also: Request, renew: bool = False
    ) -> tuple[list[Reply], list[Reply]]:
        """What stands under the names of pages, and the replies to other requests that went along.

        Args:
            keys: of the pages.
            deadline: on the clock of ``time.monotonic``; ``NO_ANSWER`` is what came too late.
            also: requests that go along.
            renew: let the entries live on.
        """
        found = [key_names.page_name(key) for key in keys]
        groups = self._groups(found)
        requests, renewals = [], []
        for slot, places in groups:
            some = [found[place] for place in places]
            if renew and len(some) == 1:  # as mostly in a Cluster: two commands cost a twentieth of a script
                renewals.append(Request(slot, [b"PEXPIRE", some[0], self._live_ms]))
            scripted = renew and len(some) > 1
            command = scripts.call(scripts.RENEW, some, self._live_ms) if scripted else [b"MGET", *some]
            requests.append(Request(slot, command))
        replies = self._topology.exchange([*also, *requests, *renewals], deadline)
        raw: list[Reply] = [NO_ANSWER] * len(keys)
        for (_, places), reply in zip(groups, replies[len(also) : len(also) + len(groups)], strict=True):
            if isinstance(reply, list) and len(reply) == len(places):
                for place, value in zip(places, reply, strict=True):
                    raw[place] = value
        return raw, replies[: len(also)]

    def find(self, keys: Sequence[bytes], deadline: float) -> tuple[list[PageEntry | None], int]:
        """The entries of pages, and how many of them no server would tell."""
        if not keys:
            return [], 0
        raw, _ = self.seen(keys, deadline)
        if not any(raw):
            return [None] * len(keys), 0
        return [decode(value) for value in raw], sum(isinstance(value, ServerError) for value in raw)

    def placing(self, chunks: Sequence[NewChunk], stale: Mapping[bytes, bytes]) -> list[tuple[Request, list[Placed]]]:
        """Requests that put the entries of chunks where none stand, and what each puts; see :func:`placed`.

        Args:
            chunks: are whole in Redis.
            stale: what was seen under pages' names and leads to no page: it is replaced if it still stands there.
        """
        new = [
            (Placed(chunk, key, entry.length), entry.encode())
            for chunk in chunks
            for key, entry in zip(chunk.keys, chunk.entries(), strict=True)
        ]
        found = [key_names.page_name(page.key) for page, _ in new]
        requests = []
        for slot, places in self._groups(found):
            arguments: list[bytes] = [self._live_ms]
            for place in places:
                arguments += [stale.get(new[place][0].key, _NOTHING), new[place][1]]
            some = [found[place] for place in places]
            command = scripts.call(scripts.PLACE, some, *arguments)
            if len(places) == 1 and arguments[1] is _NOTHING:  # as mostly in a Cluster
                command = [b"SET", some[0], arguments[2], b"PX", self._live_ms, b"NX"]
            requests.append((Request(slot, command), [new[place][0] for place in places]))
        return requests

    def forget(self, pages: Sequence[tuple[bytes, PageEntry]], deadline: float) -> int:
        """Delete entries that still say the same, and take their pages off their chunks. Returns how many were."""
        groups: dict[tuple[int, bytes], list[tuple[bytes, PageEntry]]] = defaultdict(list)
        for key, entry in pages:
            groups[self._topology.slot(key_names.page_name(key)), entry.reference].append((key, entry))
        requests = [
            Request(slot, scripts.call(scripts.FORGET, [key_names.page_name(key) for key, _ in group], same))
            for (slot, same), group in groups.items()
        ]
        gone: dict[tuple[int, bytes], int] = defaultdict(int)
        for group, reply in zip(groups.values(), self._topology.exchange(requests, deadline), strict=True):
            entry = group[0][1]
            gone[entry.bucket, entry.nonce] += reply.count(1) if isinstance(reply, list) else 0
        self._buckets.release(gone, deadline)
        return sum(gone.values())

    def deletions(self, evicted: Iterable[EvictedChunk]) -> Iterable[Request]:
        """Requests that delete the entries of chunks that were evicted."""
        for gone in evicted:
            found = [key_names.page_name(key) for key in gone.keys]
            for slot, places in self._by_slot(found).items():
                some = [found[place] for place in places]
                yield Request(slot, scripts.call(scripts.FORGET, some, reference(gone.bucket, gone.nonce)))

    def repoint(self, merged: NewChunk, fragments: Sequence[tuple[int, bytes]], deadline: float) -> None:
        """Point pages from the chunks where they were to the one that has them all. What was removed stays removed.

        Args:
            merged: is whole in Redis.
            fragments: for each of its pages the bucket and the nonce of the chunk where it was.
            deadline: on the clock of ``time.monotonic``.
        """
        found = [key_names.page_name(key) for key in merged.keys]
        groups = self._by_slot(found)
        entries = merged.entries()
        requests = []
        for slot, places in groups.items():
            arguments = [self._live_ms]
            for place in places:
                arguments += [reference(*fragments[place]), entries[place].encode()]
            some = [found[place] for place in places]
            requests.append(Request(slot, scripts.call(scripts.REPOINT, some, *arguments)))
        gone: dict[tuple[int, bytes], int] = defaultdict(int)
        replies = self._topology.exchange(requests, deadline, writing=True)
        self._topology.exchange(self._buckets.end_claims([merged]), deadline, writing=True)
        for places, reply in zip(groups.values(), replies, strict=True):
            if not isinstance(reply, list) or len(reply) != len(places):
                continue  # nobody knows where they point now: both chunks stay until they are the oldest
            for place, done in zip(places, reply, strict=True):
                gone[fragments[place] if done == 1 else (merged.bucket, merged.header.nonce)] += 1
        self._buckets.release(gone, deadline)

    def _groups(self, found: Sequence[bytes]) -> list[tuple[int, list[int]]]:
        """Names of one slot each, by their places, as many as go into one command."""
        return [
            (slot, places[at : at + _MOST_KEYS])
            for slot, places in self._by_slot(found).items()
            for at in range(0, len(places), _MOST_KEYS)
        ]

    def _by_slot(self, found: Sequence[bytes]) -> dict[int, list[int]]:
        """Which of some names are in each hash slot, by their places."""
        if not self._topology.is_cluster:
            return {0: list(range(len(found)))} if found else {}
        groups: dict[int, list[int]] = defaultdict(list)
        for place, name in enumerate(found):
            groups[self._topology.slot(name)].append(place)
        return groups
