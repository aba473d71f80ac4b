"""What a fleet is asked: copies of a trace side by side, a system prompt in common, and agents that fork."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.cli.bench.trace import TracedRequest

_APART = 1 << 42
"""Between the block numbers of two copies."""
_FORK_PAUSE = 0.02
"""Seconds from one branch of a fork to the next."""


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request that a router gives to some node."""

    time: float
    """Seconds since the start."""
    session: int
    """Requests of one conversation have the same."""
    tokens: int
    """Of the prompt."""
    blocks: tuple[int, ...]
    """The prompt's blocks, head first; equal numbers are equal prefixes. Those in common are negative."""


def trace_copies(
    trace: Sequence[TracedRequest], copies: int, requests: int, *, common_tokens: int, block_tokens: int
) -> Iterator[FleetRequest]:
    """Independent copies of a trace, by time, each with other contents and begun at another moment.

    Args:
        trace: has at least one request.
        copies: how many.
        requests: of each copy, at most.
        common_tokens: of a system prompt that stands before every prompt of all copies.
        block_tokens: tokens of a block.
    """
    common = tuple(range(-1, -1 - -(-common_tokens // block_tokens), -1))
    part = trace[:requests]
    seconds = max(1e-3, (part[-1].timestamp - part[0].timestamp) / 1e3)

    def one(copy: int) -> Iterator[tuple[float, int, FleetRequest]]:
        phase = seconds * copy / (copies * max(1, len(part)))  # as far apart as two requests are
        for request in part:
            time = (request.timestamp - part[0].timestamp) / 1e3 + phase
            ids = request.hash_ids
            # The first block is a system prompt, mostly; the second tells conversations apart.
            session = copy * _APART + (ids[min(1, len(ids) - 1)] if ids else 0)
            blocks = (*common, *(copy * _APART + block for block in ids))
            yield time, copy, FleetRequest(time, session, request.input_length + common_tokens, blocks)

    for _, _, each in heapq.merge(*(one(copy) for copy in range(copies)), key=lambda row: row[:2]):
        yield each


def forking_agents(
    agents: int, requests: int, seed: int, *, common_tokens: int, block_tokens: int
) -> Iterator[FleetRequest]:
    """Agents whose prompt grows by a step of two blocks every few seconds, and forks into four branches at some.

    Args:
        agents: at once.
        requests: of all of them together.
        seed: of what is drawn.
        common_tokens: of a system prompt that all have.
        block_tokens: tokens of a block.
    """
    draw = random.Random(seed)  # noqa: S311 - a workload, no secret
    common = tuple(range(-1, -1 - -(-common_tokens // block_tokens), -1))
    new = iter(range(1 << 62))
    waiting = [(draw.expovariate(0.5), agent, common) for agent in range(agents)]
    heapq.heapify(waiting)
    for _ in range(requests):
        time, agent, before = heapq.heappop(waiting)
        blocks = (*before, next(new), next(new))
        yield FleetRequest(time, agent, len(blocks) * block_tokens, blocks)
        if len(blocks) > len(common) + 40:
            blocks = common  # done: another task
        elif draw.random() < 0.1 and len(waiting) < 4 * agents:
            for branch in range(1, 4):
                heapq.heappush(waiting, (time + _FORK_PAUSE * branch, agent, blocks))
        heapq.heappush(waiting, (time + draw.expovariate(0.3), agent, blocks))
