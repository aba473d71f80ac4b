"""Answers that were given before: what a proxy, or a program, asks before it asks a model.

The store is asked by threads, with a deadline, and never in a way that can fail a request: whatever goes wrong, the
request is computed. See :mod:`kvstore.responses` for the whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.breaker import Breaker
from kvstore.responses.answer import read_answer, tokens_of
from kvstore.responses.flight import Flights
from kvstore.responses.kept import (
    MOST_ANSWER_BYTES,
    Kept,
    Question,
    read_kept,
    sealed_content,
)
from kvstore.responses.lookup_threads import LookupThreads
from kvstore.responses.metrics import ResponseMetrics
from kvstore.responses.names import entry_name, key_digest
from kvstore.responses.policy import CacheControl, Caller, refusal
from kvstore.responses.report import report
from kvstore.responses.request import CacheableRequest, NotCacheable, read_request
from kvstore.responses.sealing import Sealing
from kvstore.responses.similar import Searched, Similar
from kvstore.responses.similar_hits import SimilarHits
from kvstore.responses.store import Entry, Label, Store, StoreError

DEADLINE = 0.05
"""Seconds that a request waits for the store."""
CLOSE_SECONDS = 5.0
"""For what waits to be stored when the cache is closed."""
_MOST_WAITING_BYTES = 64 << 20
"""Of answers on their way into the store; beyond that they are not kept."""
_FAILURES, _PAUSE, _LONGEST_PAUSE = 3, 1.0, 30.0

_log = logging.getLogger("kvstore.responses")


@dataclass(frozen=True, slots=True)
class Answered:
    """What :meth:`ResponseCache.answer` gives: a body or events, as the request asked for them."""

    content: bytes
    entry: str | None = None
    """Of a hit; None: it was computed for this request."""
    age: int = 0
    """Of a hit, in seconds."""


class ResponseCache:
    """For one event loop. It owns the store.

    Args:
        store: where answers lie.
        sealing: how they lie there.
        ttl: seconds after which an answer ends.
        deadline: seconds that a request waits for the store.
        now: seconds since 1970.
        similar: how similar prompts are answered; None: they are computed.
    """

    def __init__(
        self,
        store: Store,
        sealing: Sealing,
        ttl: float,
        deadline: float = DEADLINE,
        now: Callable[[], float] = time.time,
        similar: Similar | None = None,
    ) -> None:
        self._store = store
        self._sealing = sealing
        self._ttl = ttl
        self.now = now
        self.flights: Flights[Kept] = Flights()
        self.metrics = ResponseMetrics(lambda: self.flights.followers)
        self._threads = LookupThreads(deadline)
        self._how = similar
        self._similar = None
        if similar is not None:
            self._similar = SimilarHits(similar, store, sealing, self._threads, self.metrics, now)
        self._writer = ThreadPoolExecutor(1, "kvstore-responses-writer")
        self._waiting_bytes = 0
        self._writes: set[asyncio.Future[None]] = set()
        self._breaker = Breaker(_FAILURES, _PAUSE, _LONGEST_PAUSE)

    def report(self) -> dict[str, Any]:
        """What it has done, as :func:`kvstore.responses.report.report` tells it."""
        return report(self.metrics, self._how)

    def question(
        self, path: str, fields: Mapping[str, Any], caller: Caller, control: CacheControl
    ) -> Question | NotCacheable:
        """What a request asks of the cache, or why nothing."""
        request = read_request(path, fields)
        refused = request if isinstance(request, NotCacheable) else refusal(request, control)
        if refused is not None:
            self.metrics.passed_by.labels(refused.reason).inc()
            return refused
        assert isinstance(request, CacheableRequest), "it was not refused"
        return Question(entry_name(self._sealing, request, caller), request, caller, control)

    async def look_up(self, question: Question, going_on: Collection[str]) -> tuple[Kept, bytes] | None:
        """The answer to an equal request, and how it is told to this one. None: compute.

        Args:
            question: what is asked.
            going_on: the runs of instances whose answers count.
        """
        began = time.monotonic()
        kept, outcome = await self._look_up(question, going_on)
        content = None if kept is None else kept.told(question)
        if kept is not None and content is None:
            outcome = "other_form"
        self.metrics.lookups.labels(outcome).inc()
        self.metrics.lookup_seconds.observe(time.monotonic() - began)
        if content is None and outcome in ("miss", "old") and self._similar is not None:
            kept = await self._similar.look_up(question, lambda kept: self._counts(question, kept, going_on))
            content = None if kept is None else kept.told(question)
            self.metrics.similar_hits.inc(content is not None)
        if kept is None or content is None:
            return None
        self._saved(kept)
        return kept, content

    def share(self, question: Question, kept: Kept | None) -> bytes | None:
        """What a request is told of the answer to an equal one that was under way; None: it is not for this one."""
        if kept is None or not kept.young_enough(question, self.now()):
            return None
        content = kept.told(question)
        if content is not None:
            self.metrics.shared.inc()
            self._saved(kept)
        return content

    def keep(
        self, question: Question, answer: dict[str, Any] | None, runs: Collection[str], seconds: float
    ) -> Kept | None:
        """Store an answer, in the background.

        Args:
            question: what was asked.
            answer: a body; None: it is not finished.
            runs: of the instances that made it; none: it is not known.
            seconds: that it took.

        Returns:
            What those get who asked the same meanwhile; None: it is not for them.
        """
        searched = None if self._similar is None else self._similar.computed(question)
        if answer is None:
            self.metrics.kept.labels("unfinished").inc()
            return None
        now = self.now()
        caller = question.caller
        label = Label(
            question.entry,
            caller.tenant,
            key_digest(self._sealing, caller.key),
            question.request.model,
            ",".join(sorted(runs)),
            now,
            now + self._ttl,
        )
        kept = Kept(label, answer, seconds)
        if self._similar is not None and searched is not None:
            self._similar.learn(searched, answer)
        if not runs:
            self.metrics.kept.labels("unknown_run").inc()
            return kept
        content = sealed_content(question, answer, seconds)
        if len(content) > MOST_ANSWER_BYTES:
            self.metrics.kept.labels("too_large").inc()
        elif self._waiting_bytes + len(content) > _MOST_WAITING_BYTES or not self._breaker.allows():
            self.metrics.kept.labels("skipped").inc()
        else:
            self._waiting_bytes += len(content)
            write = asyncio.ensure_future(self._write(searched, label, content))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)
        return kept

    async def answer(
        self,
        path: str,
        fields: Mapping[str, Any],
        compute: Callable[[], Awaitable[bytes]],
        *,
        caller: Caller,
        cache_control: str = "",
        run: str = "",
    ) -> Answered:
        """An answer given before, or what ``compute`` gives, which is kept if it may be.

        Args:
            path: ``/v1/chat/completions`` or ``/v1/completions``.
            fields: of the request.
            compute: asks the model; gives the whole body, or all events of the stream.
            caller: for whom.
            cache_control: as the header of this name.
            run: what answers, without a comma: answers of other runs don't count. Give another name when the model's
                weights may have changed.

        Raises:
            Exception: what ``compute`` raises.
        """
        question = self.question(path, fields, caller, CacheControl.read(cache_control))
        if isinstance(question, NotCacheable):
            return Answered(await compute())
        if not question.control.looks_up:
            return (await self._compute(question, compute, run))[0]
        flight, leads = self.flights.join(f"{question.entry} {run}")
        if leads:

            async def lead() -> Answered:
                if (hit := await self.look_up(question, (run,))) is not None:
                    kept, content = hit
                    flight.finish(kept)
                    if self.checks(kept):
                        computed = await compute()
                        chat, stream = question.request.chat, question.request.stream
                        self.check(question, kept, read_answer(computed, chat, stream, MOST_ANSWER_BYTES))
                    return Answered(content, kept.label.entry, kept.age(self.now()))
                answered, for_others = await self._compute(question, compute, run)
                flight.finish(for_others)
                return answered

            return await flight.lead(lead())
        kept = await flight.follow()
        if (content := self.share(question, kept)) is not None and kept is not None:
            return Answered(content, kept.label.entry, kept.age(self.now()))
        return (await self._compute(question, compute, run))[0]

    def checks(self, kept: Kept) -> bool:
        """Whether the answer that a similar prompt was told is to be computed as well, for :meth:`check`."""
        return self._similar is not None and self._similar.checks(kept)

    def check(self, question: Question, kept: Kept, answer: dict[str, Any] | None) -> None:
        """Compare what a similar prompt was told with what was computed for it; remove the entry if it was wrong.

        Args:
            question: what was asked.
            kept: what was told.
            answer: what was computed; None: it is not finished.
        """
        if self._similar is not None:
            self._similar.check(question, kept, answer)

    def reopen_similar(self) -> bool:
        """Answer similar prompts again after checks of what they were told have shut this. They are counted anew.

        Returns:
            Whether similar prompts are answered at all, as the operator has it.
        """
        if self._similar is not None:
            self._similar.reopen()
        return self._similar is not None

    def _counts(self, question: Question, kept: Kept, going_on: Collection[str]) -> bool:
        runs = kept.label.weights.split(",")
        return all(run in going_on for run in runs) and kept.young_enough(question, self.now())

    async def close(self) -> None:
        """Finish what is being stored, and let go of the store. What has not begun by :data:`CLOSE_SECONDS` is not."""
        await self.flights.close()
        if self._writes:
            await asyncio.wait(self._writes, timeout=CLOSE_SECONDS)
        loop = asyncio.get_running_loop()
        similar = () if self._similar is None else (self._similar.close,)
        for close in (partial(self._writer.shutdown, cancel_futures=True), self._threads.close, *similar):
            await loop.run_in_executor(None, close)
        await asyncio.gather(*self._writes, return_exceptions=True)  # those that were not begun are cancelled
        self._store.close()

    def _saved(self, kept: Kept) -> None:
        self.metrics.saved_seconds.inc(kept.seconds)
        self.metrics.saved_tokens.inc(tokens_of(kept.answer))

    async def _compute(
        self, question: Question, compute: Callable[[], Awaitable[bytes]], run: str
    ) -> tuple[Answered, Kept | None]:
        began = time.monotonic()
        content = await compute()
        answer = read_answer(content, question.request.chat, question.request.stream, MOST_ANSWER_BYTES)
        return Answered(content), self.keep(question, answer, (run,), time.monotonic() - began)

    async def _look_up(self, question: Question, going_on: Collection[str]) -> tuple[Kept | None, str]:
        if self._threads.busy or not self._breaker.allows():
            return None, "skipped"

        def read() -> tuple[Kept | None, str]:
            return read_kept(self._store, self._sealing, question.entry, question.request.canonical.decode())

        try:
            kept, outcome = await self._threads.ask(read, self._tell_breaker)
        except TimeoutError:
            return None, "late"
        except StoreError:
            return None, "failed"
        if kept is None:
            return None, outcome
        if not self._counts(question, kept, going_on):
            return None, "old"
        return kept, "hit"

    async def _write(self, searched: Searched | None, label: Label, content: bytes) -> None:
        def write() -> bool:
            similar = self._similar
            prompt = None if similar is None or searched is None else similar.prompt_of(searched, label)
            return self._store.put(Entry(label, self._sealing.seal(label, content), prompt))

        try:
            stored = await asyncio.get_running_loop().run_in_executor(self._writer, write)
        except StoreError as error:
            self._tell_breaker(error)
            self.metrics.kept.labels("failed").inc()
        else:
            self._tell_breaker(None)
            self.metrics.kept.labels("stored" if stored else "too_large").inc()
        finally:
            self._waiting_bytes -= len(content)

    def _tell_breaker(self, error: BaseException | None) -> None:
        was = self._breaker.failure
        if error is None:
            self._breaker.succeeded()
            if was is not None:
                _log.info("the store of responses answers again")
            return
        self._breaker.failed(str(error))
        if was is None and self._breaker.failure is not None:
            _log.warning("requests are computed, none is looked up for a while: %s", error)
