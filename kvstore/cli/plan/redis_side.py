"""Redis in a simulation: what each call of a node asks of which shard, and how long that takes.

Entries lie where the hash slots of their pages are, chunks where those of their buckets are: so each shard is asked its
own part. A block of the workload is one page, or several with keys of their own, which lie on shards that follow each
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvstore import jitter
from kvstore.cli.plan import costs
from kvstore.cli.plan.call_shapes import Shape, typical_shape
from kvstore.cli.plan.costs import Cost
from kvstore.cli.plan.parts import Rates, Request, Shard
from kvstore.cli.plan.shared import Chunk, SharedPages, page_key, server_of_bucket
from kvstore.tiers.redis.format import key_names
from kvstore.tiers.redis.format.chunk import CHUNK_BYTES, pages_per_chunk
from kvstore.tiers.redis.tier import REFRESH_SECONDS

Way = Callable[[Shape], Cost]


def _found(shape: Shape) -> Cost:
    return costs.lookup(shape, shape.pages)


def _missed(shape: Shape) -> Cost:
    return costs.lookup(shape, 0)


def _released(shape: Shape) -> Cost:
    return costs.release(len(shape.chunks), shape.buckets)


class Write(NamedTuple):
    """A write under way."""

    prompt: Sequence[int]
    blocks: list[int]
    """That were offered, but for those that others are sending."""
    chunks: list[Chunk]
    """That it sends: made of those that were not there when it began."""


class Claimed(NamedTuple):
    """Another node is sending these blocks."""

    prompt: Sequence[int]
    chunk: Chunk
    """That would have had them."""
    over: float
    """Until when it may, at the most."""


class RedisSide:
    """The shards, and what all nodes ask of them.

    Args:
        shards: how many servers.
        limit_bytes: of all of them together.
        block_bytes: of a block of the workload.
        page_bytes: of a page.
        rates: how fast they are.
    """

    def __init__(self, shards: int, limit_bytes: int, block_bytes: int, page_bytes: int, rates: Rates) -> None:
        self.pages = SharedPages(limit_bytes, block_bytes)
        self.shards = [Shard() for _ in range(shards)]
        self._requests: dict[tuple[Way, int | Shape], Request] = {}
        self._beside = Cost()
        self._thread_seconds = 0.0
        """Of all shards, for what was asked so far."""
        self._writing = 0.0
        """Of these, for writes, of ``_written`` blocks."""
        self._written = 0
        self._sending: dict[int, float] = {}
        """By its first block: a chunk that some node has claimed, and until when at the most."""
        self._page_bytes = page_bytes
        self._pages_per_block = max(1, block_bytes // page_bytes)
        self._chunks_per_block = block_bytes // CHUNK_BYTES if block_bytes > CHUNK_BYTES else 0
        """Of blocks that are many chunks."""
        self._rates = rates
        self._agreement = [
            (server_of_name(name, shards), Request.of(cost, rates))
            for name, cost in zip((key_names.BUCKETS, key_names.FORMAT), costs.agreement(), strict=True)
        ]

    @property
    def cost(self) -> Cost:
        """What all nodes together have asked."""
        asked = [*self._requests.values(), *(request for _, request in self._agreement)]
        return sum((request.cost * request.times for request in asked), self._beside)

    @property
    def _clustered(self) -> bool:
        return len(self.shards) > 1

    @property
    def write_seconds(self) -> float:
        """What a block that is offered takes of all shards' threads, on average so far: to look, to send, to evict."""
        return self._writing / max(1, self._written)

    # -- calls, each with the time when it begins; they return when all shards have answered --------------------------

    def look_up(self, now: float, blocks: Sequence[int]) -> float:
        """``contains``."""
        here = [block for block in blocks if block in self.pages]
        if not here:
            return self._entries(now, blocks, _missed)
        if len(here) == len(blocks):
            return self._entries(now, blocks, _found)
        away = [block for block in blocks if block not in self.pages]
        return max(self._entries(now, here, _found), self._entries(now, away, _missed))

    def load(self, now: float, blocks: Sequence[int]) -> float:
        """A load of blocks that are here: it looks them up again, then ``read``."""
        looked = self._entries(now, blocks, _found)
        found = self._entries(looked, blocks, costs.load_entries)
        read = self._chunks(found, self.pages.chunks_of(blocks), blocks, costs.load_chunks)
        self.pages.touch(blocks)
        return read

    def touch(self, now: float, blocks: Sequence[int]) -> tuple[float, list[int]]:
        """Pages were used in arenas. Returns when that is done as well, and which are not here."""
        here = [block for block in blocks if block in self.pages]
        renewed = self._entries(now, blocks, costs.touch_entries)
        done = self._chunks(renewed, self.pages.chunks_of(here), here, costs.touch_chunks)
        self.pages.touch(here)
        return done, [block for block in blocks if block not in self.pages]

    def begin_write(
        self, now: float, offered: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> tuple[float, list[Write], list[Claimed]]:
        """``offer`` of blocks of some prompts: what is not here is sent, unless another node is sending it. It is here
        once :meth:`end_write` says so."""
        before = self._thread_seconds
        done, writes, claims = self._begin_write(now, offered)
        self._writing += self._thread_seconds - before
        self._written += sum(len(write.blocks) for write in writes)
        return done, writes, claims

    def _begin_write(
        self, now: float, offered: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> tuple[float, list[Write], list[Claimed]]:
        writes, claims = [], []
        for prompt, blocks in offered:
            chunks, others = [], []
            for chunk in self.pages.plan(prompt, blocks):
                over = self._sending.get(chunk.blocks[0], now)
                if over <= now:
                    chunks.append(chunk)
                else:
                    others.append(Claimed(prompt, chunk, over))
            awaited = {block for claim in others for block in claim.chunk.blocks}
            writes.append(Write(prompt, [block for block in blocks if block not in awaited], chunks))
            claims += others
        for shard, request in self._agreement:
            self._ask(shard, now, request)
        present = [block for write in writes for block in write.blocks if block in self.pages]
        new = [block for write in writes for chunk in write.chunks for block in chunk.blocks]
        looked = now
        if present:
            looked = self._entries(now, present, _found)
            looked = self._chunks(looked, self.pages.chunks_of(present), present, costs.touch_chunks)
            self.pages.touch(present)
        if claims:
            looked = max(looked, self._entries(now, [block for each in claims for block in each.chunk.blocks], _missed))
            looked = self._chunks(looked, [claim.chunk for claim in claims], [], costs.claimed)
        if not new:
            return looked, writes, claims
        chunks = [chunk for write in writes for chunk in write.chunks]
        sent = self._chunks(looked, chunks, new, costs.store_chunks)
        over = looked + self._rates.write_deadline
        self._sending.update((chunk.blocks[0], over) for chunk in chunks)
        return self._entries(sent, new, costs.store_entries), writes, claims

    def look_at_claim(self, now: float, claimed: Claimed) -> bool:
        """Whether others have sent that, or their time is over."""
        self._chunks(now, [claimed.chunk], [], costs.look_at_claims)
        return claimed.over <= now or claimed.chunk.blocks[0] not in self._sending

    def end_write(self, now: float, write: Write) -> int:
        """Its entries are put where none stand, and fragments are merged. Returns how many of its blocks are here."""
        before = self._thread_seconds
        here = self._end_write(now, write)
        self._writing += self._thread_seconds - before
        return here

    def _end_write(self, now: float, write: Write) -> int:
        gone, lost = [], []
        for chunk in write.chunks:
            self._sending.pop(chunk.blocks[0], None)
            gone += self.pages.admit(chunk)
            if chunk.live < len(chunk.blocks):
                lost.append(chunk)
        if lost:
            self._chunks(now, lost, [], _released)
            unplaced = [block for chunk in lost for block in chunk.blocks]
            self._entries(now, unplaced, _found)
        for chunk in write.chunks:
            merged = self.pages.compact(chunk)
            if merged is None:
                continue
            read = [block for fragment in merged.fragments for block in fragment.blocks]
            self._chunks(now, merged.fragments, read, costs.read_back)
            self._entries(now, [merged.fragments[0].blocks[0]], _found)
            self._chunks(now, [merged.whole], merged.whole.blocks, costs.store_chunks)
            self._entries(now, merged.whole.blocks, costs.repoint)
            parts = [*merged.fragments, chunk]
            self._chunks(now, parts, [], _released)
            gone += merged.left
        if gone:
            self._chunks(now, gone, [], costs.evicted)
        for chunk in gone:
            self._entries(now, chunk.blocks, costs.forget)
        return sum(block in self.pages for block in write.blocks)

    def busy_until(self) -> float:
        """When the busiest shard will be done with what it was asked."""
        return max(shard.thread.free_at for shard in self.shards)

    def refreshes(self, nodes: int, seconds: float) -> None:
        """What nodes ask by themselves every few seconds: each looks at the summaries, one makes them."""
        pause = jitter.MEAN * REFRESH_SECONDS
        made = REFRESH_SECONDS + pause / nodes / 2  # they are missed by the next node that looks
        part = len(self.shards)
        for cost, times in (
            (costs.look(self.pages.buckets), nodes * seconds / pause),
            (costs.ask(self.pages.buckets), seconds / made),
        ):
            self._beside += Cost(*(round(number * times) for number in cost.numbers()))
            each = cost.commands / part
            for shard in self.shards:
                busy = self._rates.trip_seconds * cost.round_trips + each * self._rates.command_seconds
                size = (cost.sent_bytes + cost.received_bytes) / part
                shard.thread.background(times * busy, round(times * each), round(times * size))

    # -- which shard is asked what ------------------------------------------------------------------------------------

    def _entries(self, now: float, blocks: Sequence[int], way: Way) -> float:
        """Ask each shard for the entries that it has."""
        done = now
        requests = self._requests
        for shard, pages in enumerate(self._pages_by_shard(blocks)):
            if pages:
                request = requests.get((way, pages))
                if request is None:
                    shape = typical_shape(pages, self._page_bytes, 1, cluster=self._clustered)
                    request = requests[way, pages] = Request.of(way(shape), self._rates)
                done = max(done, self._ask(shard, now, request))
        return done

    def _pages_by_shard(self, blocks: Sequence[int]) -> list[int]:
        shards, each = len(self.shards), self._pages_per_block
        counts = [0] * shards
        if shards == 1:
            return [len(blocks) * each]
        whole, rest = divmod(each, shards)
        for block in blocks:
            counts[server_of_entry(block, shards)] += 1
        if each == 1:
            return counts
        return _spread(counts, rest, whole * len(blocks))

    def _chunks(self, now: float, chunks: Sequence[Chunk], blocks: Sequence[int], way: Way) -> float:
        """Ask each shard what regards its chunks; of their blocks only ``blocks``, or all if there are none."""
        done = now
        for shard, shape in self._shapes(chunks, blocks):
            request = self._requests.get((way, shape))
            if request is None:
                request = self._requests[way, shape] = Request.of(way(shape), self._rates)
            done = max(done, self._ask(shard, now, request))
        return done

    def _ask(self, shard: int, now: float, request: Request) -> float:
        self._thread_seconds += request.thread_seconds
        return self.shards[shard].ask(now, request)

    def _shapes(self, chunks: Sequence[Chunk], blocks: Sequence[int]) -> list[tuple[int, Shape]]:
        size = self._page_bytes
        shards = len(self.shards)
        if self._chunks_per_block:  # they lie anywhere
            each = self._chunks_per_block
            counts = [0] * shards
            for chunk in chunks:
                counts[server_of_bucket(chunk.bucket, shards)] += 1
            whole, rest = divmod(each, shards)
            counts = _spread(counts, rest, whole * len(chunks))
            pages = pages_per_chunk(size)
            return [(shard, _chunks_of(number, pages, size)) for shard, number in enumerate(counts) if number]
        wanted = set(blocks)
        held: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for chunk in chunks:
            number = sum(block in wanted for block in chunk.blocks) if wanted else len(chunk.blocks)
            held[server_of_bucket(chunk.bucket, shards)].append((chunk.bucket, number * self._pages_per_block))
        return [
            (shard, Shape(sum(pages for _, pages in some), size, tuple(pages for _, pages in some),
                          len({bucket for bucket, _ in some}), 0, 0))
            for shard, some in held.items()
        ]  # fmt: skip


@lru_cache(4096)
def _chunks_of(number: int, pages: int, page_bytes: int) -> Shape:
    return Shape(pages * number, page_bytes, (pages,) * number, number, 0, 0)


def _spread(starts: Sequence[int], length: int, base: int) -> list[int]:
    """How many fall on each of some places in a ring, where so many runs of one length begin at each, beside a base."""
    places = len(starts)
    steps = [0] * (2 * places + 1)
    for place, number in enumerate(starts):
        if number:
            steps[place] += number
            steps[place + length] -= number
    sums = list(accumulate(steps))
    return [base + sums[place] + sums[place + places] for place in range(places)]


def server_of_name(name: bytes, servers: int) -> int:
    """Which of some servers has a name, where each has as many neighbouring hash slots."""
    return key_slot(name) * servers // REDIS_CLUSTER_HASH_SLOTS


@lru_cache(1 << 16)
def server_of_entry(block: int, servers: int) -> int:
    """Which of some servers has the entry of a block's first page."""
    return server_of_name(key_names.page_name(page_key(block)), servers)
