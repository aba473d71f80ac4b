"""The proxy's requests before its cache of answers: who is told an answer that was given before, and whose is kept."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import hdrs, web

from kvstore.connector.proxy.exchange import Exchange
from kvstore.connector.proxy.runs import Runs
from kvstore.responses import ResponseCache
from kvstore.responses.answer import StreamRecorder
from kvstore.responses.flight import Flight
from kvstore.responses.kept import MOST_ANSWER_BYTES, Kept, Question
from kvstore.responses.policy import CacheControl, Caller, caller_of
from kvstore.responses.request import NotCacheable

_SAID = "X-KVStore-Cache"
_MOST_CHECKS = 4
"""Of answers to similar prompts, at once."""

Compute = Callable[[Exchange], Awaitable[web.StreamResponse]]


class CachedAnswers:
    """Owns the cache.

    Args:
        cache: where answers are.
        tenants: whose keys share them: by API key.
        runs: of the instances.
    """

    def __init__(self, cache: ResponseCache, tenants: Mapping[str, str], runs: Runs) -> None:
        self._cache = cache
        self._tenants = tenants
        self._runs = runs
        self._checks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Find out who the instances are."""
        await self._runs.start()

    async def stop(self) -> None:
        """Store what is on its way, and let go."""
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._runs.stop()
        await self._cache.close()

    def use(self, tenants: Mapping[str, str]) -> None:
        """Other tenants from now on."""
        self._tenants = tenants

    def metrics_text(self) -> str:
        """What it counts, in Prometheus' text format."""
        return self._cache.metrics.text()

    def report(self) -> dict[str, Any]:
        """What it has done, for people."""
        return self._cache.report()

    async def answer(self, exchange: Exchange, compute: Compute) -> web.StreamResponse:
        """The answer to a request, from the cache where one is there, else computed."""
        request = exchange.request
        for name, reason in ((request.query_string, "query"), (request.headers.get(hdrs.ORIGIN), "browser")):
            if name:
                self._cache.metrics.passed_by.labels(reason).inc()
                return await compute(exchange)
        control = CacheControl.read(",".join(request.headers.getall(hdrs.CACHE_CONTROL, [])))
        question = self._cache.question(request.path, exchange.asked, self._caller(request), control)
        if isinstance(question, NotCacheable):
            return await compute(exchange)
        if not control.looks_up:
            return (await self._computed(exchange, question, compute, lambda: False))[0]
        flight, leads = self._cache.flights.join(question.entry)
        if leads:
            return await flight.lead(self._led(exchange, question, compute, flight))
        kept = await flight.follow()
        if kept is not None and (content := self._cache.share(question, kept)) is not None:
            return self._told(question, kept, content)
        return (await self._computed(exchange, question, compute, lambda: False))[0]

    async def _led(
        self, exchange: Exchange, question: Question, compute: Compute, flight: Flight[Kept]
    ) -> web.StreamResponse:
        if (hit := await self._cache.look_up(question, self._runs.going_on())) is not None:
            flight.finish(hit[0])
            if self._cache.checks(hit[0]) and len(self._checks) < _MOST_CHECKS:
                check = asyncio.create_task(self._check(exchange, question, compute, hit[0]))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)
            return self._told(question, *hit)
        response, kept = await self._computed(exchange, question, compute, lambda: flight.followed)
        flight.finish(kept)
        return response

    async def _check(self, exchange: Exchange, question: Question, compute: Compute, kept: Kept) -> None:
        """Compute what a similar prompt was told."""
        again = exchange.without_client()
        again.keep_answer(lambda: StreamRecorder(question.request.chat, MOST_ANSWER_BYTES), lambda: True)
        await compute(again)
        self._cache.check(question, kept, again.recorded(MOST_ANSWER_BYTES))

    async def _computed(
        self, exchange: Exchange, question: Question, compute: Compute, goes_on: Callable[[], bool]
    ) -> tuple[web.StreamResponse, Kept | None]:
        exchange.keep_answer(lambda: StreamRecorder(question.request.chat, MOST_ANSWER_BYTES), goes_on)
        began = time.monotonic()
        response = await compute(exchange)
        answer = exchange.recorded(MOST_ANSWER_BYTES)
        return response, self._cache.keep(question, answer, self._runs.of(exchange.made_by), time.monotonic() - began)

    def _told(self, question: Question, kept: Kept, content: bytes) -> web.Response:
        headers = {
            hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8" if question.request.stream else "application/json",
            hdrs.AGE: str(kept.age(self._cache.now())),
            _SAID: f"hit; similarity={_similarity(kept)}; entry={kept.label.entry}",
        }
        return web.Response(body=content, headers=headers)

    def _caller(self, request: web.Request) -> Caller:
        return caller_of(request.headers, self._tenants, _certificate_of(request))


def _similarity(kept: Kept) -> str:
    return "1" if kept.found is None else f"{kept.found.similarity:.3f}"


def _certificate_of(request: web.Request) -> str:
    """A digest of the certificate that a client showed; empty: none."""
    tls = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    shown = tls.getpeercert(binary_form=True) if isinstance(tls, ssl.SSLObject) else None
    return hashlib.sha256(shown).hexdigest() if shown else ""
