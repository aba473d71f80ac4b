"""Lookups that never let the scheduler wait: a look into the mapped index where that tells all, or else a call to the
node on a thread of its own."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.connector.health import NodeHealth
from kvstore.errors import FormatError
from kvstore.limits import MOST_LOOKUP_PAGES
from kvstore.rare_lines import one_line

if TYPE_CHECKING:
    from kvstore import Lookup, Namespace
    from kvstore.connector.rank_nodes import NodeClient

MISS_TTL = 1.0
"""Seconds for which a miss is remembered."""

HIT_TTL = 2.0
"""Seconds after which a hit that the mapping showed is looked at again, while its request waits for blocks."""

HASHES_A_CALL = 16384
"""Most hashes in one call to the node (512 KiB). Of a longer prefix the rest is not asked for, in no group."""

QUEUED_LOOKUPS = 256
"""Most requests that wait for the thread. One more is a miss."""

REMEMBERED = 4096
"""Most answers, and most misses, that are kept. Beyond it the oldest goes: engines may ask and never come back."""

_log = logging.getLogger("kvstore.connector")
SHUTDOWN_WAIT = 5.0
"""Seconds for which :meth:`Lookups.shutdown` waits for a call under way."""


@dataclass(frozen=True, slots=True)
class LookupStatistics:
    """How lookups went since the start: in requests that asked, and in pages."""

    here: int = 0
    """Answered at once, by what the node shows in shared memory."""
    asked: int = 0
    """Sent to the node."""
    answered: int = 0
    late: int = 0
    """Answered (or failed) only after the budget: a miss, unless the engine asks once more."""
    skipped: int = 0
    """A miss without asking: the node failed or hangs, or too many are waiting."""
    remembered: int = 0
    """A miss without asking: the same was missing a moment ago."""
    failed: int = 0
    pages_asked: int = 0
    """Pages, or parts of pages, behind those that the engine had: of each request once, at its first answer."""
    pages_found: Mapping[str, int] = field(default_factory=dict)
    """Of these, by tier."""


Tiers = tuple[tuple[str | None, ...], ...]
"""By cache group, the tier of each page; None: not there."""

_FASTEST_FIRST = ("arena", "disk", "redis", "objects")


@dataclass(slots=True)
class Answer:
    """What is known of one request's prefix. Everything is by cache group."""

    hashes: tuple[tuple[bytes, ...], ...]
    first: tuple[int, ...]
    """The first block that the engine does not have itself, when it last asked."""
    asked_at: float
    present: tuple[tuple[bool, ...], ...] | None = None
    """Which of the pages kvstore has; None: not answered yet."""
    tiers: Tiers = ()
    """Which tier has them; of a page of several parts the slowest one."""
    expires_at: float = 0.0
    mapped: bool = False
    """Whether that is what the mapping says: looking again costs no call."""
    told: bool = False
    """Whether the engine knows: an answer that comes between two slow steps must not expire unheard."""
    late: bool = False

    @property
    def hit(self) -> bool:
        """Whether kvstore has any page behind what the engine has itself.

        Any, because it depends on the kind of a group which of them are needed: a window needs the last ones alone.
        """
        return self.present is not None and any(
            True in present[first:] for present, first in zip(self.present, self.first, strict=True)
        )

    def offered(self, group: int, index: int) -> bytes | None:
        """The hash of a page that kvstore has; None: it does not."""
        if self.present is None or not 0 <= group < len(self.present) or not 0 <= index < len(self.present[group]):
            return None
        return self.hashes[group][index] if self.present[group][index] else None


class Lookups:
    """One lookup a request: a read of the mapping, or batched into calls of one thread.

    Everything here is kept until :meth:`take` or :meth:`forget`, but for misses, which expire, hits in the mapping,
    which are looked at again, and failures, which are asked again once the node may have come back. What is never taken
    is bounded by :data:`REMEMBERED`.

    :meth:`ask`, :meth:`take` and :meth:`forget` hold a lock for a few dictionary operations, never during a call.

    There is one namespace a cache group, and as many for each of ``other_ranks``, which have further parts of each
    page: it is there when all of its parts are. ``budget`` is how many seconds after the first :meth:`ask` of a request
    silence is a miss.
    """

    def __init__(
        self,
        client: NodeClient,
        namespaces: Sequence[Namespace],
        budget: float,
        clock: Callable[[], float],
        other_ranks: Sequence[Sequence[Namespace]] = (),
    ) -> None:
        self._client = client
        self._ranks = (tuple(namespaces), *map(tuple, other_ranks))
        self._budget = budget
        self._clock = clock
        self._health = NodeHealth("looking up pages", clock)
        # Of its own, or it would keep back the call that maps a restarted node's arena.
        self._mapping_health = NodeHealth("looking up pages in shared memory", clock)
        self._changed = threading.Condition()
        self._answers: dict[str, Answer] = {}
        self._queue: dict[str, Answer] = {}
        # Group and hash of the first page that the engine missed, where kvstore had none from there on → when to ask
        # again; in order of time.
        self._misses: dict[tuple[int, bytes], float] = {}
        self._call_started: float | None = None
        self._stopped = False
        self._statistics = LookupStatistics()
        self._thread = threading.Thread(target=self._run, name="kvstore-lookup", daemon=True)
        self._thread.start()

    def ask(
        self, request_id: str, hashes: Sequence[Sequence[bytes]], first: tuple[int, ...]
    ) -> tuple[tuple[bool, ...], ...] | None:
        """Which of a request's pages kvstore has.

        Args:
            request_id: whose prefix it is. Only the first ask of a request sends hashes.
            hashes: of the blocks that matter, by group.
            first: how many leading blocks of each group the engine has itself, in at least one group fewer than matter.
                They are asked for all the same, so that it is known what need not be stored; but whether the answer is
                a hit is decided behind them.

        Returns:
            By group, one bool a page; shorter, or empty, for a miss. None: not known yet, ask again.
        """
        if _log.isEnabledFor(logging.DEBUG) and request_id not in self._answers:
            self._say(request_id, hashes)
        with self._changed:
            now = self._clock()
            answer = self._answers.get(request_id)
            if answer is not None:
                answer.first = first
                if answer.told and now >= answer.expires_at and (answer.mapped or not answer.hit):
                    del self._answers[request_id]
                    answer = None
            if answer is None:
                return self._enqueue(request_id, hashes, first, now)
            if answer.present is not None:
                answer.told = True
                return answer.present
            if now - answer.asked_at < self._budget and not self._stopped:
                return None
            if not answer.late:
                answer.late = True
                self._count("late")
            return self._miss()

    def tiers(self, request_id: str) -> Tiers:
        """Where a request's pages are; empty: not answered."""
        with self._changed:
            answer = self._answers.get(request_id)
        return answer.tiers if answer is not None else ()

    def take(self, request_id: str) -> Answer | None:
        """What is known of a request, which is then forgotten here. None: not asked, or not answered."""
        with self._changed:
            self._queue.pop(request_id, None)
            answer = self._answers.pop(request_id, None)
        return answer if answer is not None and answer.present is not None else None

    def forget(self, request_id: str) -> None:
        """Drops what is known, or asked, of a request."""
        self.take(request_id)

    def expect(self, group: int, hashes: Sequence[bytes]) -> None:
        """These pages of a group are being stored, or one behind them is: they are missed no longer."""
        with self._changed:
            self._drop_old_misses(self._clock())
            if not self._misses:  # of a state all of its prefix is named, each time
                return
            for block_hash in hashes:
                self._misses.pop((group, block_hash), None)

    def statistics(self) -> LookupStatistics:
        """Counters since the start."""
        with self._changed:
            return replace(self._statistics, failed=self._health.failures + self._mapping_health.failures)

    def shutdown(self) -> None:
        """Stops asking; from now on everything is a miss. Waits for a call under way, :data:`SHUTDOWN_WAIT` at most."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join(SHUTDOWN_WAIT)

    def _enqueue(
        self, request_id: str, hashes: Sequence[Sequence[bytes]], first: tuple[int, ...], now: float
    ) -> tuple[tuple[bool, ...], ...] | None:
        answer = Answer(_shortened(hashes, self._most_hashes), first, now)
        if not self._stopped and (present := self._look_here(answer.hashes)) is not None:
            self._count("here")
            self._keep(request_id, answer)
            self._answer(answer, present, now)
            answer.mapped = answer.told = True
            return answer.present
        if all(self._misses.get(page, now) > now for page in _first_missed(hashes, first)):
            self._count("remembered")
            return self._miss()
        hangs = self._call_started is not None and now - self._call_started >= self._budget
        if self._stopped or hangs or not self._health.available() or len(self._queue) >= QUEUED_LOOKUPS:
            self._count("skipped")
            return self._miss()
        self._queue[request_id] = answer
        self._keep(request_id, answer)
        self._count("asked")
        self._changed.notify()
        return None

    def _say(self, request_id: str, hashes: Sequence[Sequence[bytes]]) -> None:
        """Log what is asked for, as ``kvstore doctor --why`` reads it."""
        for namespace, of_group in zip(self._ranks[0], hashes, strict=True):
            asked = {"layout": json.loads(namespace.layout.to_json()), "hashes": [each.hex() for each in of_group]}
            _log.debug("request %s asks for %s", one_line(request_id), json.dumps(asked))

    @property
    def _most_hashes(self) -> int:
        """In one call, for each rank."""
        return min(HASHES_A_CALL, MOST_LOOKUP_PAGES // len(self._ranks))

    def _keep(self, request_id: str, answer: Answer) -> None:
        self._answers[request_id] = answer
        if len(self._answers) > REMEMBERED:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._queue.pop(oldest, None)

    def _look_here(self, hashes: tuple[tuple[bytes, ...], ...]) -> Tiers | None:
        """What the mapping of a node on this host says, where that is all there is to say."""
        if not self._mapping_health.available():
            return None
        try:
            lookups = self._client.lookup_here(self._queries([hashes]), counts=False)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is asked by a call
            self._mapping_health.failed(error)
            return None
        return None if lookups is None else self._by_request(lookups)[0]

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                tiers = self._call([answer.hashes for answer in batch.values()])
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here is a miss, never the engine's error
                self._health.failed(error)
                self._settle(batch, None)
            else:
                self._health.succeeded()
                self._settle(batch, tiers)

    def _call(self, asked: Sequence[tuple[tuple[bytes, ...], ...]]) -> list[Tiers]:
        queries = self._queries(asked)
        lookups = self._client.lookup(queries, counts=False)
        if [len(lookup.tiers) for lookup in lookups] != [len(hashes) for _, hashes in queries]:
            raise FormatError("the node answered for another number of pages than it was asked for")
        return self._by_request(lookups)

    def _queries(self, asked: Sequence[tuple[tuple[bytes, ...], ...]]) -> list[tuple[Namespace, tuple[bytes, ...]]]:
        """For each request, for each rank, each group."""
        return [
            query for hashes in asked for namespaces in self._ranks for query in zip(namespaces, hashes, strict=True)
        ]

    def _by_request(self, lookups: Sequence[Lookup]) -> list[Tiers]:
        ranks, groups = len(self._ranks), len(self._ranks[0])
        told = [
            tuple(lookup.tiers for lookup in lookups[start : start + groups])
            for start in range(0, len(lookups), groups)
        ]
        if ranks == 1:
            return told
        return [of_all_parts(told[start : start + ranks]) for start in range(0, len(told), ranks)]

    def _next_batch(self) -> dict[str, Answer] | None:
        """Requests for the next call; None: stop."""
        with self._changed:
            while not self._queue and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            batch: dict[str, Answer] = {}
            hashes = 0
            for request_id, answer in self._queue.items():
                hashes += sum(map(len, answer.hashes))
                if batch and hashes > self._most_hashes:
                    break
                batch[request_id] = answer
            for request_id in batch:
                del self._queue[request_id]
            self._call_started = self._clock()
            return batch

    def _settle(self, batch: dict[str, Answer], tiers: Sequence[Tiers] | None) -> None:
        """Writes down the answers of one call; None: it failed, and who asked may ask again."""
        with self._changed:
            self._call_started = None
            self._changed.notify_all()
            if tiers is None:
                for request_id, answer in batch.items():
                    if self._answers.get(request_id) is answer:
                        del self._answers[request_id]
                return
            self._count("answered", len(batch))
            now = self._clock()
            for answer, known in zip(batch.values(), tiers, strict=True):
                self._answer(answer, known, now)

    def _answer(self, answer: Answer, tiers: Tiers, now: float) -> None:
        answer.tiers = tiers
        answer.present = tuple(tuple(map(bool, of_group)) for of_group in tiers)
        answer.expires_at = now + (HIT_TTL if answer.hit else MISS_TTL)
        if not answer.hit:
            for page in _first_missed(answer.hashes, answer.first):
                self._remember_miss(page, now)

    def _remember_miss(self, page: tuple[int, bytes], now: float) -> None:
        self._misses.pop(page, None)
        self._misses[page] = now + MISS_TTL
        self._drop_old_misses(now)

    def _drop_old_misses(self, now: float) -> None:
        while self._misses:
            oldest = next(iter(self._misses))
            if self._misses[oldest] > now and len(self._misses) <= REMEMBERED:
                break
            del self._misses[oldest]

    def _count(self, field: str, by: int = 1) -> None:
        self._statistics = replace(self._statistics, **{field: getattr(self._statistics, field) + by})

    def _miss(self) -> tuple[tuple[bool, ...], ...]:
        return ((),) * len(self._ranks[0])


def _first_missed(hashes: Sequence[Sequence[bytes]], first: Sequence[int]) -> list[tuple[int, bytes]]:
    """Group and hash of the first page in each group that the engine does not have itself."""
    return [
        (group, of_group[start])
        for group, (of_group, start) in enumerate(zip(hashes, first, strict=True))
        if start < len(of_group)
    ]


def _shortened(hashes: Sequence[Sequence[bytes]], most: int) -> tuple[tuple[bytes, ...], ...]:
    """As much of a prefix as one call may name: each group's share of it, so that all end near the same token."""
    total = max(most, sum(map(len, hashes)))
    return tuple(tuple(of_group[: len(of_group) * most // total]) for of_group in hashes)


def of_all_parts(parts: Sequence[Tiers]) -> Tiers:
    """The slowest tier of each page's parts; None where one is missing."""
    return tuple(
        tuple(None if None in tiers else max(tiers, key=_slowness) for tiers in zip(*of_group, strict=True))
        for of_group in zip(*parts, strict=True)
    )


def _slowness(tier: str | None) -> int:
    return _FASTEST_FIRST.index(tier) if tier in _FASTEST_FIRST else len(_FASTEST_FIRST)
