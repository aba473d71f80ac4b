"""Pages that a prefill instance has computed and that are still on their way to a node: polled until they are there.

Nobody tells of them: they are looked up again and again, on a thread of its own for each node, so that one that hangs
holds up nobody else's. A load that can do without those that do not come begins with the first ones; the worker half
waits for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.connector.health import NodeHealth
from kvstore.connector.lookups import of_all_parts
from kvstore.errors import FormatError
from kvstore.limits import MOST_LOOKUP_PAGES

if TYPE_CHECKING:
    from kvstore import Namespace
    from kvstore.connector.rank_nodes import NodeClient

FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.050
"""Seconds between two lookups for the same pages; doubled each time."""

PARTIAL_WAIT = 0.250
"""Seconds for which a partial block, or a state, is waited for when all others are there. A partial block is stored
right behind them, unless the request was here before: whoever loads it first drops it. A state is stored before, unless
the others were there already, or it was refused."""

MOST_WAITING = 256
"""Requests that wait at one node. One more is a miss."""

SHUTDOWN_WAIT = 5.0


@dataclass(slots=True, eq=False)
class AwaitedPages:
    """What is known of one request's pages. Everything is by cache group."""

    hashes: tuple[tuple[bytes, ...], ...]
    """Of its full blocks, behind them that of the partial one."""
    has_partial: tuple[bool, ...]
    """Whether there is one."""
    deadline: float
    """By the clock: what is not there then does not come."""
    states: tuple[int | None, ...] = ()
    """Of a group of which only some pages are stored: which of them is waited for, as a number of leading blocks; 0:
    none. None, or nothing said: all are."""
    early: bool = False
    """The load may begin as soon as the first page is there. For one cache group."""
    present: list[list[bool]] = field(default_factory=list)
    tiers: list[list[str | None]] = field(default_factory=list)
    """Which tier of the node has them; of a page of several parts the slowest one."""
    settled: bool = False
    """Waiting is over."""
    on_the_way: bool = False
    """``present`` is not final: the load begins, and the others are waited for meanwhile."""
    whole_at: float | None = None
    """When all but partial blocks and ``states`` were there."""

    def offered(self, group: int, index: int) -> bytes | None:
        """The hash of a page that is there; None: it is not."""
        if not self.settled or not 0 <= group < len(self.present) or not 0 <= index < len(self.present[group]):
            return None
        return self.hashes[group][index] if self.present[group][index] or self.on_the_way else None

    @property
    def expected(self) -> tuple[tuple[bool, ...], ...]:
        """By group, which pages are there, or will be."""
        return tuple(tuple(here or self.on_the_way for here in known) for known in self.present)

    def settle(self, now: float) -> bool:
        """Decides whether waiting is over: everything is there, or nothing more comes."""
        states = self.states or (None,) * len(self.present)
        full = [
            known[:-1] if partial else known
            for known, partial, state in zip(self.present, self.has_partial, states, strict=True)
            if state is None
        ]
        if self.whole_at is None and full and all(map(all, full)):
            self.whole_at = now
        awaited = [
            known if state is None else known[:state][-1:] for known, state in zip(self.present, states, strict=True)
        ]
        complete = all(map(all, awaited))
        # Pages of a request are stored in their order: with the last one there, what is missing was refused or dropped.
        passed_by = all(not known or known[-1] for known in awaited)
        alone = self.whole_at is not None and now >= self.whole_at + PARTIAL_WAIT
        self.settled = complete or passed_by or alone or now >= self.deadline
        if not self.settled and self.early and self.present[0][0]:
            self.settled = self.on_the_way = True
        return self.settled


def pause_after(waited: float) -> float:
    """Seconds until pages are looked up again that have been waited for: doubles each time."""
    return min(max(waited, FIRST_PAUSE), LONGEST_PAUSE)


class PagePoller:
    """Waits for pages at one node. Its methods hold a lock for a few dictionary operations, never during a call.

    ``what`` names the node's pages in the log. ``ranks`` has one namespace a cache group, for each rank that has a part
    of each page: a page is there when all of its parts are.
    """

    def __init__(
        self, what: str, client: NodeClient, ranks: Sequence[Sequence[Namespace]], clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._ranks = tuple(map(tuple, ranks))
        self._clock = clock
        self._health = NodeHealth(f"waiting for {what}", clock)
        self._changed = threading.Condition()
        self._waiting: dict[str, AwaitedPages] = {}
        self._stopped = False
        self._thread: threading.Thread | None = None

    def expect(self, request_id: str, pages: AwaitedPages) -> None:
        """Begins to wait. Where that is of no use, or one lookup can't ask for so many pages, the pages are settled at
        once, with nothing there."""
        pages.present = [[False] * len(hashes) for hashes in pages.hashes]
        pages.tiers = [[None] * len(hashes) for hashes in pages.hashes]
        too_long = sum(map(len, pages.hashes)) * len(self._ranks) > MOST_LOOKUP_PAGES
        with self._changed:
            if self._stopped or too_long or len(self._waiting) >= MOST_WAITING or not self._health.available():
                pages.settled = True
                return
            self._waiting[request_id] = pages
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-awaited", daemon=True)
                self._thread.start()
            self._changed.notify()

    def look(self, request_id: str, pages: AwaitedPages) -> bool:
        """Whether waiting is over. It is at the deadline, also when the node hangs."""
        with self._changed:
            if not pages.settled and self._clock() >= pages.deadline:
                pages.settled = True
            if pages.settled:
                self._waiting.pop(request_id, None)
            return pages.settled

    def forget(self, request_id: str) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._waiting.pop(request_id, None)

    def shutdown(self) -> None:
        """Stops the thread; waits for a call under way, :data:`SHUTDOWN_WAIT` at most."""
        with self._changed:
            self._stopped = True
            for pages in self._waiting.values():
                pages.settled = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(SHUTDOWN_WAIT)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        seen: set[str] = set()
        while True:
            with self._changed:
                while not self._waiting and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                waiting = dict(self._waiting)
            pause = min(2 * pause, LONGEST_PAUSE) if waiting.keys() <= seen else FIRST_PAUSE
            seen = set(waiting)
            try:
                self._look_up(waiting)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here is a miss, never the engine's error
                self._health.failed(error)
                self._give_up(waiting)
            else:
                self._health.succeeded()
            with self._changed:
                if not self._stopped:
                    self._changed.wait(pause)

    def _look_up(self, waiting: dict[str, AwaitedPages]) -> None:
        """One round: what is still missing of each."""
        for request_id, pages in waiting.items():
            missing = [[place for place, here in enumerate(known) if not here] for known in pages.present]
            asked = [[hashes[place] for place in places] for hashes, places in zip(pages.hashes, missing, strict=True)]
            queries = [query for namespaces in self._ranks for query in zip(namespaces, asked, strict=True)]
            found = [lookup.tiers for lookup in self._client.lookup(queries, counts=False)]
            if list(map(len, found)) != [len(hashes) for _, hashes in queries]:
                raise FormatError("the node answered for another number of pages than it was asked for")
            groups = len(asked)
            of_all = of_all_parts([tuple(found[rank : rank + groups]) for rank in range(0, len(found), groups)])
            with self._changed:
                if not pages.settled:
                    for group, (places, tiers) in enumerate(zip(missing, of_all, strict=True)):
                        for place, tier in zip(places, tiers, strict=True):
                            pages.present[group][place] = tier is not None
                            pages.tiers[group][place] = tier
                    pages.settle(self._clock())
                if pages.settled:
                    self._waiting.pop(request_id, None)

    def _give_up(self, waiting: dict[str, AwaitedPages]) -> None:
        with self._changed:
            for request_id, pages in waiting.items():
                pages.settled = True
                self._waiting.pop(request_id, None)
