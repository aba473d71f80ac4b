"""Writing: what is not here yet goes into chunks, and then its entries show it to everybody."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.hashing import HASH_BYTES
from kvstore.tiers.counters import TierCounts
from kvstore.tiers.redis.admission import Admission
from kvstore.tiers.redis.buckets import Buckets, Left
from kvstore.tiers.redis.chunk_builder import ChunkBuilder
from kvstore.tiers.redis.compaction import Compaction
from kvstore.tiers.redis.entries import Entries, placed
from kvstore.tiers.redis.format.entry import PageEntry, decode
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.format.planning import (
    NewPage,
    cut_smaller,
    plan_chunks,
    positions,
)
from kvstore.tiers.redis.net.batches import batches
from kvstore.tiers.redis.net.resp import ServerError
from kvstore.tiers.redis.net.topology import Topology
from kvstore.tiers.tier import PageWrite


class _Seen(NamedTuple):
    """What was in Redis when a write began."""

    entries: dict[bytes, PageEntry]
    """Of pages, and of those before them."""
    useless: dict[bytes, bytes]
    """What stood under pages' names and is of no use."""
    brought: dict[bytes, set[bytes]]
    """Which pages are here, by their chunks' nonces."""
    silent: set[bytes]
    """Pages of which no server would tell."""


class Writer:
    """Safe for threads.

    Args:
        servers: where pages go.
        entries: of pages.
        buckets: of chunks.
        maker: makes chunks.
        admission: writes them.
        rows: merges them.
        counts: counts what is stored.
        timeout: seconds for each step.
    """

    def __init__(
        self,
        servers: Topology,
        entries: Entries,
        buckets: Buckets,
        maker: ChunkBuilder,
        admission: Admission,
        rows: Compaction,
        counts: TierCounts,
        timeout: float,
    ) -> None:
        self._servers = servers
        self._entries = entries
        self._buckets = buckets
        self._maker = maker
        self._admission = admission
        self._rows = rows
        self._counts = counts
        self._timeout = timeout

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """See :meth:`kvstore.tiers.redis.RedisTier.write`."""
        first = {page.key: page for page in reversed(pages) if len(page.payload)}
        wanted = [first[key] for key in dict.fromkeys(page.key for page in pages) if key in first]
        here, pushed_out = self._write(wanted, first) if wanted else (set(), set())
        answers = [page.key in here for page in pages]
        self._counts.add(refused=sum(page.key not in here and page.key not in pushed_out for page in pages))
        return answers

    def _write(self, wanted: Sequence[PageWrite], first: Mapping[bytes, PageWrite]) -> tuple[set[bytes], set[bytes]]:
        """Store what is not here. Returns the keys of what is here now, and of what was here during the call."""
        seen = self._look(wanted)
        brought = seen.brought
        made = self._buckets.fitting(self._chunks(wanted, seen))
        others: set[bytes] = set()
        pushed_out: set[bytes] = set()
        for batch in batches(made, [sum(chunk.header.stored) for chunk in made]):
            left, elsewhere = self._store(batch, seen.useless, brought)
            others |= elsewhere
            for gone in left:  # what was here at first may have had to make room for the rest of this very call
                pushed_out |= brought.pop(gone.nonce, set())
        for chunk in made:
            if chunk.header.nonce in brought and self._rows.are_filled_by(chunk.header):
                entry = seen.entries.get(chunk.header.namespace + chunk.header.parent)
                for gone in self._rows.merge(chunk, first, entry) if entry is not None else []:
                    pushed_out |= brought.pop(gone.nonce, set())
        return others.union(*brought.values()), pushed_out

    def _look(self, wanted: Sequence[PageWrite]) -> _Seen:
        """What of some pages is here. It counts as used."""
        deadline = time.monotonic() + self._timeout
        keys = dict.fromkeys(page.key for page in wanted)
        asked = [*keys, *dict.fromkeys(page.parent for page in wanted if page.parent and page.parent not in keys)]
        raw, agreed = self._entries.seen(asked, deadline, *self._buckets.agreement())
        self._buckets.agreed(agreed)
        if self._buckets.newer:
            return _Seen({}, {}, {}, set(asked))  # as if no server had answered: nothing is written
        entries = {key: entry for key, value in zip(asked, raw, strict=True) if (entry := decode(value)) is not None}
        silent = {key for key, value in zip(asked, raw, strict=True) if isinstance(value, ServerError)}
        if silent:
            self._counts.add(errors=1)
        lengths = {page.key: len(page.payload) for page in wanted}
        stored = {key: entries[key] for key in keys if key in entries and entries[key].length == lengths[key]}
        touched = self._buckets.touch_chunks_of(stored, deadline)
        brought = {nonce: set(some) for nonce, some, found in touched if found == 1}
        here = set().union(*brought.values())
        useless = {key: value for key, value in zip(asked, raw, strict=True) if isinstance(value, bytes)}
        return _Seen(entries, {key: value for key, value in useless.items() if key not in here}, brought, silent)

    def _chunks(self, wanted: Sequence[PageWrite], seen: _Seen) -> list[NewChunk]:
        """Chunks of those pages that are not here."""
        skipped = seen.silent.union(*seen.brought.values())
        known = {key: entry.position for key, entry in seen.entries.items()}
        at = positions([page.key for page in wanted], [page.parent for page in wanted], known)
        new = [(page, position) for page, position in zip(wanted, at, strict=True) if page.key not in skipped]
        made = []
        for whole in plan_chunks([NewPage(page.key, len(page.payload), position) for page, position in new]):
            page = new[whole.start][0]
            share = self._buckets.share_of(page.key[:-HASH_BYTES])
            for cut in cut_smaller(whole, share.pages_at_once(len(page.payload))):
                page, position = new[cut.start]
                made.append(self._maker.chunk([page for page, _ in new[cut.start : cut.stop]], position, page.parent))
        return made

    def _store(
        self, batch: Sequence[NewChunk], useless: Mapping[bytes, bytes], brought: dict[bytes, set[bytes]]
    ) -> tuple[list[Left], set[bytes]]:
        """Write chunks, then the entries of their pages, the first one for a page wins; delete those of what left.

        Args:
            batch: of chunks.
            useless: what was seen under pages' names, and is of no use.
            brought: gets which pages each chunk brought in.

        Returns:
            Which chunks made room, and the keys of pages that somebody else stored meanwhile.
        """
        deadline = time.monotonic() + self._timeout
        standing, left = self._admission.admit(batch, deadline)
        deletions = list(self._entries.deletions(left))
        placing = self._entries.placing(standing, useless)
        requests = [*deletions, *(request for request, _ in placing)]
        replies = self._servers.exchange(requests, deadline, writing=True)[len(deletions) :]
        unplaced: list[bytes] = []
        gone: dict[tuple[int, bytes], int] = defaultdict(int)
        stored = written_bytes = 0
        for (_, pages), reply in zip(placing, replies, strict=True):
            for (chunk, key, length), done in zip(pages, placed(reply) or "", strict=False):
                if done == "1":
                    brought.setdefault(chunk.header.nonce, set()).add(key)
                    stored += 1
                    written_bytes += length
                    old = decode(useless.get(key))
                    if old is not None:
                        gone[old.bucket, old.nonce] += 1  # if it is still there at all
                else:
                    unplaced.append(key)
                    gone[chunk.bucket, chunk.header.nonce] += 1
        self._buckets.release(gone, deadline)
        self._counts.add(stored=stored, written_bytes=written_bytes)
        entries, _ = self._entries.find(unplaced, deadline)
        return left, {key for key, entry in zip(unplaced, entries, strict=True) if entry is not None}
