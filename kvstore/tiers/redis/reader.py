"""Reading: entries first, then the ranges of chunks that they name, straight into place."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from kvstore.errors import FormatError
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.redis.buckets import Buckets
from kvstore.tiers.redis.entries import Entries
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import ChunkHeader, decode_header
from kvstore.tiers.redis.format.entry import PageEntry
from kvstore.tiers.redis.loading import Load, Outcome
from kvstore.tiers.redis.net.batches import batches
from kvstore.tiers.redis.net.server import Request
from kvstore.tiers.redis.net.topology import Topology
from kvstore.tiers.tier import PageBytes

_READS = 2
"""How often a page is looked for: merging may take its chunk away between entry and chunk, and put another there."""


class Reader:
    """Safe for threads.

    Args:
        servers: where pages are.
        entries: of pages.
        buckets: of chunks.
        counts: counts what is read.
        timeout: seconds for each step.
    """

    def __init__(
        self, servers: Topology, entries: Entries, buckets: Buckets, counts: TierCounts, timeout: float
    ) -> None:
        self._servers = servers
        self._entries = entries
        self._buckets = buckets
        self._counts = counts
        self._timeout = timeout

    def read(self, keys: Sequence[bytes], into: Sequence[PageBytes]) -> list[int | None]:
        """See :meth:`kvstore.tiers.redis.RedisTier.read`."""
        answers: list[int | None] = [None] * len(keys)
        places: Sequence[int] = range(len(keys))
        corrupt = errors = 0
        for _ in range(_READS):
            loads, unanswered = self._locate(places, keys, into)
            errors += unanswered
            places = []
            for batch in batches(loads, [load.stored_bytes for load in loads]):
                for place, checksum, outcome in self.load(batch):
                    answers[place] = checksum
                    corrupt += outcome is Outcome.CORRUPT
                    if outcome is Outcome.GONE:
                        places.append(place)
            if not places:
                break
        missed = answers.count(None)
        self._counts.add(
            asked=len(keys),
            missed=missed,
            hit=len(keys) - missed,
            corrupt=corrupt,
            errors=errors,
            read_bytes=sum(len(array) for array, answer in zip(into, answers, strict=True) if answer is not None),
        )
        return answers

    def load(self, loads: Sequence[Load]) -> list[tuple[int, int | None, Outcome]]:
        """Read some chunks' pages. Says for each its place, its checksum, and what became of it."""
        deadline = time.monotonic() + self._timeout
        requests = []
        used: dict[int, list[bytes]] = defaultdict(list)
        for load in loads:
            ranges = load.ranges()
            for run in ranges:
                name = key_names.part_name(load.bucket, load.nonce, run.part)
                command = [b"GETRANGE", name, b"%d" % run.start, b"%d" % (run.start + run.length - 1)]
                last = load.sum_up if run is ranges[-1] else None
                requests.append(Request(self._servers.slot(name), command, run.views, last))
            used[load.bucket].append(load.nonce)
        touches = [self._buckets.touch(bucket, nonces) for bucket, nonces in used.items()]
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
            self._entries.forget(lost, deadline)
        if failed:
            self._counts.add(errors=failed)
        return out

    def header(self, entry: PageEntry, deadline: float) -> ChunkHeader | None:
        """The header of the chunk where a page is; None if there is none that can be read."""
        name = key_names.part_name(entry.bucket, entry.nonce, 0)
        command = [b"GETRANGE", name, b"0", b"%d" % (entry.header_bytes - 1)]
        [reply] = self._servers.exchange([Request(self._servers.slot(name), command)], deadline)
        try:
            return decode_header(reply) if isinstance(reply, bytes) else None
        except FormatError:
            return None

    def _locate(
        self, places: Sequence[int], keys: Sequence[bytes], into: Sequence[PageBytes]
    ) -> tuple[list[Load], int]:
        """Where some of a call's pages are, and how many of them no server would tell."""
        entries, unanswered = self._entries.find([keys[place] for place in places], time.monotonic() + self._timeout)
        loads: dict[bytes, Load] = {}
        for place, entry in zip(places, entries, strict=True):
            if entry is None or entry.length != len(into[place]):
                continue
            load = loads.get(entry.nonce)
            if load is None:
                load = loads[entry.nonce] = Load(entry)
            load.add(place, keys[place], entry, into[place])
        return list(loads.values()), unanswered
