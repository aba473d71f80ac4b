"""Limits of each tenant: calls, streams and bulk connections at once, requests and bytes a second.

What is refused here is counted, and is a miss for the client. A token of every tenant is an operator's own, and has no
limits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvstore.config.rules import TenantRule
from kvstore.errors import LimitExceededError
from kvstore.security.grants import EVERYTHING, Grant
from kvstore.units import format_size

LEAST_REPORTS = 10
"""Reports a second that a tenant with a limit of requests may make at least."""
MOST_NAMED = 64
"""Tenants whose refused requests are counted by name: the first ones. All others are one, called ``OTHERS``."""
OTHERS = "(others)"
TENANT_SHARE = 2
"""One tenant has at most one part in so many of what a node can do at once: the rest is left to others."""


class _TokenBucket:
    """A token bucket that holds one second of its rate. May be overdrawn by amounts that are known afterwards only."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = rate
        self._at = now

    def allows(self, now: float) -> bool:
        self._level = min(self.rate, self._level + (now - self._at) * self.rate)
        self._at = now
        return self._level > 0

    def take(self, amount: float) -> None:
        self._level -= amount


class TenantLimits:
    """The limits of all tenants. Safe for threads.

    Args:
        rules: of tenants by name; a tenant without one has limits on what it does at once alone.
        calls: most calls at once of one tenant.
        streams: most payload streams at once.
        others: most streams of other kinds at once.
        connections: most bulk connections, and tokens for such, at once.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        rules: Iterable[TenantRule] = (),
        *,
        calls: int = 1,
        streams: int = 1,
        others: int = 1,
        connections: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = {
            "calls": calls,
            "payload streams": streams,
            "other streams": others,
            "bulk connections": connections,
        }
        self._clock = clock
        self._lock = threading.Lock()
        self._open: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._named: set[str] = set()
        self._requests: dict[str, _TokenBucket] = {}
        self._reports: dict[str, _TokenBucket] = {}
        """Apart from requests, at the same rate: whoever keeps to its requests makes no more reports than these."""
        self._bytes: dict[str, _TokenBucket] = {}
        self.replace(rules)

    def replace(self, rules: Iterable[TenantRule]) -> None:
        """These count from now on, and no others."""
        rules = tuple(rules)
        now = self._clock()
        with self._lock:
            requests = {rule.name: rule.requests_per_second for rule in rules if rule.requests_per_second}
            self._requests = _buckets(requests, now)
            self._reports = _buckets({name: max(rate, LEAST_REPORTS) for name, rate in requests.items()}, now)
            self._bytes = _buckets({rule.name: rule.bytes_per_second for rule in rules}, now)

    @contextmanager
    def call(self, grant: Grant, stream: str = "", *, reports: bool = False) -> Iterator[None]:
        """One call of a caller. ``stream``: which kind of stream it is; empty: none. ``reports``: whether it only tells
        what other calls did, which were counted themselves.

        Raises:
            LimitExceededError: it is one too many.
        """
        if grant.every:
            yield
            return
        if reports:
            self._begin_report(grant)
        else:
            self.begin(grant)
        with self.slot(grant, "calls"):
            if not stream:
                yield
                return
            with self.slot(grant, stream):
                yield

    def begin(self, grant: Grant) -> None:
        """Count one request of a caller.

        Raises:
            LimitExceededError: it is one too many, or what came before it moved too many bytes.
        """
        with self._lock:
            now = self._clock()
            requests, moved = self._requests.get(grant.tenant), self._bytes.get(grant.tenant)
            if grant.every or (requests is None and moved is None):
                return
            if requests is not None and not requests.allows(now):
                self._refuse(grant, "requests", f"makes more than its limit of {requests.rate:g} requests a second")
            if moved is not None and not moved.allows(now):
                self._refuse(grant, "bytes", f"moves more than its limit of {format_size(int(moved.rate))} a second")
            if requests is not None:
                requests.take(1)

    def _begin_report(self, grant: Grant) -> None:
        with self._lock:
            bucket = self._reports.get(grant.tenant)
            if bucket is None:
                return
            if not bucket.allows(self._clock()):
                self._refuse(grant, "reports", f"makes more than its limit of {bucket.rate:g} reports a second")
            bucket.take(1)

    def spend(self, grant: Grant, size: int) -> None:
        """So many bytes of pages were moved for a caller."""
        if not grant.every and self._bytes:
            with self._lock:
                if (bucket := self._bytes.get(grant.tenant)) is not None:
                    bucket.allows(self._clock())
                    bucket.take(size)

    @contextmanager
    def slot(self, grant: Grant, kind: str) -> Iterator[None]:
        """One of a tenant's calls, streams or bulk connections at once.

        Raises:
            LimitExceededError: it has as many as it may.
        """
        if grant.every:
            yield
            return
        key = grant.tenant, kind
        with self._lock:
            if self._open[key] >= self._most[kind]:
                self._refuse(grant, kind, f"has {self._open[key]} {kind} open, the limit")
            self._open[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[key] -= 1
                if not self._open[key]:
                    del self._open[key]

    def refused(self) -> dict[tuple[str, str], int]:
        """By tenant and limit, how often it was in the way; the first ``MOST_NAMED`` tenants by name."""
        with self._lock:
            return dict(self._refused)

    def _refuse(self, grant: Grant, limit: str, words: str) -> None:
        if len(self._named) < MOST_NAMED:
            self._named.add(grant.tenant)
        self._refused[grant.tenant if grant.tenant in self._named else OTHERS, limit] += 1
        raise LimitExceededError(f"tenant {grant.tenant!r} {words}; try again later")


def _buckets(rates: Mapping[str, int], now: float) -> dict[str, _TokenBucket]:
    return {tenant: _TokenBucket(rate, now) for tenant, rate in rates.items() if rate}


class LimitsCollector(Collector):
    """What limits refused to the tenants that ``grant`` is for, as a counter for Prometheus."""

    def __init__(self, limits: TenantLimits, grant: Grant = EVERYTHING) -> None:
        self._limits = limits
        self._grant = grant

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One counter."""
        family = CounterMetricFamily(
            "kvstore_tenant_refused", "Requests beyond a tenant's limits.", labels=["tenant", "limit"]
        )
        for (tenant, limit), count in self._limits.refused().items():
            if self._grant.every or tenant == self._grant.tenant:
                family.add_metric([tenant, limit], count)
        yield family
