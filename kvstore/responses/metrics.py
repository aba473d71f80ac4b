"""What the cache of answers counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "kvstore_responses_"
_LOOKUP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class ResponseMetrics:
    """Counters since the start, in a registry of their own.

    Args:
        followers: how many requests wait for an equal one now.
    """

    def __init__(self, followers: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        waiting = Gauge(
            "kvstore_responses_followers", "Requests that wait for an equal one under way", registry=self._registry
        )
        waiting.set_function(followers)
        self.passed_by = self._counter(
            "passed_by",
            "Requests that were neither looked up nor kept, by reason: unknown_field, not_determined (neither"
            " temperature 0 nor a seed, nor asked for), no_store, browser (with an Origin), query, no_prompt, too_long,"
            " not_json, elsewhere (a picture, a video or a sound by its address), path",
            "reason",
        )
        self.lookups = self._counter(
            "lookups",
            "Lookups by outcome: hit, miss, old (of instances that have restarted, or older than max-age), other_form"
            " (can't be told as the body, or the events, that are asked for), late (beyond the deadline), failed (the"
            " store), skipped (the store fails again and again, or too many wait for it), unreadable (damaged, or of"
            " another key)",
            "outcome",
        )
        self.shared = self._counter("shared", "Requests answered by an equal one that was under way")
        self.kept = self._counter(
            "kept",
            "Answers by whether they were stored: stored, unfinished (not at an end of their own, or not understood),"
            " too_large, unknown_run (the instance has just come back), skipped, failed",
            "outcome",
        )
        self.saved_seconds = self._counter("saved_seconds", "Seconds that the answers of hits had taken")
        self.saved_tokens = self._counter("saved_tokens", "Tokens, of prompt and answer, that hits did not compute")
        self.lookup_seconds = Histogram(
            "kvstore_responses_lookup_seconds",
            "How long a request waited for the store",
            registry=self._registry,
            buckets=_LOOKUP_SECONDS,
        )

        self.similar_hits = self._counter("similar_hits", "Requests answered with what a similar one was answered")
        self.similar_refusals = self._counter(
            "similar_refusals", "Kept prompts that a guard kept from answering a similar one, by guard", "guard"
        )
        self.similar_outcomes = self._counter(
            "similar_outcomes",
            "Answers to computed requests, compared with that of the nearest prompt: right, wrong, undecided",
            "outcome",
        )
        self.similar_shadows = self._counter(
            "similar_shadows", "Hits of similar prompts that were computed as well: right, wrong, undecided", "outcome"
        )
        self.similar_open = Gauge(
            "kvstore_responses_similar_open",
            "Whether similar prompts are answered: 0 when shut by its checks, or off",
            registry=self._registry,
        )
        self.similar_shut = Gauge(
            "kvstore_responses_similar_shut",
            "Whether checks of what similar prompts were told have shut this: too many were wrong",
            registry=self._registry,
        )
        self.similar_disagreement = Gauge(
            "kvstore_responses_similar_disagreement",
            "Share of checked answers to similar prompts that was wrong, since the start or since this was opened"
            " again, from 0 to 1: as counted, and the lower and the upper end of its 95 % interval, which holds at all"
            " times at once",
            ("end",),
            registry=self._registry,
        )
        self.similar_seconds = Histogram(
            "kvstore_responses_similar_seconds",
            "How long a request waited for the search of a similar prompt, its embedding included",
            registry=self._registry,
            buckets=_LOOKUP_SECONDS,
        )

        self.embeddings = self._counter(
            "embeddings",
            "Embeddings of prompts that were asked for: made, late (beyond the deadline), failed (none, or one that"
            " can't be used), skipped (it fails again and again, or too many wait for it)",
            "outcome",
        )
        self.embedding_seconds = Histogram(
            "kvstore_responses_embedding_seconds",
            "How long requests that were computed had waited for the embedding of their prompt: what it adds to the"
            " first token of a miss",
            registry=self._registry,
            buckets=_LOOKUP_SECONDS,
        )

    def value(self, name: str, **labels: str) -> float:
        """Of one sample, by its name without the prefix; 0: it was never counted."""
        return self._registry.get_sample_value(f"{_PREFIX}{name}", labels) or 0.0

    def by_label(self, name: str) -> dict[str, float]:
        """Each value of the only label of a counter, with its count."""
        return {
            value: sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == f"{_PREFIX}{name}_total"
            for value in sample.labels.values()
        }

    def text(self) -> str:
        """Everything, in Prometheus' text format."""
        lines = generate_latest(self._registry).decode().splitlines()
        return "".join(f"{line}\n" for line in lines if "_created" not in line)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}{name}", words, labels, registry=self._registry)
