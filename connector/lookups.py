"""Asking the node which pages it has, on a thread of its own, so that the scheduler never waits for the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from connector.health import NodeHealth
from kvstore.errors import FormatError

if TYPE_CHECKING:
    from kvstore import Client, Namespace

MISS_TTL = 1.0
"""Seconds for which a miss is remembered."""

HASHES_A_CALL = 16384
"""Most hashes in one call to the node (512 KiB). Of a longer prefix the rest is not asked for."""

QUEUED_LOOKUPS = 256
"""Most requests that wait for the thread. One more is a miss."""

REMEMBERED = 4096
"""Most answers, and most misses, that are kept. Beyond it the oldest goes: engines may ask and never come back."""

SHUTDOWN_WAIT = 5.0
"""Seconds for which :meth:`Lookups.shutdown` waits for a call under way."""


@dataclass(frozen=True, slots=True)
class LookupStatistics:
    """How lookups went since the start, in requests that asked."""

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


@dataclass(slots=True)
class Answer:
    """What is known of one request's prefix."""

    hashes: tuple[bytes, ...]
    first: int
    """The first block that the engine does not have itself, when it last asked."""
    asked_at: float
    present: tuple[bool, ...] | None = None
    """Which of the pages kvstore has; None: not answered yet."""
    expires_at: float = 0.0
    late: bool = False

    @property
    def hit(self) -> bool:
        """Whether kvstore has at least the first page that the engine misses."""
        return self.present is not None and self.first < len(self.present) and self.present[self.first]


class Lookups:
    """One lookup a request, batched into calls of one thread.

    Everything here is kept until :meth:`take` or :meth:`forget`, but for misses, which expire, and failures, which are
    asked again once the node may have come back. What is never taken is bounded by :data:`REMEMBERED`.

    :meth:`ask`, :meth:`take` and :meth:`forget` hold a lock for a few dictionary operations, never during a call.

    Args:
        client: whose ``lookup`` is called.
        namespace: where the pages are.
        budget: seconds from the first :meth:`ask` of a request after which silence is a miss.
        clock: seconds, monotonic.
    """

    def __init__(self, client: Client, namespace: Namespace, budget: float, clock: Callable[[], float]) -> None:
        self._client = client
        self._namespace = namespace
        self._budget = budget
        self._clock = clock
        self._health = NodeHealth("looking up pages", clock)
        self._changed = threading.Condition()
        self._answers: dict[str, Answer] = {}
        self._queue: dict[str, Answer] = {}
        self._misses: dict[bytes, float] = {}  # first missing hash → when to ask again; in order of time
        self._call_started: float | None = None
        self._stopped = False
        self._statistics = LookupStatistics()
        self._thread = threading.Thread(target=self._run, name="kvstore-lookup", daemon=True)
        self._thread.start()

    def ask(self, request_id: str, block_hashes: Sequence[bytes], limit: int, first: int) -> tuple[bool, ...] | None:
        """Which of the first ``limit`` pages kvstore has.

        Args:
            request_id: whose prefix it is. Only the first ask of a request sends hashes.
            block_hashes: of the request's full blocks.
            limit: how many of them matter, more than ``first``.
            first: how many leading blocks the engine has itself. They are asked for all the same, so that it is known
                what need not be stored; but whether the answer is a hit is decided behind them.

        Returns:
            One bool a page; shorter, or empty, for a miss. None: not known yet, ask again.
        """
        with self._changed:
            now = self._clock()
            answer = self._answers.get(request_id)
            if answer is not None:
                answer.first = first
                if answer.present is not None and not answer.hit and now >= answer.expires_at:
                    del self._answers[request_id]
                    answer = None
            if answer is None:
                return self._enqueue(request_id, block_hashes, limit, first, now)
            if answer.present is not None:
                return answer.present
            if now - answer.asked_at < self._budget and not self._stopped:
                return None
            if not answer.late:
                answer.late = True
                self._count("late")
            return ()

    def take(self, request_id: str) -> Answer | None:
        """What is known of a request, which is then forgotten here. None: not asked, or not answered."""
        with self._changed:
            self._queue.pop(request_id, None)
            answer = self._answers.pop(request_id, None)
        return answer if answer is not None and answer.present is not None else None

    def forget(self, request_id: str) -> None:
        """Drops what is known, or asked, of a request."""
        self.take(request_id)

    def expect(self, hashes: Sequence[bytes]) -> None:
        """These pages are being stored: they are missing no longer."""
        with self._changed:
            for block_hash in hashes:
                self._misses.pop(block_hash, None)

    def statistics(self) -> LookupStatistics:
        """Counters since the start."""
        with self._changed:
            return replace(self._statistics, failed=self._health.failures)

    def shutdown(self) -> None:
        """Stops asking; from now on everything is a miss. Waits for a call under way, :data:`SHUTDOWN_WAIT` at most."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify()
        self._thread.join(SHUTDOWN_WAIT)

    def _enqueue(
        self, request_id: str, block_hashes: Sequence[bytes], limit: int, first: int, now: float
    ) -> tuple[bool, ...] | None:
        if self._misses.get(block_hashes[first], now) > now:
            self._count("remembered")
            return ()
        hangs = self._call_started is not None and now - self._call_started >= self._budget
        if self._stopped or hangs or not self._health.available() or len(self._queue) >= QUEUED_LOOKUPS:
            self._count("skipped")
            return ()
        answer = Answer(tuple(block_hashes[: min(limit, HASHES_A_CALL)]), first, now)
        self._answers[request_id] = self._queue[request_id] = answer
        if len(self._answers) > REMEMBERED:
            oldest = next(iter(self._answers))
            del self._answers[oldest]
            self._queue.pop(oldest, None)
        self._count("asked")
        self._changed.notify()
        return None

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                present = self._call([answer.hashes for answer in batch.values()])
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here is a miss, never the engine's error
                self._health.failed(error)
                self._settle(batch, None)
            else:
                self._health.succeeded()
                self._settle(batch, present)

    def _call(self, asked: Sequence[tuple[bytes, ...]]) -> list[tuple[bool, ...]]:
        found = self._client.lookup([(self._namespace, hashes) for hashes in asked])
        present = [tuple(lookup.present) for lookup in found]
        if [len(known) for known in present] != [len(hashes) for hashes in asked]:
            raise FormatError("the node answered for another number of pages than it was asked for")
        return present

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
                hashes += len(answer.hashes)
                if batch and hashes > HASHES_A_CALL:
                    break
                batch[request_id] = answer
            for request_id in batch:
                del self._queue[request_id]
            self._call_started = self._clock()
            return batch

    def _settle(self, batch: dict[str, Answer], present: Sequence[tuple[bool, ...]] | None) -> None:
        """Writes down the answers of one call; None: it failed, and who asked may ask again."""
        with self._changed:
            self._call_started = None
            self._changed.notify_all()
            if present is None:
                for request_id, answer in batch.items():
                    if self._answers.get(request_id) is answer:
                        del self._answers[request_id]
                return
            self._count("answered", len(batch))
            now = self._clock()
            for answer, known in zip(batch.values(), present, strict=True):
                answer.present = known
                answer.expires_at = now + MISS_TTL
                if answer.first < len(known) and not known[answer.first]:
                    self._remember_miss(answer.hashes[answer.first], now)

    def _remember_miss(self, block_hash: bytes, now: float) -> None:
        self._misses.pop(block_hash, None)
        self._misses[block_hash] = now + MISS_TTL
        oldest = next(iter(self._misses))
        while self._misses[oldest] <= now or len(self._misses) > REMEMBERED:
            del self._misses[oldest]
            oldest = next(iter(self._misses))  # never the last: the one of now is in time

    def _count(self, field: str, by: int = 1) -> None:
        self._statistics = replace(self._statistics, **{field: getattr(self._statistics, field) + by})
