"""A fleet in discrete events: requests come, look their prefix up, load it, compute the rest, store and share it.

Each request is four events, by time: it *arrives* at the node that a router chose and looks up; its pages are *loaded*;
its prompt is *computed*, and what was new is stored in the arena; what Redis lacks is *shared*, and can be found there
once that is done. In between others change what is there, as in a real fleet.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvstore import jitter
from kvstore.catalog.policies import DEFAULT_POLICY, POLICIES
from kvstore.cli.plan.arena import SimulatedArena
from kvstore.cli.plan.costs import Cost
from kvstore.cli.plan.parts import Part, Rates, Shard
from kvstore.cli.plan.redis_side import Claimed, RedisSide, Write
from kvstore.cli.plan.routers import ROUTERS
from kvstore.cli.plan.sharing import Sharing
from kvstore.cli.plan.workload import FleetRequest
from kvstore.tiers.tier import CLAIM_PAUSE, LONGEST_CLAIM_PAUSE

_GOLDEN = 0.6180339887
"""Multiples of it are spread evenly over a circle."""


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
    evicted: int = 0
    """From arenas."""
    shared: int = 0
    """Offered to Redis, and there then: some of them by several nodes."""
    sent: int = 0
    """To Redis: what several nodes computed at once is sent by the first one, mostly."""
    redis_evicted: int = 0
    """From Redis."""
    unshared: int = 0
    """Not in Redis: it had more to do than it takes until a write's deadline, or they left the arena before."""
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
    by_then: Counts
    """Of them, what had happened when the last request came."""
    seconds: float
    """Until the last request came, in the workload's time: what parts did until then is in their figures."""
    shards: list[Shard]
    links: list[Part]
    """Of nodes."""
    engines: list[list[Part]]
    objects: Part
    router: Part
    redis: Cost
    """Of all nodes together."""
    unasked: int = 0
    """Blocks that were new, and of which Redis was not asked until the last request came: passed over, given up, or
    waiting still."""
    write_seconds: float = 0.0
    """What a block that is offered to Redis takes of all its shards' threads, on average."""

    def hit_ratio(self, hits: int) -> float:
        """Of all blocks."""
        return hits / max(1, self.counts.blocks)


class _Node:
    def __init__(self, fleet: Fleet) -> None:
        capacity = max(1, fleet.arena_bytes // fleet.block_bytes)
        self.arena = SimulatedArena(POLICIES[DEFAULT_POLICY](), capacity)
        self.link = Part()
        self.sharing = Sharing(fleet.arena_bytes, fleet.block_bytes, fleet.pages_per_block)
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
        self._redis = (
            RedisSide(fleet.shards, fleet.redis_bytes, fleet.block_bytes, fleet.page_bytes, fleet.rates)
            if fleet.shards
            else None
        )
        self._archived: set[int] = set()
        self._turned_away = 0
        """Blocks that were to be offered to Redis, and were not."""
        self._objects, self._router_part = Part(), Part()
        self._counts = Counts()
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
        self._advance(last)
        seconds = max(last, 1e-3)
        if self._redis is not None:
            self._redis.refreshes(self._fleet.nodes, seconds)
        parts, by_then = copy.deepcopy(self._parts()), copy.copy(self._counts)  # what follows is no load of theirs
        unasked = self._turned_away + sum(len(node.sharing) for node in self._nodes)
        self._advance(float("inf"))
        cost = Cost()
        write_seconds = 0.0
        if self._redis is not None:
            self._counts.redis_evicted = self._redis.pages.evicted
            cost, write_seconds = self._redis.cost, self._redis.write_seconds
        return Outcome(self._fleet, self._counts, by_then, seconds, *parts, cost, unasked, write_seconds)

    def _parts(self) -> tuple[list[Shard], list[Part], list[list[Part]], Part, Part]:
        shards = self._redis.shards if self._redis is not None else []
        links, engines = [node.link for node in self._nodes], [node.engines for node in self._nodes]
        return shards, links, engines, self._objects, self._router_part

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
        if here < len(blocks) and self._redis is not None:
            missing = [block for block in blocks[here:] if block not in node.arena]
            counts.asked += len(missing)
            ready = self._redis.look_up(self._now, missing)
            if ready - self._now > self._rates.lookup_deadline:
                counts.late += len(missing)
                ready = self._now + self._rates.lookup_deadline
            else:
                while hits < len(blocks) and (blocks[hits] in node.arena or blocks[hits] in self._redis.pages):
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
        node = self._nodes[number]
        self._keep(number, request.blocks[:hits])
        node.arena.use(request.blocks[:hits])
        node.sharing.use(request.blocks, hits)
        self._share_soon(number)
        tokens = max(0, request.tokens - hits * self._fleet.block_tokens)
        engine = min(node.engines, key=lambda part: part.free_at)
        done = engine.visit(self._now, tokens / self._rates.prefill_tokens, 1)
        self._at(done, lambda: self._computed(number, request, hits, tokens))

    def _computed(self, number: int, request: FleetRequest, hits: int, tokens: int) -> None:
        self._counts.computed_tokens += tokens
        came = self._keep(number, request.blocks, hits)
        self._counts.stored += len(came)
        if self._fleet.objects:
            new = [block for block in came if block not in self._archived]
            self._archived.update(new)
            size = len(new) * self._fleet.block_bytes
            self._objects.visit(self._now, size / self._rates.objects_bytes, len(new), size)
        if self._redis is not None:
            self._turn_away(self._nodes[number].sharing.offer(request.blocks, came))
            self._share(number)

    def _keep(self, number: int, blocks: Sequence[int], first: int = 0) -> list[int]:
        came, left = self._nodes[number].arena.store(blocks, first=first)
        self._counts.evicted += len(left)
        if self._router.wants_events:
            self._router.came(number, came)
            self._router.left(number, left)
            pages = (len(came) + len(left)) * self._fleet.pages_per_block
            self._counts.events += pages
            self._router_part.background(pages / self._rates.events, pages)
        return came

    # -- what is shared -----------------------------------------------------------------------------------------------

    def _load(self, node: _Node, redis: Sequence[int], objects: int, now: float) -> float:
        """Returns when what is in Redis and in objects has come."""
        if redis and self._redis is not None:
            size = len(redis) * self._fleet.block_bytes
            now = max(self._redis.load(now, redis), node.link.visit(now, size / self._rates.link_bytes, 1, size))
        if objects:
            size = objects * self._fleet.block_bytes
            came = self._objects.visit(now, size / self._rates.objects_bytes, objects, size)
            now = max(came, node.link.visit(now, size / self._rates.link_bytes, 1, size)) + self._rates.objects_seconds
        return now

    def _share_soon(self, number: int) -> None:
        """A node's thread looks what there is to tell every so often, each node at moments of its own."""
        sharing = self._nodes[number].sharing
        if self._redis is None or not sharing or sharing.busy or sharing.awaited:
            return
        sharing.awaited = True
        seconds = self._rates.sweep_seconds
        phase = seconds * (number * _GOLDEN % 1)
        rounds = math.floor((self._now - phase) / seconds) + 1
        self._at(phase + rounds * seconds, lambda: self._look(number))

    def _look(self, number: int) -> None:
        self._nodes[number].sharing.awaited = False
        self._share(number)

    def _share(self, number: int) -> None:
        """A node's thread tells Redis what was used, and then offers what is new."""
        sharing = self._nodes[number].sharing
        if self._redis is None or sharing.busy or not sharing:
            return
        sharing.busy = True
        used = sharing.take_used()
        if not used:
            self._offer(number)
            return
        done, gone = self._redis.touch(self._now, list(used))
        arena = self._nodes[number].arena
        for block in gone:
            if block in arena:
                self._turn_away(sharing.offer(used[block], [block]))
        self._at(done, lambda: self._offer(number))

    def _offer(self, number: int) -> None:
        node = self._nodes[number]
        offered, gone = node.sharing.take(node.arena)
        blocks = sum(len(some) for _, some in offered)
        self._turn_away(gone)
        if self._redis is None or not offered:
            self._shared(number, [])
            return
        latest = self._now + self._rates.write_deadline
        if max(node.link.free_at, self._redis.busy_until()) > latest:
            self._turn_away(blocks)
            self._at(latest, lambda: self._shared(number, []))
            return
        done, writes, claims = self._redis.begin_write(self._now, offered)
        for claimed in claims:
            node.sharing.set_aside(claimed.chunk.blocks)
            self._look_later(number, claimed, CLAIM_PAUSE)
        sent = sum(len(chunk.blocks) for write in writes for chunk in write.chunks)
        self._counts.sent += sent
        size = sent * self._fleet.block_bytes
        done = max(done, node.link.visit(self._now, size / self._rates.link_bytes, 1, size))
        self._at(done, lambda: self._shared(number, writes))

    def _turn_away(self, blocks: int) -> None:
        self._turned_away += blocks
        self._counts.unshared += blocks

    def _look_later(self, number: int, claimed: Claimed, pause: float) -> None:
        """Whether another node has sent something is looked at now and then."""
        self._at(self._now + jitter.MEAN * pause, lambda: self._look_at_claim(number, claimed, pause))

    def _look_at_claim(self, number: int, claimed: Claimed, pause: float) -> None:
        if self._redis is not None and not self._redis.look_at_claim(self._now, claimed):
            self._look_later(number, claimed, min(2 * pause, LONGEST_CLAIM_PAUSE))
            return
        self._nodes[number].sharing.put_back(claimed.prompt, claimed.chunk.blocks)
        self._share(number)

    def _shared(self, number: int, writes: Sequence[Write]) -> None:
        sharing = self._nodes[number].sharing
        if self._redis is not None:
            for write in writes:
                here = self._redis.end_write(self._now, write)
                self._counts.shared += here
                self._counts.unshared += len(write.blocks) - here
        sharing.busy = False
        if sharing.offers:
            self._share(number)
        else:
            self._share_soon(number)
