"""Prefix cache statistics: tokens looked up, and those that hit here and in kvstore."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStats:
    """Counts of one stretch of time. A request is counted when it is given blocks, not at each of its lookups.

    Requests that start over after a preemption are apart: they mostly hit blocks that they left themselves, which says
    nothing of what requests share. Numbers are tokens unless they are named requests.
    """

    reset: bool = False
    """Whether this engine's cache was reset within this stretch. What counted before says nothing any longer. Pages of
    kvstore stay, and so do their counts."""

    requests: int = 0
    queries: int = 0
    """All tokens of those requests."""
    hits: int = 0
    """Of these, in blocks of this engine."""

    external_requests: int = 0
    """Requests that kvstore was asked for: those whose every token hit here are not among them."""
    external_queries: int = 0
    """Tokens asked of kvstore: those without a hit in this engine."""
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
        self._reset = False
        self._counts: Counter[str] = Counter()  # by field of the statistics

    def record(self, num_tokens: int, num_local_hits: int, num_external_hits: int | None, preempted: bool) -> None:
        """Count a request that is given blocks. Not for one that skips the lookup.

        Args:
            num_tokens: all tokens of the request.
            num_local_hits: of these, tokens in blocks of this engine.
            num_external_hits: tokens that kvstore supplies besides; None: it was not asked.
            preempted: whether the request had blocks before and lost them.
        """
        kind = "preempted_" if preempted else ""
        self._add(kind, num_tokens, num_local_hits)
        if num_external_hits is not None and num_tokens > num_local_hits:
            self._add(f"{kind}external_", num_tokens - num_local_hits, num_external_hits)

    def record_reset(self) -> None:
        """This engine's cache forgot everything. Counts that were not taken yet stay."""
        self._reset = True

    def take(self) -> PrefixCacheStats:
        """What was counted since the last call."""
        stats = PrefixCacheStats(reset=self._reset, **self._counts)
        self._reset = False
        self._counts.clear()
        return stats

    def _add(self, kind: str, queries: int, hits: int) -> None:
        self._counts.update({f"{kind}requests": 1, f"{kind}queries": queries, f"{kind}hits": hits})
