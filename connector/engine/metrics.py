"""The connector's metrics: what both halves have counted, as changes that the engine's own counters add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.connector.disagg.handover import HandoverStatistics
from kvstore.connector.lookups import LookupStatistics
from kvstore.connector.worker_statistics import WorkerStatistics

Counts = dict[str, float]
"""By the name of a metric, or by name and label, with a ``|`` between them."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter."""

    documentation: str
    label: str = ""


METRICS: Mapping[str, Metric] = {
    "pages_looked_up": Metric(
        "Pages, or parts of pages, that kvstore was asked for: of each request once, behind vLLM's."
    ),
    "pages_found": Metric("Of the pages looked up, those that kvstore had, by tier.", "tier"),
    "pages_loaded": Metric("Pages, or parts of pages, copied into vLLM's blocks, by the tier they came from.", "tier"),
    "pages_not_loaded": Metric("Pages that were to be loaded and were computed: gone, late, or the node failed."),
    "pages_stored": Metric("Pages, or parts of pages, that were stored."),
    "pages_present": Metric("Pages that were to be stored and were there already."),
    "pages_refused": Metric("Pages that the node had no room for."),
    "pages_dropped": Metric("Pages whose store was given up: too late, too many, or their block was needed."),
    "bytes_loaded": Metric("Bytes copied into vLLM's blocks."),
    "bytes_stored": Metric("Bytes copied out of vLLM's blocks."),
    "load_seconds": Metric("Seconds in which the thread that loads was busy."),
    "store_seconds": Metric("Seconds in which the thread that stores was busy."),
    "failures": Metric("Calls or copies that ended with an error, or too late, by what they were for.", "what"),
    "lookups": Metric("Requests that were looked up, by how that went.", "result"),
    "seconds_saved": Metric("Seconds of prefill that loading has saved, less those it took."),
    "tickets": Metric("Tickets between prefill and decode: given, taken, or why one was refused.", "result"),
    "pages_kept": Metric("Pages, or parts of pages, that were pinned because a request asked to keep its prefix."),
    "loads_declined": Metric("Requests whose pages were computed, because loading them would have taken longer."),
}


def worker_counts(statistics: WorkerStatistics) -> Counts:
    """Of the worker half, since the start."""
    plain = (
        "pages_not_loaded",
        "pages_stored",
        "pages_present",
        "pages_refused",
        "pages_dropped",
        "bytes_loaded",
        "bytes_stored",
        "load_seconds",
        "store_seconds",
    )
    counts: Counts = {name: getattr(statistics, name) for name in plain}
    counts |= {f"pages_loaded|{tier}": pages for tier, pages in statistics.pages_loaded.items()}
    for what in ("load_failures", "store_failures", "loads_late", "stores_late"):
        counts[f"failures|{what}"] = getattr(statistics, what)
    return counts


def lookup_counts(statistics: LookupStatistics) -> Counts:
    """Of the scheduler half, since the start."""
    results = ("here", "answered", "late", "skipped", "remembered", "failed")
    counts: Counts = {f"lookups|{result}": getattr(statistics, result) for result in results}
    counts["pages_looked_up"] = statistics.pages_asked
    return counts | {f"pages_found|{tier}": pages for tier, pages in statistics.pages_found.items()}


def ticket_counts(statistics: HandoverStatistics) -> Counts:
    """Of the scheduler half's part in prefill and decode, since the start."""
    counts: Counts = {"tickets|given": statistics.given, "tickets|taken": statistics.taken}
    return counts | {f"tickets|{reason}": count for reason, count in statistics.refused.items()}


class Increments:
    """What has changed since it was last asked."""

    def __init__(self) -> None:
        self._before: Counts = {}

    def take(self, counts: Counts) -> Counts:
        """The changes, without those that are none."""
        changed = {
            name: value - self._before.get(name, 0)
            for name, value in counts.items()
            if value != self._before.get(name, 0)
        }
        if changed:
            self._before = counts
        return changed


def together(one: Mapping[str, float], other: Mapping[str, float]) -> Counts:
    """Counts of two, added."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}
