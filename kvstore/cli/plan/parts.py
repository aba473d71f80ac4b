"""The parts of a fleet that may saturate: each does one thing after the other, and is asked by many."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from kvstore.cli.plan.costs import Cost
from kvstore.store.maintenance import SWEEP_SECONDS


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast parts are. Those of Redis were measured (docs/scaling.md says on what), by the server's own CPU time."""

    trip_seconds: float = 10e-6
    """Of a shard, for a request whatever is in it: reading, parsing, answering."""
    command_seconds: float = 0.7e-6
    script_seconds: float = 50e-6
    """Beside what its command takes."""
    in_seconds: float = 1.0e-9
    """Of a shard, for a byte that it receives."""
    out_seconds: float = 0.45e-9
    """Of a shard, for a byte that it sends."""
    link_bytes: float = 12e9
    """A second, of each host's link, in each direction."""
    network_seconds: float = 100e-6
    """From a node to a shard and back, with nothing to do there."""
    prefill_tokens: float = 10_000.0
    """A second, of one engine."""
    engines: int = 8
    """Beside each node."""
    objects_seconds: float = 0.05
    """Until the first byte of an object comes."""
    objects_bytes: float = 10e9
    """A second, of the bucket, to all nodes together."""
    events: float = 600_000.0
    """Pages a second that a router's process takes in: one in Python took 1.6 µs each, in events of 16."""
    lookup_deadline: float = 0.05
    """Of a lookup in Redis: what comes later is a miss."""
    write_deadline: float = 2.0
    """Of a write: what can't be done by then is not shared."""
    sweep_seconds: float = SWEEP_SECONDS
    """How often a node's thread looks what there is to tell."""


PIECE_SECONDS = 2e-3
"""A server serves its connections in turn: so long one of them has it at once, at most (2 MiB come or go)."""


_STEPS = 8
"""Of a wait, to its double."""


def step_of(seconds: float) -> int:
    """A wait as a whole number, exact within 9 %: a fleet has too many to keep each."""
    return round(_STEPS * math.log2(seconds * 1e6)) + 1 if seconds >= 1e-6 else 0


def seconds_of(step: int) -> float:
    """The wait of such a number."""
    return 2 ** ((step - 1) / _STEPS) * 1e-6 if step else 0.0


@dataclass(slots=True)
class Part:
    """Something with one queue. What is large is served first come, first served; what is small waits for a piece of
    each large one that is there, as connections of a server take turns."""

    free_at: float = 0.0
    busy: float = 0.0
    """Seconds."""
    operations: int = 0
    bytes: int = 0
    waits: Counter[int] = field(default_factory=Counter)
    """How often a visit stood in the queue for how long: see :func:`step_of`."""
    unqueued: int = 0
    """Visits that did not."""
    _ends: deque[float] = field(default_factory=deque)
    """When the large ones that are here will be done."""

    def visit(self, now: float, seconds: float, operations: int = 0, size: int = 0) -> float:
        """Let it do something that takes so long. Returns when it is done."""
        self.busy += seconds
        self.operations += operations
        self.bytes += size
        if self.free_at <= now:
            self._ends.clear()
            self.unqueued += 1
            self.free_at = done = now + seconds
            if seconds > PIECE_SECONDS:
                self._ends.append(done)
            return done
        ends = self._ends
        while ends and ends[0] <= now:
            ends.popleft()
        wait = self.free_at - now
        self.free_at += seconds
        if seconds > PIECE_SECONDS:
            ends.append(self.free_at)
        else:
            wait = min(wait, (1 + len(ends)) * PIECE_SECONDS)
        self.waits[step_of(wait)] += 1
        return now + wait + seconds

    def background(self, seconds: float, operations: int, size: int = 0) -> None:
        """What it does beside, evenly spread, that nobody waits for."""
        self.busy += seconds
        self.operations += operations
        self.bytes += size


@dataclass(slots=True, eq=False)
class Request:
    """One kind of request of a shard, as often as it is asked: what it costs, and what that takes."""

    cost: Cost
    thread_seconds: float
    link_seconds: float
    trip_seconds: float
    """Of the network, there and back."""
    times: int = 0
    """How often it was asked, of all shards together."""

    @classmethod
    def of(cls, cost: Cost, rates: Rates) -> Request:
        """That costs so much, at these rates."""
        seconds = (
            cost.round_trips * rates.trip_seconds
            + cost.commands * rates.command_seconds
            + cost.scripts * rates.script_seconds
            + cost.sent_bytes * rates.in_seconds
            + cost.received_bytes * rates.out_seconds
        )
        link = max(cost.sent_bytes, cost.received_bytes) / rates.link_bytes
        return cls(cost, seconds, link, cost.round_trips * rates.network_seconds)


@dataclass(slots=True)
class Shard:
    """One server of Redis: its single thread, and its link."""

    thread: Part = field(default_factory=Part)
    link: Part = field(default_factory=Part)

    def ask(self, now: float, request: Request) -> float:
        """Let it serve a request. Returns when it is answered."""
        request.times += 1
        commands = request.cost.commands
        size = request.cost.sent_bytes + request.cost.received_bytes
        done = self.thread.visit(now, request.thread_seconds, commands, size)
        carried = self.link.visit(now, request.link_seconds, commands, size)
        return (done if done > carried else carried) + request.trip_seconds
