"""What a simulation says of a fleet: hits, loads, waits, and the part that saturates first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.cli.plan.parts import Part, seconds_of
from kvstore.cli.plan.simulation import Outcome

SATURATED = 0.8
"""Of its time a part may be busy: beyond it, queues grow long."""


@dataclass(frozen=True, slots=True)
class PartLoad:
    """The busiest of some like parts."""

    name: str
    parts: int
    busy: float
    """Of its time; more than 1: it can't keep up."""
    wanted: float
    """Of its time, if nothing were given up or left waiting for want of it; what was done where nothing is."""
    operations: float
    """A second."""
    gigabytes: float
    """A second."""
    wait_p50: float
    """Seconds."""
    wait_p99: float
    shared: bool
    """By all nodes: its load grows with them. Others belong to one node each."""
    each: tuple[tuple[float, float, float], ...] = ()
    """Of shared ones, each: part of its time, operations and gigabytes a second."""

    def most_nodes(self, nodes: int) -> int | None:
        """With how many nodes it saturates, where all else stays; None: nodes don't matter."""
        return int(nodes * SATURATED / self.wanted) if self.shared and self.wanted > 0 else None


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one simulation."""

    nodes: int
    shards: int
    router: str
    requests: int
    arena_hits: float
    """Of all blocks, and so the next ones."""
    redis_hits: float
    object_hits: float
    late: float
    unshared: float
    """Of the blocks that were new somewhere."""
    saved_tokens: float
    """Of all tokens: not computed."""
    computed_tokens: float
    """A second."""
    stored_gigabytes: float
    """A second, of new KV in all arenas."""
    redis_commands: float
    """A second, of all nodes."""
    parts: list[PartLoad]

    @property
    def first(self) -> PartLoad:
        """The part of the service of which most is wanted; engines are not of it."""
        return max((part for part in self.parts if part.name != "engine"), key=lambda part: part.wanted)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"first": self.first.name, "first_saturates_at_nodes": self.first.most_nodes(self.nodes)}


def report(outcome: Outcome) -> Report:
    """The figures."""
    counts, fleet, seconds = outcome.counts, outcome.fleet, outcome.seconds
    of_each = outcome.unasked / max(1, len(outcome.shards)) / seconds
    thread = of_each * outcome.write_seconds
    link = of_each * fleet.block_bytes / fleet.rates.link_bytes
    loads = [
        _load("shard", [shard.thread for shard in outcome.shards], seconds, shared=True, unasked=thread),
        _load("shard's link", [shard.link for shard in outcome.shards], seconds, shared=True, unasked=link),
        _load("node's link", outcome.links, seconds, shared=False),
        _load("object storage", [outcome.objects], seconds, shared=True),
        _load("router", [outcome.router], seconds, shared=True),
        _load("engine", [each for engines in outcome.engines for each in engines], seconds, shared=False),
    ]
    return Report(
        fleet.nodes,
        fleet.shards,
        fleet.router,
        counts.requests,
        outcome.hit_ratio(counts.arena_hits),
        outcome.hit_ratio(counts.redis_hits),
        outcome.hit_ratio(counts.object_hits),
        outcome.hit_ratio(counts.late),
        counts.unshared / max(1, counts.stored),
        1 - counts.computed_tokens / max(1, counts.tokens),
        outcome.by_then.computed_tokens / seconds,
        outcome.by_then.stored * fleet.block_bytes / seconds / 1e9,
        sum(shard.thread.operations for shard in outcome.shards) / seconds,
        [load for load in loads if load.parts],
    )


def _load(name: str, parts: list[Part], seconds: float, *, shared: bool, unasked: float = 0.0) -> PartLoad:
    """``unasked``: of the time of each, what it would take to do what it was not asked for want of time."""
    if not parts:
        return PartLoad(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, shared)
    waits = Counter({0: sum(part.unqueued for part in parts)})
    for part in parts:
        waits.update(part.waits)
    p50, p99 = (_at(waits, share) for share in (0.5, 0.99))
    rates = [(part.busy / seconds, part.operations / seconds, part.bytes / seconds / 1e9) for part in parts]
    busy, operations, gigabytes = max(rates)
    each = tuple(rates) if shared else ()
    return PartLoad(name, len(parts), busy, busy + unasked, operations, gigabytes, p50, p99, shared, each)


def _at(waits: Counter[int], share: float) -> float:
    """The wait that this share of all visits stays within."""
    left = share * waits.total()
    for step, visits in sorted(waits.items()):
        left -= visits
        if left <= 0:
            return seconds_of(step)
    return 0.0


def more(before: Report, after: Iterable[tuple[str, Report]]) -> list[tuple[str, float, float]]:
    """What each change brings: share of tokens saved beyond what it was, and what is wanted of the first part then."""
    return [
        (what, each.saved_tokens - before.saved_tokens, next(
            (part.wanted for part in each.parts if part.name == before.first.name), 0.0))
        for what, each in after
    ]  # fmt: skip
