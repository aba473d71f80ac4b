"""A node's counters and gauges as Prometheus metrics.

Names and labels are a contract with dashboards: docs/metrics.md lists them. Everything of the store is read when it is
scraped, in one go; only the times of calls are taken as they happen.
"""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.status import LookupTotals, Status, TierState
from kvstore.tiers.latencies import BOUNDS, Latencies
from kvstore.tiers.prices import dollars_of
from kvstore.tiers.tier import Traffic

MOST_NAMESPACES = 64
"""Namespaces with metrics of their own. All others are one, called ``OTHERS``."""
OTHERS = "(others)"

_STATES = (TierState.OK, TierState.DEGRADED, TierState.DOWN)
_BYTES = ("read_bytes", "written_bytes")
_GAUGES = {"dirty": "Pages of the arena that no tier below has yet."}


class _Series(NamedTuple):
    """What a namespace with a label was counted."""

    before: Counts[str]
    """Before it had the label: that stays with the others."""
    last: Counts[str]
    """At the last look."""


class Labels:
    """Which namespaces have metrics of their own, and what is counted of the others. Safe for threads.

    A namespace keeps its label until it is dropped; then the namespace that takes most gets its label. Each page is
    counted in one series alone, also when its namespace gets a label or is dropped, so the increases of all series
    together are what happened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._labelled: dict[int, _Series] = {}
        """By the namespace's number."""
        self._unlabelled: set[int] = set()
        self._ended: Counts[str] = Counts()
        """What the series of namespaces that were dropped had shown."""
        self._others: Counts[str] = Counts()

    def give(self, look: Callable[[], Status]) -> tuple[Status, dict[bytes, Counts[str]], Counts[str]]:
        """The status now, the counts of those that have a label (by fingerprint), and those of all others."""
        with self._lock:  # around the look, too: a status that is older than the last one would count twice
            status = look()
            here = {status.numbers[each.fingerprint]: each for each in status.namespaces}
            for number, series in list(self._labelled.items()):
                each = here.get(number)
                # One that is dropped just now may be listed still, without what was counted.
                if each is None or any(each.counters[name] < count for name, count in series.last.items()):
                    self._ended.update(series.last)
                    self._ended.subtract(series.before)
                    del self._labelled[number]
                else:
                    self._labelled[number] = series._replace(last=Counts(each.counters))
            without = sorted(
                (number for number in here if number not in self._labelled),
                key=lambda number: sum(here[number].used_bytes.values()),
                reverse=True,
            )
            free = MOST_NAMESPACES - len(self._labelled)
            for number in without[:free]:
                counts = Counts(here[number].counters)
                self._labelled[number] = _Series(counts if number in self._unlabelled else Counts(), counts)
            self._unlabelled = set(without[free:])
            others: Counts[str] = Counts()
            for counted in (
                *status.gone.values(),
                *(here[number].counters for number in self._unlabelled),
                *(series.before for series in self._labelled.values()),
            ):
                others.update(counted)
            others.subtract(self._ended)
            self._others |= others  # while a namespace is dropped it is neither listed nor gone
            own = {here[number].fingerprint: series.last - series.before for number, series in self._labelled.items()}
            return status, own, Counts(self._others)


class NodeCollector(Collector):
    """The metrics of a node's status; ``labels`` are the same for all scrapes by those who see the same namespaces."""

    def __init__(self, status: Callable[[], Status], labels: Labels) -> None:
        self._status = status
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Everything, from one status."""
        status, own, others = self._labels.give(self._status)
        yield InfoMetricFamily("kvstore", "The node's version.", {"version": status.version})
        yield GaugeMetricFamily("kvstore_clients", "Clients that share the arena.", status.clients)
        yield GaugeMetricFamily(
            "kvstore_certificate_end_timestamp_seconds",
            "When the certificate ends that the node shows.",
            status.certificate_ends or None,
        )
        yield from _tiers(status)
        yield from _namespaces(status, own, others)


def _tiers(status: Status) -> Iterator[Metric]:
    used = GaugeMetricFamily("kvstore_tier_used_bytes", "Bytes that count against the tier's limit.", labels=["tier"])
    limit = GaugeMetricFamily("kvstore_tier_limit_bytes", "Most bytes that the tier takes.", labels=["tier"])
    pages = GaugeMetricFamily("kvstore_tier_pages", "Pages in the tier.", labels=["tier"])
    events = CounterMetricFamily("kvstore_pages", "Pages by what happened to them.", labels=["tier", "event"])
    moved = CounterMetricFamily("kvstore_tier_io_bytes", "Bytes read and written.", labels=["tier", "direction"])
    states = GaugeMetricFamily("kvstore_tier_state", "1 for the state that the tier is in.", labels=["tier", "state"])
    gauges = {name: GaugeMetricFamily(f"kvstore_{name}_pages", text, labels=["tier"]) for name, text in _GAUGES.items()}
    for tier in status.tiers:
        used.add_metric([tier.name], tier.used_bytes)
        limit.add_metric([tier.name], tier.limit_bytes)
        pages.add_metric([tier.name], tier.pages)
        if tier.health.state is not TierState.UNKNOWN:
            for state in _STATES:
                states.add_metric([tier.name, state.name.lower()], float(state is tier.health.state))
        for name, count in tier.counters.items():
            if name in _GAUGES:
                gauges[name].add_metric([tier.name], count)
            elif name in _BYTES:
                moved.add_metric([tier.name, name.removesuffix("_bytes")], count)
            else:
                events.add_metric([tier.name, name], count)
    yield from (used, limit, pages, states, events, moved, *gauges.values())


def _namespaces(status: Status, own: Mapping[bytes, Counts[str]], others: Counts[str]) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvstore_namespaces", "Namespaces that the node knows.", len(status.namespaces))
    used = GaugeMetricFamily(
        "kvstore_namespace_used_bytes", "Bytes of the namespace's pages.", labels=["namespace", "tier"]
    )
    quota = GaugeMetricFamily(
        "kvstore_namespace_quota_bytes",
        "Most bytes that they may take, where that is said.",
        labels=["namespace", "tier"],
    )
    pages = GaugeMetricFamily("kvstore_namespace_arena_pages", "Its pages in the arena.", labels=["namespace"])
    pinned = GaugeMetricFamily("kvstore_namespace_pinned_pages", "Of these, pinned.", labels=["namespace"])
    lookups = CounterMetricFamily(
        "kvstore_namespace_lookups",
        "Its pages that lookups asked for, by where they were found: the hit ratio.",
        labels=["namespace", "found"],
    )
    loads = CounterMetricFamily(
        "kvstore_namespace_loads",
        "Its pages that loads asked for, by where they were found.",
        labels=["namespace", "found"],
    )
    stores = CounterMetricFamily(
        "kvstore_namespace_stores", "Its pages that were offered, by the answer.", labels=["namespace", "answer"]
    )
    bytes_of: dict[tuple[str, str], int] = Counts()
    pages_of: dict[str, int] = Counts()
    pinned_of: dict[str, int] = Counts()
    counts_of: dict[str, Counts[str]] = {}
    for each in status.namespaces:
        # Two layouts may have one name: the fingerprint tells them apart, in the form that `kvstore status` prints.
        name = f"{each.fingerprint.hex()[:12]} {each.name}" if each.fingerprint in own else OTHERS
        pages_of[name] += each.arena_pages
        pinned_of[name] += each.pinned_pages
        counts_of[name] = own.get(each.fingerprint, others)
        for tier, size in each.used_bytes.items():
            bytes_of[name, tier] += size
        if name != OTHERS:
            for tier, size in each.quota_bytes.items():
                quota.add_metric([name, tier], size)
    if others:
        counts_of[OTHERS] = others
    for (name, tier), size in bytes_of.items():
        used.add_metric([name, tier], size)
    for name, count in pages_of.items():
        pages.add_metric([name], count)
        pinned.add_metric([name], pinned_of[name])
    for name, counts in counts_of.items():
        totals = LookupTotals.of(counts)
        for found in ("arena", "disk", "redis", "objects"):
            lookups.add_metric([name, found], getattr(totals, found))
        lookups.add_metric([name, "missed"], totals.asked - totals.found)
        for found in ("arena", "disk", "redis", "objects", "missed"):
            loads.add_metric([name, found], counts[found])
        for answer in ("stored", "present", "refused"):
            stores.add_metric([name, answer], counts[answer])
    yield from (used, quota, pages, pinned, lookups, loads, stores)


class TierTimesCollector(Collector):
    """Latencies of the lower tiers' calls."""

    def __init__(self, times: Callable[[], Sequence[Latencies]]) -> None:
        self._times = times

    def collect(self) -> Iterable[Metric]:
        """Everything, as histograms."""
        seconds = HistogramMetricFamily(
            "kvstore_tier_seconds", "Calls of a tier, each for a batch of pages.", labels=["tier", "operation"]
        )
        for each in self._times():
            bounds = [*map(str, BOUNDS), "+Inf"]
            buckets = list(zip(bounds, accumulate(each.counts), strict=True))
            seconds.add_metric([each.tier, each.operation], buckets, each.seconds)
        yield seconds


class ObjectsCollector(Collector):
    """What is asked of object storage, by the classes by which it is paid for."""

    def __init__(self, traffic: Callable[[], Traffic] | None) -> None:
        """``traffic`` says it; None: there is no object storage, and the metrics have no samples."""
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        """Everything of it."""
        traffic = self._traffic() if self._traffic is not None else None
        asked = CounterMetricFamily(
            "kvstore_objects_requests", "Requests to object storage, by class.", labels=["request"]
        )
        failed = CounterMetricFamily("kvstore_objects_request_errors", "Of these, failed.", labels=["request"])
        seconds = CounterMetricFamily("kvstore_objects_request_seconds", "What they took.", labels=["request"])
        dollars = CounterMetricFamily(
            "kvstore_objects_request_dollars", "What they cost by S3's prices, about.", labels=["request"]
        )
        moved = CounterMetricFamily(
            "kvstore_objects_bytes", "Bytes of objects that went to object storage and came from it.", labels=["way"]
        )
        if traffic is not None:
            for request, count in traffic.requests.items():
                asked.add_metric([request], count)
                failed.add_metric([request], traffic.errors[request])
                seconds.add_metric([request], traffic.seconds[request])
            for request, cost in dollars_of(traffic.requests).items():
                dollars.add_metric([request], cost)
            moved.add_metric(["sent"], traffic.sent_bytes)
            moved.add_metric(["received"], traffic.received_bytes)
        yield from (asked, failed, seconds, dollars, moved)


def node_registry(status: Callable[[], Status], labels: Labels) -> CollectorRegistry:
    """A registry of a node's own, with what the system says of its process."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(status, labels))
    ProcessCollector(registry=registry)
    return registry
