"""What the prefix cache was asked and what it had, and the hit rate of the requests of late."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    queries: int = 0
    hits: int = 0

    def add(self, queries: int, hits: int) -> None:
        self.requests += 1
        self.queries += queries
        self.hits += hits
