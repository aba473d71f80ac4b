"""A fleet in discrete events: requests come, look their prefix up, load it, compute the rest, store and share it.

Each request is four events, by time: it *arrives* at the node that a router chose and looks up; its pages are *loaded*;
its prompt is *computed*, and what was new is stored in the arena; what Redis lacks is *shared*, and can be found there
once that is done. In between others change what is there, as in a real fleet.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvstore.catalog.policies import DEFAULT_POLICY, POLICIES
from kvstore.cli.plan import costs
from kvstore.cli.plan.arena import SimulatedArena
from kvstore.cli.plan.costs import Cost
from kvstore.cli.plan.parts import Part, Rates, Shard
from kvstore.cli.plan.routers import ROUTERS
from kvstore.cli.plan.shared import Chunk, SharedPages, server_of_bucket
from kvstore.cli.plan.workload import FleetRequest


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated."""

    nodes: int
    shards: int
    """Servers of Redis; 0: none."""
    arena_bytes: int
    """Of each node."""
    redis_bytes: int
    """Of all shards together."""
    block_bytes: int
    """KV cache of a block of the workload."""
    page_bytes: int
    """Of a page of the engines: a block is one page, or several."""
    block_tokens: int
    router: str = "random"
    objects: bool = False
    """Whether there is object storage, as large as need be."""
    rates: Rates = field(default_factory=Rates)
    seed: int = 1

    @property
    def pages_per_block(self) -> int:
        """How many pages of the engines a block of the workload is."""
        return max(1, self.block_bytes // self.page_bytes)


@dataclass(slots=True)
class Counts:
    """What happened in all nodes together, in blocks of the workload unless it says otherwise."""

    requests: int = 0
    blocks: int = 0
    arena_hits: int = 0
    redis_hits: int = 0
    object_hits: int = 0
    asked: int = 0
    """Looked up in Redis."""
    late: int = 0
    """Of these, told behind the deadline: misses."""
    stored: int = 0
    """In arenas, new ones."""
    shared: int = 0
    """Sent to Redis: some by several nodes that computed them at once."""
    unshared: int = 0
    """Not written, since Redis had more to do than it takes until a write's deadline."""
    tokens: int = 0
    """Of all prompts."""
    computed_tokens: int = 0
    events: int = 0
    """Pages that routers were told of, as they came or went."""


@dataclass(slots=True)
class Outcome:
    """What a simulation found."""

    fleet: Fleet
    counts: Counts
    seconds: float
    """That it went on for, in the workload's time."""
    shards: list[Shard]
    links: list[Part]
    """Of nodes."""
    engines: list[list[Part]]
    objects: Part
    router: Part
    redis: Cost
    """Of all nodes together."""

    def hit_ratio(self, hits: int) -> float:
        """Of all blocks."""
        return hits / max(1, self.counts.blocks)


class _Node:
    def __init__(self, fleet: Fleet) -> None:
        capacity = max(1, fleet.arena_bytes // fleet.block_bytes)
        self.arena = SimulatedArena(POLICIES[DEFAULT_POLICY](), capacity)
        self.link = Part()
        self.engines = [Part() for _ in range(fleet.rates.engines)]


class Simulation:
    """One run. Requests are given by time.

    Args:
        fleet: what is simulated.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._rates = fleet.rates
        self._nodes = [_Node(fleet) for _ in range(fleet.nodes)]
        self._now = 0.0
        self._router = ROUTERS[fleet.router](fleet.nodes, self._backlog, fleet.seed)
        self._shared = SharedPages(fleet.redis_bytes, fleet.block_bytes, fleet.shards) if fleet.shards else None
        self._shards = [Shard() for _ in range(fleet.shards)]
        self._archived: set[int] = set()
        self._objects, self._router_part = Part(), Part()
        self._counts = Counts()
        self._cost = Cost()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def run(self, requests: Iterable[FleetRequest], progress: Callable[[int], None] = lambda steps: None) -> Outcome:
        """Simulate all of them, and what follows."""
        last = 0.0
        for number, request in enumerate(requests, 1):
            self._advance(request.time)
            last = request.time
            self._arrive(request)
            if not number % 64:
                progress(64)
        self._advance(float("inf"))
        seconds = max(last, 1e-3)
        self._refreshes(seconds)
        return Outcome(
            self._fleet, self._counts, seconds, self._shards, [node.link for node in self._nodes],
            [node.engines for node in self._nodes], self._objects, self._router_part, self._cost,
        )  # fmt: skip

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._now = until

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _backlog(self, node: int) -> float:
        return max(0.0, min(engine.free_at for engine in self._nodes[node].engines) - self._now)

    # -- a request's way -----------------------------------------------------------------------------------------------

    def _arrive(self, request: FleetRequest) -> None:
        number = self._router.route(request)
        node, counts, blocks = self._nodes[number], self._counts, request.blocks
        counts.requests += 1
        counts.blocks += len(blocks)
        counts.tokens += request.tokens
        here = node.arena.prefix(blocks)
        ready = self._now
        hits = here
        if here < len(blocks) and self._shared is not None:
            missing = [block for block in blocks[here:] if block not in node.arena]
            counts.asked += len(missing)
            ready = self._look_up(missing)
            if ready - self._now > self._rates.lookup_deadline:
                counts.late += len(missing)
            else:
                while hits < len(blocks) and (blocks[hits] in node.arena or blocks[hits] in self._shared):
                    hits += 1
        redis = [block for block in blocks[here:hits] if block not in node.arena]
        counts.redis_hits += len(redis)
        counts.arena_hits += hits - len(redis)
        archived = hits
        while self._fleet.objects and archived < len(blocks) and blocks[archived] in self._archived:
            archived += 1
        counts.object_hits += archived - hits
        ready = self._load(node, redis, archived - hits, ready)
        self._at(ready, lambda: self._loaded(number, request, archived))

    def _loaded(self, number: int, request: FleetRequest, hits: int) -> None:
        node, counts = self._nodes[number], self._counts
        self._keep(number, request.blocks[:hits])
        node.arena.use(request.blocks[:hits])
        tokens = max(0, request.tokens - hits * self._fleet.block_tokens)
        counts.computed_tokens += tokens
        engine = min(node.engines, key=lambda part: part.free_at)
        done = engine.visit(self._now, tokens / self._rates.prefill_tokens, 1)
        self._at(done, lambda: self._computed(number, request))

    def _computed(self, number: int, request: FleetRequest) -> None:
        came = self._keep(number, request.blocks)
        self._counts.stored += len(came)
        if self._fleet.objects:
            new = [block for block in came if block not in self._archived]
            self._archived.update(new)
            size = len(new) * self._fleet.block_bytes
            self._objects.visit(self._now, size / self._rates.objects_bytes, len(new), size)
        if self._shared is not None:
            self._touch(request.blocks)
            self._share(number, request, came)

    def _keep(self, number: int, blocks: Sequence[int]) -> list[int]:
        came, left = self._nodes[number].arena.store(blocks)
        self._router.came(number, came)
        self._router.left(number, left)
        pages = (len(came) + len(left)) * self._fleet.pages_per_block
        self._counts.events += pages
        self._router_part.background(pages / self._rates.events, pages)
        return came

    # -- what is asked of shared parts ---------------------------------------------------------------------------------

    def _look_up(self, blocks: Sequence[int]) -> float:
        """Returns when all shards have answered."""
        found = sum(block in self._shared for block in blocks) if self._shared is not None else 0
        pages = self._fleet.pages_per_block
        shape = costs.typical_shape(len(blocks) * pages, self._fleet.page_bytes, 1, cluster=self._clustered)
        return self._spread(costs.lookup(shape, found * pages))

    def _load(self, node: _Node, redis: Sequence[int], objects: int, now: float) -> float:
        """Returns when what is in Redis and in objects has come."""
        if redis and self._shared is not None:
            ready = now
            for shard, cost in self._by_shard(self._shared.chunks_of(redis), costs.load, len(redis)).items():
                ready = max(ready, self._ask(shard, now, cost))
            now = max(ready, node.link.visit(now, len(redis) * self._fleet.block_bytes / self._rates.link_bytes))
            self._shared.touch(redis)
        if objects:
            size = objects * self._fleet.block_bytes
            came = self._objects.visit(now, size / self._rates.objects_bytes, objects, size)
            now = max(came, node.link.visit(now, size / self._rates.link_bytes)) + self._rates.objects_seconds
        return now

    def _touch(self, blocks: Sequence[int]) -> None:
        if self._shared is None:
            return
        here = [block for block in blocks if block in self._shared]
        self._shared.touch(here)
        if here:
            pages = len(here) * self._fleet.pages_per_block
            buckets = self._shared.buckets
            self._spread(
                costs.touch(costs.typical_shape(pages, self._fleet.page_bytes, buckets, cluster=self._clustered))
            )

    def _share(self, number: int, request: FleetRequest, came: Sequence[int]) -> None:
        if self._shared is None or not came:
            return
        new = [block for block in came if block not in self._shared]
        if len(new) < len(came):
            self._look_up([block for block in came if block not in new])
        if not new:
            return
        busy = max(self._nodes[number].link.free_at, *(shard.thread.free_at for shard in self._shards))
        if busy > self._now + self._rates.write_deadline:
            self._counts.unshared += len(new)
            return
        size = len(new) * self._fleet.block_bytes
        done = self._nodes[number].link.visit(self._now, size / self._rates.link_bytes, 1, size)
        self._at(done, lambda: self._written(request, new))

    def _written(self, request: FleetRequest, new: Sequence[int]) -> None:
        if self._shared is None:
            return
        late = [block for block in new if block in self._shared]  # another node was first: sent all the same
        made, merged = self._shared.write(request.blocks, new)
        made += [chunk for chunk in self._shared.chunks_of(late) if chunk not in made]
        self._counts.shared += len(new)
        for shard, cost in self._by_shard(made, costs.store, len(new)).items():
            self._ask(shard, self._now, cost)
        if merged:
            blocks = sum(len(chunk.blocks) for chunk in merged)
            for way in (costs.load, costs.store):
                for shard, cost in self._by_shard(merged, way, blocks).items():
                    self._ask(shard, self._now, cost)

    def _by_shard(self, chunks: Sequence[Chunk], way: Callable[[costs.Shape], Cost], blocks: int) -> dict[int, Cost]:
        """What a call for some chunks costs each shard: entries anywhere, data where its chunk is."""
        fleet = self._fleet
        if fleet.block_bytes > costs.CHUNK_BYTES:  # each block is many chunks, which lie anywhere
            buckets = self._shared.buckets if self._shared is not None else 1
            shape = costs.typical_shape(
                blocks * fleet.pages_per_block, fleet.page_bytes, buckets, cluster=self._clustered
            )
            return {shard: _part(way(shape), fleet.shards) for shard in range(fleet.shards)}
        held: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            held.setdefault(server_of_bucket(chunk.bucket, fleet.shards), []).append(chunk)
        found: dict[int, Cost] = {}
        for shard, some in held.items():
            pages = min(blocks, sum(len(chunk.blocks) for chunk in some))
            shape = costs.typical_shape(pages, fleet.block_bytes, 1, cluster=self._clustered)
            shape = shape._replace(buckets=len({chunk.bucket for chunk in some}))
            if len(shape.chunks) < len(some):
                each = max(1, pages // len(some))
                shape = shape._replace(chunks=(each,) * len(some))
            found[shard] = way(shape)
        return found

    @property
    def _clustered(self) -> bool:
        return self._fleet.shards > 1

    def _spread(self, cost: Cost) -> float:
        """Ask all shards for an even part, at once. Returns when the last one has answered."""
        part = _part(cost, self._fleet.shards)
        return max(self._ask(shard, self._now, part) for shard in range(self._fleet.shards))

    def _ask(self, shard: int, now: float, cost: Cost) -> float:
        self._cost += cost
        return self._shards[shard].ask(now, cost, self._rates)

    def _refreshes(self, seconds: float) -> None:
        """What nodes ask by themselves every few seconds."""
        if self._shared is None:
            return
        cost = costs.refresh(self._shared.buckets, self._fleet.nodes)
        times = self._fleet.nodes * seconds / costs.REFRESH_SECONDS
        for shard in self._shards:
            each = cost.commands / self._fleet.shards
            shard.thread.background(
                times * (self._rates.trip_seconds * cost.round_trips + each * self._rates.command_seconds),
                round(times * each),
            )


def _part(cost: Cost, shards: int) -> Cost:
    """One shard's part of what is spread over all. Each is asked as often as there are trips."""
    if shards == 1:
        return cost
    each = (cost.commands, cost.scripts, cost.sent_bytes, cost.received_bytes)
    return Cost(cost.round_trips, *(-(-number // shards) for number in each))
