"""Writing pages: what is not here yet goes into chunks, and then entries show it to everybody."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvstore.hashing import HASH_BYTES
from kvstore.jitter import jittered
from kvstore.tiers.redis.buckets import EvictedChunk
from kvstore.tiers.redis.chunk_writer import ChunkWriter
from kvstore.tiers.redis.compaction import Compaction
from kvstore.tiers.redis.context import Context
from kvstore.tiers.redis.entries import placed
from kvstore.tiers.redis.format.entry import PageEntry, decode
from kvstore.tiers.redis.format.new_chunk import NewChunk
from kvstore.tiers.redis.format.planning import NewPage, cut_smaller, plan_chunks, positions
from kvstore.tiers.redis.net.connection import Request
from kvstore.tiers.redis.net.resp import ServerError
from kvstore.tiers.redis.net.server import batches
from kvstore.tiers.tier import CLAIM_PAUSE, LONGEST_CLAIM_PAUSE, Claim, Offered, PageWrite

_ATTEMPTS = 4
"""To write what others had claimed, and did not send in time."""


class _Seen(NamedTuple):
    """What was in Redis when a write began."""

    entries: dict[bytes, PageEntry]
    """Of pages, and of those before them."""
    stale: dict[bytes, bytes]
    """What stood under pages' names and leads to no page: it may be replaced."""
    here: dict[bytes, set[bytes]]
    """Which pages are here, by their chunks' nonces."""
    unanswered: set[bytes]
    """Pages of which no server would tell."""


class _Known(NamedTuple):
    """What became of pages so far."""

    here: dict[bytes, set[bytes]]
    """Keys of pages, by their chunks' nonces."""
    others: set[bytes]
    """Keys of pages that somebody else stored meanwhile."""
    evicted: set[bytes]
    """Keys of pages that were here during the call."""

    def all_here(self) -> set[bytes]:
        """The keys of what is here."""
        return self.others.union(*self.here.values())


class Writer:
    """Safe for threads, and for several nodes at once."""

    def __init__(self, context: Context, chunks: ChunkWriter, compaction: Compaction) -> None:
        self._context = context
        self._topology = context.topology
        self._entries = context.entries
        self._buckets = context.buckets
        self._counts = context.counts
        self._chunks = chunks
        self._compaction = compaction

    def write(self, pages: Sequence[PageWrite]) -> list[bool]:
        """See :meth:`kvstore.tiers.redis.RedisTier.write`.

        What others are sending is waited for, and sent in the end if they did not.
        """
        first, left = _each_once(pages)
        known = _Known({}, set(), set())
        looked: frozenset[bytes] = frozenset()
        for attempt in range(_ATTEMPTS):
            claims = self._write_unclaimed(left, first, known, looked) if left else []
            if not claims or attempt == _ATTEMPTS - 1:
                break
            self._wait_for(claims)
            here = known.all_here()
            left = [page for page in left if page.key not in here]
            looked = frozenset(page.key for page in left)
        return self._answers(pages, known)

    def offer(self, pages: Sequence[PageWrite], looked: Collection[bytes]) -> Offered:
        """See :meth:`kvstore.tiers.redis.RedisTier.offer`."""
        first, wanted = _each_once(pages)
        known = _Known({}, set(), set())
        claims = self._write_unclaimed(wanted, first, known, looked) if wanted else []
        here = known.all_here()
        claims = [claim._replace(keys=[key for key in claim.keys if key not in here]) for claim in claims]
        return Offered(self._answers(pages, known, {key for claim in claims for key in claim.keys}), claims)

    def ended(self, claims: Sequence[bytes]) -> list[bool]:
        """See :meth:`kvstore.tiers.redis.RedisTier.ended`."""
        asked = [Request(self._topology.slot(name), [b"GET", name]) for name in claims]
        return [holder in (None, b"") for holder in self._topology.exchange(asked, self._context.deadline())]

    def _answers(self, pages: Sequence[PageWrite], known: _Known, awaited: Collection[bytes] = ()) -> list[bool]:
        here = known.all_here()
        answers = [page.key in here for page in pages]
        unsaid = [page.key for page, stored in zip(pages, answers, strict=True) if not stored]
        self._counts.add(refused=sum(key not in known.evicted and key not in awaited for key in unsaid))
        return answers

    def _write_unclaimed(
        self, wanted: Sequence[PageWrite], first: Mapping[bytes, PageWrite], known: _Known, looked: Collection[bytes]
    ) -> list[Claim]:
        """Store what is not here, unless others are sending it: that is returned.

        Args:
            wanted: pages.
            first: all pages of the call, by key.
            known: gets what becomes of each page.
            looked: the keys of pages that were claimed by others when they were tried before.
        """
        here, others, evicted = known
        seen = self._look(wanted)
        for nonce, some in seen.here.items():
            here.setdefault(nonce, set()).update(some)
        chunks = self._buckets.fitting(self._build(wanted, seen))
        claims: list[Claim] = []
        for batch in batches(chunks, [sum(chunk.header.stored) for chunk in chunks]):
            gone, elsewhere = self._store(batch, seen.stale, here, claims, looked)
            others |= elsewhere
            for chunk in gone:  # what was here at first may have been evicted for the rest of this very call
                evicted |= here.pop(chunk.nonce, set())
        for new in chunks:
            if new.header.nonce in here and self._compaction.is_due(new.header):
                entry = seen.entries.get(new.header.namespace + new.header.parent)
                for chunk in self._compaction.compact(new, first, entry) if entry is not None else []:
                    evicted |= here.pop(chunk.nonce, set())
        return claims

    def _wait_for(self, claims: Sequence[Claim]) -> None:
        """Wait until others have ended their claims, or their time is over.

        Entries are no sign: those of a chunk's pages are put on several servers, and who sees some sends the rest.
        """
        end = time.monotonic() + max(claim.seconds for claim in claims)
        missing = [claim.name for claim in claims]
        pause = CLAIM_PAUSE
        while missing and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, jittered(pause)))  # or all who wait would ask at once
            pause = min(2 * pause, LONGEST_CLAIM_PAUSE)
            missing = [name for name, ended in zip(missing, self.ended(missing), strict=True) if not ended]

    def _look(self, wanted: Sequence[PageWrite]) -> _Seen:
        """What of some pages is here. It counts as used."""
        deadline = self._context.deadline()
        keys = dict.fromkeys(page.key for page in wanted)
        asked = [*keys, *dict.fromkeys(page.parent for page in wanted if page.parent and page.parent not in keys)]
        raw, agreed = self._entries.seen(asked, deadline, *self._buckets.agreement())
        self._buckets.agreed(agreed)
        if self._buckets.newer:
            return _Seen({}, {}, {}, set(asked))  # as if no server had answered: nothing is written
        entries = {key: entry for key, value in zip(asked, raw, strict=True) if (entry := decode(value)) is not None}
        unanswered = {key for key, value in zip(asked, raw, strict=True) if isinstance(value, ServerError)}
        if unanswered:
            self._counts.add(errors=1)
        lengths = {page.key: len(page.payload) for page in wanted}
        stored = {key: entries[key] for key in keys if key in entries and entries[key].length == lengths[key]}
        touched = self._buckets.touch_chunks_of(stored, deadline)
        here = {nonce: set(some) for nonce, some, found in touched if found == 1}
        found = set().union(*here.values())
        stale = {
            key: value for key, value in zip(asked, raw, strict=True) if isinstance(value, bytes) and key not in found
        }
        return _Seen(entries, stale, here, unanswered)

    def _build(self, wanted: Sequence[PageWrite], seen: _Seen) -> list[NewChunk]:
        """Chunks of those pages that are not here."""
        skipped = seen.unanswered.union(*seen.here.values())
        known = {key: entry.position for key, entry in seen.entries.items()}
        at = positions([page.key for page in wanted], [page.parent for page in wanted], known)
        new = [(page, position) for page, position in zip(wanted, at, strict=True) if page.key not in skipped]
        chunks = []
        for whole in plan_chunks([NewPage(page.key, len(page.payload), position) for page, position in new]):
            page = new[whole.start][0]
            share = self._buckets.share_of(page.key[:-HASH_BYTES])
            for cut in cut_smaller(whole, share.pages_at_once(len(page.payload))):
                page, position = new[cut.start]
                some = [page for page, _ in new[cut.start : cut.stop]]
                chunks.append(self._chunks.build(some, position, page.parent))
        return chunks

    def _store(
        self,
        batch: Sequence[NewChunk],
        stale: Mapping[bytes, bytes],
        here: dict[bytes, set[bytes]],
        claims: list[Claim],
        looked: Collection[bytes],
    ) -> tuple[list[EvictedChunk], set[bytes]]:
        """Write chunks, then the entries of their pages, the first one for a page wins; delete those of evicted ones.

        Args:
            batch: of chunks.
            stale: what was seen under pages' names, and may be replaced.
            here: gets the pages of each chunk whose entries were put.
            claims: gets what others are sending, or placed since this writer looked.
            looked: see :meth:`_write_unclaimed`.

        Returns:
            Which chunks were evicted, and the keys of pages that somebody else stored meanwhile.
        """
        deadline = self._context.deadline()
        admitted, evicted, sending = self._chunks.admit(batch, deadline, looked)
        claims += sending
        deletions = list(self._entries.deletions(evicted))
        placing = self._entries.placing(admitted, stale)
        requests = [*deletions, *(request for request, _ in placing)]
        replies = self._topology.exchange(requests, deadline, writing=True)[len(deletions) :]
        self._topology.exchange(
            self._buckets.end_claims(admitted), deadline, writing=True
        )  # who looks now finds entries
        unplaced: list[bytes] = []
        gone: dict[tuple[int, bytes], int] = defaultdict(int)
        stored = written_bytes = 0
        for (_, pages), reply in zip(placing, replies, strict=True):
            for (chunk, key, length), done in zip(pages, placed(reply) or "", strict=False):
                if done == "1":
                    here.setdefault(chunk.header.nonce, set()).add(key)
                    stored += 1
                    written_bytes += length
                    old = decode(stale.get(key))
                    if old is not None:
                        gone[old.bucket, old.nonce] += 1  # if it is still there at all
                else:
                    unplaced.append(key)
                    gone[chunk.bucket, chunk.header.nonce] += 1
        self._buckets.release(gone, deadline)
        self._counts.add(stored=stored, written_bytes=written_bytes)
        entries, _ = self._entries.find(unplaced, deadline)
        return evicted, {key for key, entry in zip(unplaced, entries, strict=True) if entry is not None}


def _each_once(pages: Sequence[PageWrite]) -> tuple[dict[bytes, PageWrite], list[PageWrite]]:
    """Pages that have bytes, by key, and in their order."""
    first = {page.key: page for page in reversed(pages) if len(page.payload)}
    return first, [first[key] for key in dict.fromkeys(page.key for page in pages) if key in first]
