"""Generated request traces by seed: chats, agents, questions on documents; and what orders of eviction stumble over: a
switch from one of them to another, and loops.

Each is a list of prompts; a prompt is a tuple of block numbers, head first, and equal numbers are equal prefixes, as in
a trace. Lengths and pauses are drawn from heavy-tailed distributions, since real ones are; none is fitted to a trace.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from itertools import count

Prompts = list[tuple[int, ...]]


class _Blocks:
    """New block numbers."""

    def __init__(self) -> None:
        self._numbers = count()

    def take(self, blocks: int) -> tuple[int, ...]:
        return tuple(next(self._numbers) for _ in range(blocks))


def _length(random_: random.Random, median: float, spread: float, most: int) -> int:
    return max(1, min(most, round(random_.lognormvariate(0, spread) * median)))


def _in_turns(sessions: Iterator[tuple[float, Iterator[tuple[float, tuple[int, ...]]]]], requests: int) -> Prompts:
    """Interleave sessions by time: each begins at a time, and yields (pause until the next, prompt)."""
    waiting: list[tuple[float, int, Iterator[tuple[float, tuple[int, ...]]]]] = []
    prompts: Prompts = []
    number = 0
    begin, session = next(sessions)
    while len(prompts) < requests:
        while not waiting or begin <= waiting[0][0]:
            heapq.heappush(waiting, (begin, number, session))
            number += 1
            begin, session = next(sessions)
        now, order, current = heapq.heappop(waiting)
        pause, prompt = next(current, (0.0, ()))
        if prompt:
            prompts.append(prompt)
            heapq.heappush(waiting, (now + pause, order, current))
    return prompts


def chat(requests: int, seed: int) -> Prompts:
    """Conversations: a few system prompts, turns that repeat all before them, a reader's pauses, many given up."""
    random_ = random.Random(seed)  # noqa: S311 - a workload, no secret
    blocks = _Blocks()
    systems = [blocks.take(_length(random_, 4, 0.8, 30)) for _ in range(8)]

    def session() -> Iterator[tuple[float, tuple[int, ...]]]:
        prompt = systems[min(int(random_.expovariate(0.7)), len(systems) - 1)]
        goes_on = random_.betavariate(2, 1.5)
        while True:
            prompt += blocks.take(_length(random_, 3, 1.0, 60))
            yield random_.lognormvariate(4, 1.2), prompt
            if random_.random() > goes_on:
                return
            prompt += blocks.take(_length(random_, 1.5, 0.7, 20))  # the answer

    def sessions() -> Iterator[tuple[float, Iterator[tuple[float, tuple[int, ...]]]]]:
        now = 0.0
        while True:
            now += random_.expovariate(1.0)
            yield now, session()

    return _in_turns(sessions(), requests)


def agent(requests: int, seed: int) -> Prompts:
    """Agents: long tool descriptions, many short steps in quick succession, waits for slow tools, branches undone."""
    random_ = random.Random(seed)  # noqa: S311
    blocks = _Blocks()
    tools = [blocks.take(_length(random_, 15, 0.4, 60)) for _ in range(4)]

    def session() -> Iterator[tuple[float, tuple[int, ...]]]:
        start = random_.choice(tools) + blocks.take(_length(random_, 3, 0.8, 40))
        prompt = start
        for _ in range(_length(random_, 12, 0.8, 80)):
            yield random_.lognormvariate(1.5, 0.5) if random_.random() < 0.9 else random_.lognormvariate(5, 0.7), prompt
            if random_.random() < 0.05:
                prompt = prompt[: random_.randrange(len(start), len(prompt) + 1)]
            prompt += blocks.take(_length(random_, 1.5, 0.9, 30))

    def sessions() -> Iterator[tuple[float, Iterator[tuple[float, tuple[int, ...]]]]]:
        now = 0.0
        while True:
            now += random_.expovariate(0.1)
            yield now, session()

    return _in_turns(sessions(), requests)


def document(requests: int, seed: int) -> Prompts:
    """Questions on documents: some documents are asked about often, for a while; most once; a few scans over all."""
    random_ = random.Random(seed)  # noqa: S311
    blocks = _Blocks()
    system = blocks.take(2)
    library: list[tuple[int, ...]] = []
    prompts: Prompts = []
    scan: list[tuple[int, ...]] = []
    while len(prompts) < requests:
        if scan:
            document_ = scan.pop()
        elif len(library) < 20 or random_.random() < 0.25:
            document_ = blocks.take(_length(random_, 25, 0.9, 250))
            library.append(document_)
        else:
            # Lately added ones are asked about more often, by a power law.
            rank = int(random_.paretovariate(0.8))
            document_ = library[-min(rank, len(library))]
        if not scan and random_.random() < 0.002:
            scan = random_.sample(library, min(len(library), 40))
        prompts.append(system + document_ + blocks.take(_length(random_, 1, 0.5, 5)))
    return prompts


def switch(requests: int, seed: int) -> Prompts:
    """Half of one of the kinds above, then half of another: what was learned is wrong from one request to the next."""
    first, second = random.Random(seed).sample((chat, agent, document), 2)  # noqa: S311
    before = first(requests // 2, seed)
    behind = 1 + max(block for prompt in before for block in prompt)
    after = second(requests - len(before), seed)
    return before + [tuple(block + behind for block in prompt) for prompt in after]


def loop(requests: int, seed: int) -> Prompts:
    """The same prompts over and over, then others, more or fewer: LRU hits all of a loop that fits, and nothing of one
    that does not."""
    random_ = random.Random(seed)  # noqa: S311
    blocks = _Blocks()
    prompts: Prompts = []
    while len(prompts) < requests:
        size = random_.choice((5, 10, 20, 40, 80))
        looped = [blocks.take(_length(random_, 15, 0.5, 60)) for _ in range(size)]
        prompts += looped * random_.randint(4, 10)
    return prompts[:requests]


WORKLOADS = {"chat": chat, "agent": agent, "document": document, "switch": switch, "loop": loop}
