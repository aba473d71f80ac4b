"""What the prefix cache was asked and what it had, and the hit rate of the requests of late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.connector.blocks.specs import check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats:
    """Counts of one stretch of time. A request is counted when it is given blocks, not at each of its lookups.

    Requests that start over after a preemption are apart: they mostly hit blocks that they left themselves, which says
    nothing of what requests share. Numbers are tokens unless they are named requests.
    """

    reset: bool = False
    """Whether this engine's cache was reset within this stretch. What counted before says nothing any longer. Pages of
    the level below stay, and so do their counts."""

    requests: int = 0
    queries: int = 0
    """All tokens of those requests."""
    hits: int = 0
    """Of these, in blocks of this engine."""

    external_requests: int = 0
    """Requests that the level below was asked for: those whose every token hit here are not among them."""
    external_queries: int = 0
    """Tokens asked of the level below: those without a hit in this engine."""
    external_hits: int = 0
    """Of these, tokens that it supplies."""

    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    preempted_external_requests: int = 0
    preempted_external_queries: int = 0
    preempted_external_hits: int = 0


class PrefixCacheRecorder:
    """Counts until it is asked."""

    def __init__(self) -> None:
        self._begin()

    def record(self, num_tokens: int, num_local_hits: int, num_external_hits: int | None, preempted: bool) -> None:
        """Count a request that is given blocks. Not for one that skips the lookup.

        Args:
            num_tokens: all tokens of the request.
            num_local_hits: of these, tokens in blocks of this engine.
            num_external_hits: tokens that the level below supplies besides; None: it was not asked.
            preempted: whether the request had blocks before and lost them.
        """
        self._local[preempted].add(num_tokens, num_local_hits)
        if num_external_hits is not None and num_tokens > num_local_hits:
            self._external[preempted].add(num_tokens - num_local_hits, num_external_hits)

    def record_reset(self) -> None:
        """This engine's cache forgot everything. Counts that were not taken yet stay."""
        self._reset = True

    def take(self) -> PrefixCacheStats:
        """What was counted since the last call."""
        local, again = self._local[False], self._local[True]
        external, external_again = self._external[False], self._external[True]
        stats = PrefixCacheStats(
            reset=self._reset,
            requests=local.requests,
            queries=local.queries,
            hits=local.hits,
            external_requests=external.requests,
            external_queries=external.queries,
            external_hits=external.hits,
            preempted_requests=again.requests,
            preempted_queries=again.queries,
            preempted_hits=again.hits,
            preempted_external_requests=external_again.requests,
            preempted_external_queries=external_again.queries,
            preempted_external_hits=external_again.hits,
        )
        self._begin()
        return stats

    def _begin(self) -> None:
        self._reset = False
        self._local = {False: _Counts(), True: _Counts()}  # by whether the request was preempted
        self._external = {False: _Counts(), True: _Counts()}


class HitRate:
    """The share of tokens that hit, over the last requests. Preempted ones do not count.

    It takes and drops whole :class:`PrefixCacheStats`: the oldest ones go while more than ``max_recent_requests``
    requests are left, but the newest stay, however many requests they count.

    Args:
        max_recent_requests: at least 1.

    Raises:
        ConfigError: ``max_recent_requests`` out of its range.
    """

    def __init__(self, max_recent_requests: int = 1000) -> None:
        check_at_least(1, max_recent_requests=max_recent_requests)
        self._local = _RecentRequests(max_recent_requests)
        self._external = _RecentRequests(max_recent_requests)

    def observe(self, stats: PrefixCacheStats) -> None:
        """Take the counts that follow those before. Ones without a request push nothing out."""
        if stats.reset:
            self._local.clear()
        self._local.append(_Counts(stats.requests, stats.queries, stats.hits))
        self._external.append(_Counts(stats.external_requests, stats.external_queries, stats.external_hits))

    @property
    def hit_rate(self) -> float:
        """The share of tokens found in this engine, 0.0 … 1.0; 0.0 when none was asked for."""
        return self._local.hit_rate

    @property
    def external_hit_rate(self) -> float:
        """Of the tokens asked of the level below, the share that it supplied, 0.0 … 1.0; 0.0 when none was asked for.

        A reset of this engine's cache does not begin it anew.
        """
        return self._external.hit_rate


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    queries: int = 0
    hits: int = 0

    def add(self, queries: int, hits: int) -> None:
        self.requests += 1
        self.queries += queries
        self.hits += hits


class _RecentRequests:
    """Counts, oldest first, and their sum, so that asking costs the same however many there are."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.clear()

    def clear(self) -> None:
        self._recent: deque[_Counts] = deque()
        self._sum = _Counts()

    def append(self, counts: _Counts) -> None:
        if not counts.requests:
            return
        self._recent.append(counts)
        self._add(counts, 1)
        while self._sum.requests > self._max_requests and len(self._recent) > 1:
            self._add(self._recent.popleft(), -1)

    @property
    def hit_rate(self) -> float:
        return self._sum.hits / self._sum.queries if self._sum.queries else 0.0

    def _add(self, counts: _Counts, sign: int) -> None:
        self._sum.requests += sign * counts.requests
        self._sum.queries += sign * counts.queries
        self._sum.hits += sign * counts.hits
