"""Which node a request goes to: any, its session's, or the one that has most of its prefix."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.cli.plan.workload import FleetRequest

_MOST_HOLDERS = 4
"""Nodes that the router remembers for a block: the last that told of it."""
_PATIENCE = 2.0
"""Seconds of work that a node with the prefix may have before it, more than another one."""


class Router(Protocol):
    """Gives requests to nodes, and hears of the pages that come and go there."""

    wants_events: bool
    """Whether it has to hear of them."""

    def route(self, request: FleetRequest) -> int:
        """The number of a node."""
        ...

    def came(self, node: int, blocks: Sequence[int]) -> None:
        """Pages are in a node's arena."""
        ...

    def left(self, node: int, blocks: Sequence[int]) -> None:
        """Pages are in a node's arena no longer."""
        ...


class RandomRouter:
    """Any node."""

    wants_events = False

    def __init__(self, nodes: int, backlog: Callable[[int], float], seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311 - a simulation
        self._nodes = nodes

    def route(self, request: FleetRequest) -> int:
        """The number of a node."""
        return self._draw.randrange(self._nodes)

    def came(self, node: int, blocks: Sequence[int]) -> None:
        """Pages are in a node's arena."""

    def left(self, node: int, blocks: Sequence[int]) -> None:
        """Pages are in a node's arena no longer."""


class StickyRouter(RandomRouter):
    """A session stays where its first request went."""

    def __init__(self, nodes: int, backlog: Callable[[int], float], seed: int) -> None:
        super().__init__(nodes, backlog, seed)
        self._homes: dict[int, int] = {}

    def route(self, request: FleetRequest) -> int:
        """The number of a node."""
        return self._homes.setdefault(request.session, self._draw.randrange(self._nodes))


class PrefixRouter(RandomRouter):
    """The node that has the longest prefix, unless it has much more to do than the better of two others."""

    wants_events = True

    def __init__(self, nodes: int, backlog: Callable[[int], float], seed: int) -> None:
        super().__init__(nodes, backlog, seed)
        self._backlog = backlog
        self._holders: dict[int, list[int]] = {}

    def pages(self) -> Mapping[int, Sequence[int]]:
        """Of each block that is somewhere, the nodes that have it: those that told of it last."""
        return self._holders

    def route(self, request: FleetRequest) -> int:
        """The number of a node."""
        other = min((self._draw.randrange(self._nodes) for _ in range(2)), key=self._backlog)
        for block in reversed(request.blocks):
            if holders := self._holders.get(block):
                best = min(holders, key=self._backlog)
                return best if self._backlog(best) <= self._backlog(other) + _PATIENCE else other
        return other

    def came(self, node: int, blocks: Sequence[int]) -> None:
        """Pages are in a node's arena."""
        for block in blocks:
            holders = self._holders.setdefault(block, [])
            if node not in holders:
                holders.append(node)
                del holders[:-_MOST_HOLDERS]

    def left(self, node: int, blocks: Sequence[int]) -> None:
        """Pages are in a node's arena no longer."""
        for block in blocks:
            holders = self._holders.get(block)
            if holders and node in holders:
                holders.remove(node)
                if not holders:
                    del self._holders[block]


ROUTERS: dict[str, Callable[[int, Callable[[int], float], int], Router]] = {
    "random": RandomRouter,
    "sticky": StickyRouter,
    "prefix": PrefixRouter,
}
